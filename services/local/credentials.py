"""`python -m services.local.credentials FOLDER CLUSTER ROLE/NAME…`: what the services of compose.yaml know each other by.

Everything is made once and kept; certificates are renewed in time. Each role has a folder of its own below FOLDER, and no
service is given another role's: who takes over a bookie can't speak as the metadata service. Only one process at a
time may do this.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from quorumlog.certificates import create_authority, key_file, replace_file
from services.local.certificates import kept_certificate
from services.local.secret import kept_secret

_AUTHORITY: Final = "authority"
_LISTENING: Final = ("metadata", "bookie", "gateway", "autorecovery")
_FOR_THE_GROUP: Final = 0o640
"""Postgres, Prometheus and Grafana run as other users, which are in the folder's group."""


def keep_credentials(folder: Path, cluster: str, processes: Iterable[str]) -> None:
    """Make what is missing of the certificates of processes, ROLE/NAME, and of the passwords."""
    authority = folder / _AUTHORITY
    if not (authority / "ca.pem").exists():
        create_authority(authority, cluster)
    for process in processes:
        role, _, name = process.partition("/")
        into = folder / role
        into.mkdir(mode=0o750, exist_ok=True)
        # A process is also asked from within its container.
        hosts = (name, "localhost") if role in _LISTENING else ()
        certificate = kept_certificate(authority, into, role, name, hosts)
        if role == "monitor":
            key_file(certificate).chmod(_FOR_THE_GROUP)
        _keep(into / "ca.pem", (authority / "ca.pem").read_bytes(), 0o644)
    _keep_passwords(folder)


def _keep_passwords(folder: Path) -> None:
    for name in ("postgres", "grafana"):
        (folder / name).mkdir(mode=0o750, exist_ok=True)
        file = folder / name / "password"
        kept_secret(file)
        file.chmod(_FOR_THE_GROUP)
    # As libpq reads a password: a setting would show it to whoever inspects the container.
    password = kept_secret(folder / "postgres" / "password")
    _keep(folder / "metadata" / "pgpass", f"*:*:*:*:{password}\n".encode(), 0o600)


def _keep(file: Path, content: bytes, mode: int) -> None:
    """Write a file as a whole where it has something else: services read it at any time."""
    if not file.exists() or file.read_bytes() != content:
        replace_file(file, content, mode)


if __name__ == "__main__":
    keep_credentials(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
