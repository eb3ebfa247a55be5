"""Networking shared by all services: the driver of a protocol machine, clients of the other
services, listening, shutdown, health, logs, traces, and operations with their OpenAPI document.

The package may import `protocol` and `wire`. The SDK does not import this package.
"""
