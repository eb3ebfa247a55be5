"""`python -m services.bookie` runs a bookie, or a command on a stopped bookie's directory."""

import os
import sys

from quorumlog.net.service import run_service
from services.bookie.app import build
from services.bookie.config import Config

if __name__ == "__main__":
    os.umask(0o027)  # RocksDB creates files that everyone may read, unless a umask forbids it
    if len(sys.argv) > 1:
        # Imported late: the tools' packages take 0.1 s to load, and serving needs none of them.
        from services.bookie import tools

        tools.run()
    run_service("bookie", build, Config.read(os.environ))
