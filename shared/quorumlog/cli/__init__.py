"""`quorumlog …`: ledgers, logs and the cluster from a shell.

docs/guides/cli.md describes the exit statuses (`output.ExitStatus`) and the format of errors.

This folder may use the SDK and the errors, aiohttp, typer and rich, and nothing of the servers. The
folder is part of the base package; the extra `cli` installs the packages that it imports.
"""

import os
import sys
from typing import Final

_EXTRA: Final = ("typer", "rich")
"""The packages that the extra `cli` installs (pyproject.toml)."""


def main() -> None:
    """Run the command line."""
    for name in ("stdout", "stderr"):  # the stream is None if the shell closed it (`>&-`)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
    try:
        from quorumlog.cli.commands import app  # noqa: PLC0415  (the extra may be missing)
        from quorumlog.cli.output import flush_output, run_command  # noqa: PLC0415
    except ModuleNotFoundError as missing:
        if missing.name not in _EXTRA:
            raise
        sys.exit("quorumlog: the command line needs the extra cli: pip install 'quorumlog[cli]'")
    except KeyboardInterrupt:
        sys.exit(130)
    status = run_command(app, sys.argv[1:])
    flush_output()
    sys.exit(status)
