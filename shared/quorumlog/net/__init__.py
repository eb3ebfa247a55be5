"""What services do over the network: the driver that runs a machine, clients of the other services,
and what every service has (listening, shutdown, health, logs, traces, operations and their OpenAPI).

May use `protocol` and `wire`; the SDK does not use it.
"""
