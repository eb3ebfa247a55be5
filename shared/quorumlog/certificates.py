"""Makes and describes the certificates of a cluster, with a small certificate authority in a
folder.

A service's certificate contains a URI with its cluster, role and name,
`quorumlog://CLUSTER/ROLE/NAME`, and the hosts at which the service listens. `net/tls.py` reads the
URI when a process connects. An operator may use another authority, if its certificates contain that
URI.

The command line and the local cluster make certificates with this module. This module requires
`cryptography` (extra `certificates`) and imports nothing from quorumlog. The authority's file
contains its certificate and then the list of revoked certificates (CRL, RFC 5280), so every process
that has the file has the list.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

SCHEME: Final = "quorumlog"
ROLES: Final = ("gateway", "bookie", "metadata", "autorecovery", "operator", "monitor")
"""The roles of processes. `net/identity.py` defines what each role may do."""

AUTHORITY_DAYS: Final = 3650
"""Default validity of an authority. The validity is long, because a new authority's certificate
must be copied to every host (chosen by judgement)."""
DAYS: Final = 365
"""Default validity of a certificate, for a yearly renewal (chosen by judgement). An alert fires 14
days before the end."""

_AUTHORITY: Final = "ca"
_ISSUED: Final = "issued.txt"
"""File with the serial number and the URI of each issued certificate. The file is needed to revoke
certificates that a renewal has replaced, since these certificates stay valid until their end.
"""
_LIST: Final = re.compile(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----\n?", re.DOTALL)
_PEM: Final = serialization.Encoding.PEM
_CLOCK_SKEW: Final = timedelta(hours=1)
"""A certificate is valid from this long before its issue, because the clocks of hosts differ."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
_LABEL: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?", re.ASCII)


class CertificateRefused(ValueError):
    """A certificate can't be issued as requested, or a file is not a usable certificate or key."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The process that a certificate identifies."""

    cluster: str
    role: str
    name: str
    hosts: tuple[str, ...] = ()
    """DNS names and IP addresses; empty for a process that does not listen."""

    def __post_init__(self) -> None:
        for what, name in (("cluster", self.cluster), ("name", self.name)):
            if not _NAME.fullmatch(name):
                raise CertificateRefused(
                    f"{name!r} is not a valid {what}: use 1 to 100 letters, digits, '.', '_' and '-'"
                )
        if self.role not in ROLES:
            raise CertificateRefused(f"{self.role!r} is not a role: use one of {', '.join(ROLES)}")
        for host in self.hosts:
            _general_name(host)

    @property
    def uri(self) -> str:
        """The URI of the certificate."""
        return f"{SCHEME}://{self.cluster}/{self.role}/{self.name}"

    @property
    def file(self) -> str:
        """The name of the certificate's files, without a suffix."""
        return f"{self.role}-{self.name}"


@dataclass(frozen=True, slots=True)
class Description:
    """The contents of a certificate."""

    subject: Subject | None
    """None for an authority's own certificate, and for a certificate without the URI."""
    issuer: str
    begins: datetime
    ends: datetime
    is_authority: bool

    def days_left(self, now: datetime) -> int:
        """Whole days until the certificate expires; negative if it has expired."""
        return (self.ends - now).days


def create_authority(folder: Path, cluster: str, *, days: int = AUTHORITY_DAYS) -> Path:
    """Create an authority; returns its certificate. Raises: FileExistsError, CertificateRefused."""
    Subject(
        cluster, "operator", "authority"
    )  # raises if no certificate may contain the cluster's name
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([
        x509.NameAttribute(NameOID.ORGANIZATION_NAME, SCHEME),
        x509.NameAttribute(NameOID.COMMON_NAME, cluster),
    ])  # fmt: skip
    built = _builder(name, name, key, key, days, path_length=0)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = _write(folder, _AUTHORITY, key, built.sign(key, hashes.SHA256()), replaces=False)
    (folder / _ISSUED).touch()
    return file


def issue(
    folder: Path,
    role: str,
    name: str,
    hosts: Iterable[str] = (),
    *,
    days: int = DAYS,
    into: Path | None = None,
    replaces: bool = False,
) -> Path:
    """Make a key and a certificate, signed by the authority in a folder, and return the
    certificate's file.

    Raises: FileExistsError unless `replaces`, FileNotFoundError without an authority,
    CertificateRefused.
    """
    authority = _read_certificate(folder / f"{_AUTHORITY}.pem")
    signer = _read_key(folder / f"{_AUTHORITY}-key.pem")
    subject = Subject(_cluster_of(authority), role, name, tuple(dict.fromkeys(hosts)))
    if role not in ("operator", "monitor") and not subject.hosts:
        raise CertificateRefused(f"a {role} needs hosts: give its host names with --host")
    key = ec.generate_private_key(ec.SECP256R1())
    names = [x509.UniformResourceIdentifier(subject.uri), *map(_general_name, subject.hosts)]
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if subject.hosts:
        purposes.append(ExtendedKeyUsageOID.SERVER_AUTH)
    text = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject.file[:64])])
    built = (
        _builder(text, authority.subject, key, signer, days, authority.not_valid_after_utc)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
    )
    into = into or folder
    into.mkdir(mode=0o700, parents=True, exist_ok=True)
    signed = built.sign(signer, hashes.SHA256())
    file = _write(into, subject.file, key, signed, replaces=replaces)
    with (folder / _ISSUED).open("a", encoding="ascii") as issued:
        issued.write(f"{signed.serial_number:x} {subject.uri}\n")
    return file


def renew(folder: Path, certificate: Path, *, days: int = DAYS) -> Path:
    """Replace a certificate and its key by a new pair for the same subject. Raises: as `issue`."""
    subject = describe(certificate).subject
    if subject is None:
        raise CertificateRefused(
            f"{certificate} has no URI {SCHEME}://CLUSTER/ROLE/NAME: issue a new one"
        )
    authority = _cluster_of(_read_certificate(folder / f"{_AUTHORITY}.pem"))
    if subject.cluster != authority:
        raise CertificateRefused(
            f"{certificate} is of cluster {subject.cluster}, but the authority in {folder} is of {authority}: use the folder of that cluster's authority"
        )
    if certificate.name != f"{subject.file}.pem":
        raise CertificateRefused(f"{certificate} must be renamed {subject.file}.pem")
    given = (subject.role, subject.name, subject.hosts)
    return issue(folder, *given, days=days, into=certificate.parent, replaces=True)


def revoke(folder: Path, role: str, name: str) -> int:
    """Revoke all certificates that the authority in a folder has issued to a process, and return
    their number. Certificates that are issued to the process later are valid. Raises: OSError,
    CertificateRefused.
    """
    file = folder / f"{_AUTHORITY}.pem"
    authority, signer = _read_certificate(file), _read_key(folder / f"{_AUTHORITY}-key.pem")
    uri = Subject(_cluster_of(authority), role, name).uri
    lines = (folder / _ISSUED).read_text("ascii").splitlines()
    serials = {int(line.split()[0], 16) for line in lines if line.split()[1:] == [uri]}
    if not serials:
        raise CertificateRefused(f"{folder} has issued no certificate to {uri}: check the name")
    content = file.read_bytes()
    revoked = {serial for _, serial in _revoked_of(content)} | serials
    listed = _signed_list(authority, signer, revoked)
    replace_file(file, _LIST.sub(b"", content) + listed.public_bytes(_PEM), 0o644)
    return len(serials)


def read_revoked(file: Path) -> frozenset[tuple[bytes, int]]:
    """Issuers and serial numbers of revoked certificates. Raises: OSError, CertificateRefused."""
    try:
        return _revoked_of(file.read_bytes())
    except ValueError as error:
        raise CertificateRefused(
            f"the list of revoked certificates in {file} is damaged: restore the file ({error})"
        ) from None


def issuer_and_serial(der: bytes) -> tuple[bytes, int]:
    """A certificate's issuer and serial number, which identify it in revocation lists."""
    found = x509.load_der_x509_certificate(der)
    return found.issuer.public_bytes(), found.serial_number


def describe(file: Path) -> Description:
    """The contents of a file's first certificate. Raises: OSError, CertificateRefused."""
    found = _read_certificate(file)
    return Description(
        subject=_subject_of(found),
        issuer=found.issuer.rfc4514_string(),
        begins=found.not_valid_before_utc,
        ends=found.not_valid_after_utc,
        is_authority=_is_authority(found),
    )


def key_file(certificate: Path) -> Path:
    """The file of the private key that belongs to a certificate's file."""
    return certificate.with_name(f"{certificate.stem}-key.pem")


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    days: int,
    latest: datetime | None = None,
    path_length: int | None = None,
) -> x509.CertificateBuilder:
    """Build an unsigned certificate. Only an authority's certificate has a `path_length`."""
    if days < 1:
        raise CertificateRefused(f"`days` must be at least 1 (got {days})")
    now = datetime.now(UTC)
    ends = now + timedelta(days=days)
    is_authority, public = path_length is not None, key.public_key()
    usage = x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        # No certificate outlives its authority.
        .not_valid_after(min(ends, latest) if latest is not None else ends)
        .add_extension(x509.BasicConstraints(is_authority, path_length), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(_signed_by(signer), critical=False)
    )


def _signed_by(signer: ec.EllipticCurvePrivateKey) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        pass
    first, *others = host.split(".")
    if len(host) > 253 or not all(map(_LABEL.fullmatch, (*others, *({first} - {"*"})))):
        raise CertificateRefused(
            f"{host!r} is not a host: use a DNS name or an IP address, without a port"
        )
    return x509.DNSName(host)


def _revoked_of(content: bytes) -> frozenset[tuple[bytes, int]]:
    lists = map(x509.load_pem_x509_crl, _LIST.findall(content))
    return frozenset(
        (listed.issuer.public_bytes(), revoked.serial_number)
        for listed in lists
        for revoked in listed
    )


def _signed_list(
    authority: x509.Certificate, signer: ec.EllipticCurvePrivateKey, serials: Iterable[int]
) -> x509.CertificateRevocationList:
    now = datetime.now(UTC)
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.subject)
        .last_update(now)
        # RFC 5280 requires the next list's time. This list is valid as long as its authority.
        .next_update(authority.not_valid_after_utc)
        .add_extension(x509.CRLNumber(int(now.timestamp())), critical=False)
        .add_extension(_signed_by(signer), critical=False)
    )
    for serial in sorted(serials):
        revoked = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now)
        builder = builder.add_revoked_certificate(revoked.build())
    return builder.sign(signer, hashes.SHA256())


def _subject_of(certificate: x509.Certificate) -> Subject | None:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None
    hosts = (
        *names.get_values_for_type(x509.DNSName),
        *map(str, names.get_values_for_type(x509.IPAddress)),
    )
    for uri in names.get_values_for_type(x509.UniformResourceIdentifier):
        parts = urlsplit(uri)
        role, _, name = parts.path[1:].partition("/")
        if parts.scheme == SCHEME:
            return Subject(parts.netloc, role, name, hosts)
    return None


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def _cluster_of(authority: x509.Certificate) -> str:
    names = authority.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""


def _read_certificate(file: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except ValueError as error:
        raise CertificateRefused(f"{file} must be a certificate in PEM: {error}") from None


def _read_key(file: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(file.read_bytes(), None)
    except (TypeError, ValueError):
        # The original error's text may contain parts of the key.
        raise CertificateRefused(f"{file} must be a key in PEM without a password") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateRefused(f"{file} must be the key of an authority that `init` created")
    return key


def _write(
    folder: Path,
    name: str,
    key: ec.EllipticCurvePrivateKey,
    certificate: x509.Certificate,
    *,
    replaces: bool,
) -> Path:
    """Write a key, readable only by its owner, and a certificate; return the certificate's file."""
    file = folder / f"{name}.pem"
    for path in (file, key_file(file)):
        if not replaces and path.exists():
            raise FileExistsError(f"{path} exists: nothing was written; move it away first")
    private = key.private_bytes(
        _PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    replace_file(key_file(file), private, 0o600)
    replace_file(file, certificate.public_bytes(_PEM), 0o644)
    return file


def replace_file(path: Path, content: bytes, mode: int) -> None:
    """Replace a file atomically, so that no reader sees incomplete content."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
