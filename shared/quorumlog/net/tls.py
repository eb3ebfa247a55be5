"""TLS of a service: contexts that follow changes of files, and callers' identities by certificate.

Inside a cluster both ends present a certificate (mutual TLS). `Tls` contains the contexts for both
sides, and `PeerCertificate` reads a client's identity from the URI in its certificate
(`quorumlog/certificates.py`). A gateway's public listener presents a certificate and requests none.

A new certificate, key or authority takes effect within seconds. Open connections continue, even if
their certificate has expired. Only the connections of peers whose certificates are revoked are cut.
"""

import asyncio
import logging
import ssl
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit
from weakref import WeakSet

from aiohttp import web
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import SecretStr

from quorumlog.errors import Forbidden, Unauthenticated
from quorumlog.net.identity import Credentials, Followed, HoldsConnections, Identity, Role
from quorumlog.wire.secret import client_context, load_own

log = logging.getLogger(__name__)

SCHEME: Final = "quorumlog"
"""The scheme of the URI in a certificate, which `certificates.py` writes."""


class TlsUnusable(ValueError):
    """A certificate's files can't be used. The message has the reason, but no part of a key."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of one listener's certificate."""

    certificate: Path
    key: Path
    authority: Path | None = None
    """Certificates of the authorities that must have issued the certificates of clients and
    servers. None for a public listener, which requests no certificate from clients."""
    password: SecretStr | None = None
    """The password of the key, if it has one."""

    def __iter__(self) -> Iterator[Path]:
        yield from filter(None, (self.certificate, self.key, self.authority))


class Tls(Followed):
    """The TLS contexts of one certificate.

    Invariant: both contexts, `cluster`, `ends` and the revocations come from one read of the files.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Load the files. Raises: TlsUnusable."""
        super().__init__(files)
        self._files = files
        self._holders: WeakSet[HoldsConnections] = WeakSet()
        self._own: tuple[str | None, datetime] | None = None
        """The URI and the expiry of the certificate in use; None before the first certificate is loaded."""
        self._load()
        # Listeners keep their first context, so each handshake switches to the newest context. The
        # first context is not changed in place, since authorities can't be removed from a context.
        self.server = _server_context(files)
        self.server.sni_callback = self._switch

    def _load(self) -> None:
        # Imported late, because the import takes 0.1 s and most processes have no certificate.
        from quorumlog.certificates import describe, read_revoked  # noqa: PLC0415

        files = self._files
        try:
            newest = _server_context(files)
            client = client_context(
                files.certificate, files.key, files.authority, _password_of(files)
            )
            described = describe(files.certificate)
            revoked = frozenset() if files.authority is None else read_revoked(files.authority)
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            raise TlsUnusable(f"{_names(files)}: {error}") from None
        if files.authority is not None and described.subject is None:
            raise TlsUnusable(
                f"{files.certificate} has no URI {SCHEME}://CLUSTER/ROLE/NAME in subjectAltName: issue a new one"
            )
        own = (None if described.subject is None else described.subject.uri, described.ends)
        if self._own is not None:
            _check_successor(files.certificate, self._own, own)
        self._own, self._revoked = own, revoked
        self._newest, self.client, self.ends = newest, client, described.ends
        self.cluster = described.subject.cluster if described.subject else ""

    def _switch(self, socket: ssl.SSLObject, _name: str | None, _old: ssl.SSLContext) -> None:
        socket.context = self._newest

    @property
    def credentials(self) -> Credentials:
        """The credentials that the service presents as a client."""
        return Credentials(client_context=lambda: self.client, guard=self)

    def is_revoked(self, transport: asyncio.BaseTransport) -> bool:
        """Whether the certificate of a connection's peer is revoked."""
        if not self._revoked:
            return False
        der = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return _issuer_and_serial(der) in self._revoked

    def check_server(self, transport: asyncio.Transport, role: Role, name: str) -> None:
        """Refuse any server but the requested service of this cluster. Raises: CertificateError."""
        if self.is_revoked(transport):
            raise ssl.CertificateError("the server's certificate is revoked: issue a new one")
        names = transport.get_extra_info("peercert").get("subjectAltName", ())
        try:
            cluster, server = _identity_of(names)
        except Forbidden as error:
            raise ssl.CertificateError(error.detail) from None
        if (cluster, server.role, server.name) != (self.cluster, role, name or server.name):
            asked = f"{role} {name}".rstrip()
            raise ssl.CertificateError(
                f"{server.role} {server.name} of cluster {cluster} answers instead of {asked}"
                f" of cluster {self.cluster}"
            )

    def watch(self, holder: HoldsConnections) -> None:
        """From now on, abort connections of `holder` whose peers' certificates are revoked."""
        self._holders.add(holder)

    def reload(self) -> None:
        """Load the files again. If the files are unusable, log the reason and keep the former certificate."""
        try:
            self._load()
        except TlsUnusable as error:
            log.error(  # noqa: TRY400  (the error says all)
                "certificate-unusable",
                extra={"why": str(error), "kept_until": self.ends.isoformat()},
            )
        else:
            log.info("certificate-loaded", extra=self.described())
            self._cut_revoked()

    def _cut_revoked(self) -> None:
        held = [transport for holder in self._holders for transport in holder.transports()]
        revoked = [transport for transport in held if self.is_revoked(transport)]
        for transport in revoked:
            transport.abort()
        if revoked:
            log.warning("revoked-connections-cut", extra={"count": len(revoked)})

    def described(self) -> dict[str, str]:
        """The certificate's file and expiry, for logs."""
        return {"file": str(self._files.certificate), "ends": self.ends.isoformat()}


class CertificateEnds(Collector):
    """A gauge of the expiry times of certificates."""

    def __init__(self, certificates: Mapping[str, Tls]) -> None:
        """`certificates`: the certificates by listener name."""
        self._certificates = certificates

    def collect(self) -> Iterable[Metric]:
        """The gauge with its current values."""
        gauge = GaugeMetricFamily(
            "quorumlog_certificate_end_timestamp_seconds",
            "when the certificate of a listener ends, in seconds since 1970",
            labels=["listener"],
        )
        for listener, certificate in self._certificates.items():
            gauge.add_metric([listener], certificate.ends.timestamp())
        yield gauge


@dataclass(frozen=True, slots=True)
class PeerCertificate:
    """Identifies callers by their verified certificates. Implements `Authenticator`."""

    tls: Tls
    """This process's certificate. Callers must belong to the certificate's cluster."""

    def identify(self, request: web.BaseRequest) -> Identity:
        """The service that a client's certificate names. Raises: Unauthenticated, Forbidden."""
        transport = request.transport
        certificate = None if transport is None else transport.get_extra_info("peercert")
        if transport is None or not certificate:
            raise Unauthenticated("a client certificate of the cluster is required")
        cluster, identity = _identity_of(certificate.get("subjectAltName", ()))
        if self.tls.is_revoked(transport):
            raise Forbidden(
                f"the certificate of {identity.role} {identity.name} is revoked: issue a new one"
            )
        if cluster != self.tls.cluster:
            raise Forbidden(
                f"the certificate must be of cluster {self.tls.cluster}, but is of {cluster}"
            )
        return identity


@lru_cache  # for 128 certificates; others are parsed at each request
def _identity_of(names: tuple[tuple[str, str], ...]) -> tuple[str, Identity]:
    """The cluster and the identity in a certificate's names. Raises: Forbidden."""
    uris = [name for kind, name in names if kind == "URI" and name.startswith(f"{SCHEME}://")]
    if len(uris) != 1:
        raise Forbidden(f"the certificate must have one {SCHEME}:// URI (got {len(uris)})")
    parts = urlsplit(uris[0])
    role, _, name = parts.path[1:].partition("/")
    if role not in {known.value for known in Role} or not name:
        raise Forbidden(f"{uris[0]} must end with a valid ROLE/NAME")
    hosts = {name.lower() for kind, name in names if kind == "DNS"}
    hosts |= {str(ip_address(name.strip())) for kind, name in names if kind == "IP Address"}
    return parts.netloc, Identity(Role(role), name, frozenset(hosts))


@lru_cache
def _issuer_and_serial(der: bytes) -> tuple[bytes, int]:
    from quorumlog.certificates import issuer_and_serial  # noqa: PLC0415  (late, as in `_load`)

    return issuer_and_serial(der)


def _server_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_own(context, files.certificate, files.key, _password_of(files))
    if files.authority is None:
        # Allow TLS 1.2 for browsers and older clients.
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return context
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(files.authority)
    # No session tickets: a resumed session would not be verified with changed authorities.
    context.num_tickets = 0
    return context


def _check_successor(
    file: Path, before: tuple[str | None, datetime], after: tuple[str | None, datetime]
) -> None:
    """Refuse a new certificate that is another process's or has expired. Raises: TlsUnusable."""
    (was, ended), (found, ends) = before, after
    if was is not None and found is not None and found != was:
        raise TlsUnusable(f"{file} is the certificate of {found}, but this process is {was}")
    if ends != ended and ends < datetime.now(UTC):
        raise TlsUnusable(f"{file} expired at {ends.isoformat()}: renew the certificate")


def _password_of(files: TlsFiles) -> str | None:
    return None if files.password is None else files.password.get_secret_value()


def _names(files: TlsFiles) -> str:
    return ", ".join(map(str, files))
