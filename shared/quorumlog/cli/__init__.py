"""`quorumlog …`: ledgers, logs and the cluster from a shell.

docs/guides/cli.md has the exit statuses (`output.ExitStatus`) and the form of errors.

The folder may use the SDK and the errors, aiohttp, typer and rich, and nothing of the servers: the base
package carries the folder, the extra `cli` brings what the folder imports.
"""

import os
import sys
from typing import Final

_EXTRA: Final = ("typer", "rich")
"""The packages of the extra `cli` (pyproject.toml)."""


def main() -> None:
    """Run the command line."""
    for name in ("stdout", "stderr"):  # absent where the shell closed them (`>&-`)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
    try:
        from quorumlog.cli.commands import app  # noqa: PLC0415  (the extra may be missing)
        from quorumlog.cli.output import flush_output, run_command  # noqa: PLC0415
    except ModuleNotFoundError as missing:
        if missing.name not in _EXTRA:
            raise
        sys.exit("quorumlog: the command line needs its extra: pip install 'quorumlog[cli]'")
    except KeyboardInterrupt:
        sys.exit(130)
    status = run_command(app, sys.argv[1:])
    flush_output()
    sys.exit(status)
