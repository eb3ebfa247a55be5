"""Ports for tests and load: see services.local.ports for why they are leased."""

from services.local.ports import free_ports

__all__ = ["free_ports"]
