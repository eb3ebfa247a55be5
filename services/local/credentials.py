"""Creates certificates and passwords for the services of compose.yaml.

Run as `python -m services.local.credentials FOLDER CLUSTER ROLE/NAME…`. Existing credentials are
kept; certificates are renewed before they expire. Each role has its own folder below FOLDER. A
service gets only its role's folder, so that an intruder in a bookie can't act as the metadata
service. Only one process at a time may run this program.
"""

import secrets
import ssl
import sys
from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from quorumlog.certificates import create_authority, describe, issue, key_file, renew, replace_file

_CLUSTER: Final = "local"
_RENEWED_DAYS: Final = 30
"""A certificate with fewer remaining days is renewed at a start (chosen by judgement)."""


class LocalCertificates:
    """The certificates of one cluster, in a folder."""

    def __init__(self, folder: Path) -> None:
        """Creates an authority and an operator's certificate, unless they exist."""
        self._folder = folder
        self._authority = folder / "ca.pem"
        if not self._authority.exists():
            create_authority(folder, _CLUSTER)
        self.operator = self._kept("operator", "local")

    def settings(self, role: str, name: str, host: str) -> dict[str, str]:
        """Returns the settings with a service's certificate; creates the certificate if needed."""
        certificate = self._kept(role, name, host, "localhost")
        return {
            "TLS_CERT_FILE": str(certificate),
            "TLS_KEY_FILE": str(key_file(certificate)),
            "TLS_CA_FILE": str(self._authority),
        }

    def context(self) -> ssl.SSLContext:
        """Returns a TLS context with which clients present the operator's certificate."""
        context = ssl.create_default_context(cafile=self._authority)
        context.load_cert_chain(self.operator, key_file(self.operator))
        return context

    def _kept(self, role: str, name: str, *hosts: str) -> Path:
        return kept_certificate(self._folder, self._folder, role, name, hosts)


def kept_certificate(
    authority: Path, into: Path, role: str, name: str, hosts: Collection[str]
) -> Path:
    """Returns a process's certificate in the folder `into`. Issues a certificate if there is none
    for these hosts, and renews it if it expires soon.
    """
    certificate = into / f"{role}-{name}.pem"
    is_there = key_file(certificate).exists() and certificate.exists()
    found = describe(certificate) if is_there else None
    if found is None or found.subject is None or set(found.subject.hosts) != set(hosts):
        return issue(authority, role, name, hosts, into=into, replaces=True)
    if found.days_left(datetime.now(UTC)) < _RENEWED_DAYS:
        return renew(authority, certificate)
    return certificate


def kept_secret(file: Path) -> str:
    """Returns the secret in a file. If there is no file, creates it with a random secret.

    Only one process at a time may call this for the same file.
    """
    if not file.exists():
        replace_file(file, f"{secrets.token_hex(32)}\n".encode(), 0o600)
    return file.read_text().strip()


_AUTHORITY: Final = "authority"
_LISTENING: Final = ("metadata", "bookie", "gateway", "autorecovery")
_FOR_THE_GROUP: Final = 0o640
"""Mode of files for Postgres, Prometheus and Grafana, whose users are in the folder's group."""


def keep_credentials(folder: Path, cluster: str, processes: Iterable[str]) -> None:
    """Creates missing certificates of `processes` (`ROLE/NAME`), and missing passwords."""
    authority = folder / _AUTHORITY
    if not (authority / "ca.pem").exists():
        create_authority(authority, cluster)
    for process in processes:
        role, _, name = process.partition("/")
        into = folder / role
        into.mkdir(mode=0o750, exist_ok=True)
        # A container's health check connects to the container's process as localhost.
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
    # Use libpq's password file, because everyone who can inspect a container sees its settings.
    password = kept_secret(folder / "postgres" / "password")
    _keep(folder / "metadata" / "pgpass", f"*:*:*:*:{password}\n".encode(), 0o600)


def _keep(file: Path, content: bytes, mode: int) -> None:
    """Replaces a changed file atomically, because services may read it at any time."""
    if not file.exists() or file.read_bytes() != content:
        replace_file(file, content, mode)


if __name__ == "__main__":
    keep_credentials(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
