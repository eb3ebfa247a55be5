"""Runs of Python under several hash seeds: what is deterministic prints the same under each."""

import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def printed_under_salts(*command: str) -> set[str]:
    """What `python command` prints under two hash seeds: one text where it does not depend on them."""
    path = f"{_ROOT / 'shared'}{os.pathsep}{_ROOT}"
    return {
        subprocess.run(
            [sys.executable, *command],
            env={**os.environ, "PYTHONHASHSEED": salt, "PYTHONPATH": path},
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            text=True,
            timeout=250,
            check=True,
        ).stdout
        for salt in ("1", "2")
    }
