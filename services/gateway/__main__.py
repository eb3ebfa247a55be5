"""Runs a gateway: `python -m services.gateway`."""

import os

from quorumlog.net.service import run_service
from services.gateway.app import create_apps
from services.gateway.config import GatewaySettings

if __name__ == "__main__":
    run_service("gateway", create_apps, GatewaySettings.of_process("services.gateway", os.environ))
