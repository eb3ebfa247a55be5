"""`quorumlog …`: ledgers, logs and the cluster from a shell.

Exit status: 0 done; 1 an error, and nothing was done; 2 wrong usage; 3 an error with an unknown
outcome; 4 the requested thing does not exist; 5 a wait timed out; 130 Ctrl-C; 141 the reader of the
output has closed it.

The folder may use the SDK and the errors, typer and rich, and nothing of the servers: the base
package carries the folder, the extra `cli` brings what the folder imports.
"""

import sys
from typing import Final

_EXTRA: Final = ("typer", "rich")
"""The packages of the extra `cli` (pyproject.toml)."""


def main() -> None:
    """Run the command line."""
    try:
        from quorumlog.cli.commands import app  # noqa: PLC0415  (the extra may be missing)
    except ModuleNotFoundError as missing:
        if missing.name not in _EXTRA:
            raise
        sys.exit("quorumlog: the command line needs its extra: pip install 'quorumlog[cli]'")
    app()
