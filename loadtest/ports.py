"""Ports for tests and load: see services.local.process for why they are leased."""

from services.local.process import free_ports

__all__ = ["free_ports"]
