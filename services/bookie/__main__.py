"""`python -m services.bookie`."""

import os

from quorumlog.net.service import run_service
from services.bookie.app import build
from services.bookie.config import Config

if __name__ == "__main__":
    run_service("bookie", build, Config.read(os.environ))
