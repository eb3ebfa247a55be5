"""`python -m services.bookie` serves; with a command it looks into a stopped bookie's directory."""

import os
import sys

from quorumlog.net.service import run_service
from services.bookie.app import build
from services.bookie.config import Config

if __name__ == "__main__":
    os.umask(0o027)  # RocksDB gives its files to everyone whom this does not keep out
    if len(sys.argv) > 1:
        # Late: the packages behind it take a tenth of a second, and a bookie that serves needs none of them.
        from services.bookie import tools

        tools.run()
    run_service("bookie", build, Config.read(os.environ))
