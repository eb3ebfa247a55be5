"""`python -m services.autorecovery`."""

import os

from quorumlog.net.service import run_service
from services.autorecovery.app import build
from services.autorecovery.config import Config

if __name__ == "__main__":
    run_service("autorecovery", build, Config.read(os.environ))
