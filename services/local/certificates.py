"""The certificates of a local cluster with TLS=1: made once, kept below DATA, renewed in time.

An authority of its own makes them: nobody else's certificate counts here.
"""

import ssl
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from quorumlog.certificates import create_authority, describe, issue, key_file, renew

_CLUSTER: Final = "local"
_RENEWED_DAYS: Final = 30
"""A certificate with less than that left is renewed at the start (taste)."""


class LocalCertificates:
    """The certificates in a folder, which belongs to one cluster."""

    def __init__(self, folder: Path) -> None:
        """Makes an authority, and an operator's certificate, where there are none."""
        self._folder = folder
        self._authority = folder / "ca.pem"
        if not self._authority.exists():
            create_authority(folder, _CLUSTER)
        self.operator = self._kept("operator", "local")

    def settings(self, role: str, name: str, host: str) -> dict[str, str]:
        """The settings that give a service its certificate."""
        certificate = self._kept(role, name, host, "localhost")
        return {
            "TLS_CERT_FILE": str(certificate),
            "TLS_KEY_FILE": str(key_file(certificate)),
            "TLS_CA_FILE": str(self._authority),
        }

    def context(self) -> ssl.SSLContext:
        """A context that shows the operator's certificate."""
        context = ssl.create_default_context(cafile=self._authority)
        context.load_cert_chain(self.operator, key_file(self.operator))
        return context

    def _kept(self, role: str, name: str, *hosts: str) -> Path:
        return kept_certificate(self._folder, self._folder, role, name, hosts)


def kept_certificate(
    authority: Path, into: Path, role: str, name: str, hosts: Collection[str]
) -> Path:
    """A certificate of the authority in a folder: made where there is none for these hosts, and renewed in time."""
    certificate = into / f"{role}-{name}.pem"
    if not key_file(certificate).exists() or not certificate.exists():
        return issue(authority, role, name, hosts, into=into, replaces=True)
    found = describe(certificate)
    if found.subject is None or set(found.subject.hosts) != set(hosts):
        return issue(authority, role, name, hosts, into=into, replaces=True)
    if found.days_left(datetime.now(UTC)) < _RENEWED_DAYS:
        return renew(authority, certificate)
    return certificate
