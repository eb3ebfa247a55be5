"""The program `python -m services.metadata`."""

import os

from quorumlog.net.service import run_service
from services.metadata.app import build
from services.metadata.config import Config

if __name__ == "__main__":
    run_service("metadata", build, Config.of_process("services.metadata", os.environ))
