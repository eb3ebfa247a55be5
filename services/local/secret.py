"""A secret of a cluster: made once, then kept, in a file that only its user reads."""

import os
import secrets
from pathlib import Path


def kept_secret(file: Path) -> str:
    """The secret in a file; makes the file where there is none.

    Only one process at a time may make the same file.
    """
    if not file.exists():
        # Under another name first: whoever finds the file finds a whole secret in it.
        new = file.with_name(file.name + ".new")
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            opened.write(secrets.token_hex(32) + "\n")
            opened.flush()
            os.fsync(opened.fileno())
        new.replace(file)
    return file.read_text().strip()
