"""Ports for tests and load. `services.local.process` explains why ports are leased."""

from services.local.process import free_ports

__all__ = ["free_ports"]
