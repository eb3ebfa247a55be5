"""`python -m services.bookie` serves; with a command it looks into a stopped bookie's directory."""

import os
import sys

from quorumlog.net.service import run_service
from services.bookie import tools
from services.bookie.app import build
from services.bookie.config import Config

if __name__ == "__main__":
    if len(sys.argv) > 1:
        tools.app()
    run_service("bookie", build, Config.read(os.environ))
