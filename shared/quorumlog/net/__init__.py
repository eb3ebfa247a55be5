"""Networking that services share: the driver that runs a protocol machine, clients of the other
services, listening, shutdown, health, logs, traces, and operations with their OpenAPI document.

The package may use `protocol` and `wire`, and the SDK does not use it.
"""
