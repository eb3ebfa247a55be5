"""`quorumlog …`: ledgers, logs and the cluster from a shell.

Exit status: 0 done; 1 an error, and nothing was done; 2 wrong usage; 3 an error after which nobody
can say whether it was done; 4 what was asked for is not there; 5 what was waited for has not come;
130 Ctrl-C; 141 whoever read the output has closed it.

The folder may use the SDK and the errors, typer and rich, and nothing of the servers: the base
package carries the folder, the extra `cli` brings what it imports.
"""

import sys
from typing import Final

_EXTRA: Final = ("typer", "rich")
"""What the extra `cli` brings (pyproject.toml)."""


def main() -> None:
    """Run the command line."""
    try:
        from quorumlog.cli.commands import app  # noqa: PLC0415  (the extra may be missing)
    except ModuleNotFoundError as missing:
        if missing.name not in _EXTRA:
            raise
        sys.exit("quorumlog: the command line needs its extra: pip install 'quorumlog[cli]'")
    app()
