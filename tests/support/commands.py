"""Commands of pages, as a shell runs them where `quorumlog` is installed."""

import os
import sys
from pathlib import Path


def path_with_quorumlog(folder: Path) -> str:
    """A PATH with this checkout's command line, as a program that is written to `folder`."""
    program = folder / "bin" / "quorumlog"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m quorumlog.cli "$@"\n')
    program.chmod(0o755)
    return f"{program.parent}{os.pathsep}{os.environ['PATH']}"
