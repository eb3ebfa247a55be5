"""Runs autorecovery: `python -m services.autorecovery`."""

import os

from quorumlog.net.service import run_service
from services.autorecovery.app import build
from services.autorecovery.config import Config

if __name__ == "__main__":
    run_service("autorecovery", build, Config.of_process("services.autorecovery", os.environ))
