"""Credentials, using only the standard library: the secret of a cluster (in a file and in a
header), the certificate that operators' programs present to internal listeners, and access tokens.

Operators' programs use this module to present the secret or the certificate, and to create tokens.
Services check the secret in `net/identity.py`, and use TLS through `net/tls.py`.
"""

import hashlib
import os
import re
import secrets
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

LOCAL_SECRET: Final = Path(".quorumlog/cluster-secret")
"""The secret of the cluster that `make run` starts, relative to the folder in which it runs."""
LOCAL_GATEWAYS: Final = LOCAL_SECRET.with_name("gateways")
"""The file with the URLs of the gateways that `make run` starts, one per line, while they run."""

LOCAL_CERTIFICATE: Final = Path(".quorumlog/certificates/operator-local.pem")
"""The operator's certificate for the cluster that `make run TLS=1` starts, relative to the folder
in which it runs."""

_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/=-]{32,1024}")
"""The form of a bearer token (RFC 6750), which has at least 128 bits even if hexadecimal."""
_PREFIX: Final = "qlt_"
"""The prefix by which scanners for secrets recognize a published token."""


class SecretUnusable(ValueError):
    """A secret's file can't be used. The message has the reason, but no content of the file."""


def read_secret(file: Path) -> str:
    """The first secret in a file, which a client presents. Raises: SecretUnusable."""
    return read_secrets(file)[0]


def read_secrets(file: Path) -> tuple[str, ...]:
    """The secret in a file, and the second secret while the first is being replaced. Raises: SecretUnusable."""
    try:
        text = file.read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not ASCII"
        raise SecretUnusable(f"{file}: {why}") from None
    try:
        return checked_secrets(text)
    except SecretUnusable as error:
        raise SecretUnusable(f"{file}: {error}") from None


def checked_secrets(text: str) -> tuple[str, ...]:
    """The secrets in a text of one or two lines, stripped. Raises: SecretUnusable."""
    tokens = tuple(line.strip() for line in text.strip().splitlines())
    if not 1 <= len(tokens) <= 2 or not all(map(_TOKEN.fullmatch, tokens)):
        raise SecretUnusable(
            "a secret must be one line of 32 to 1024 letters, digits or ._~+/=-, such as from `openssl rand -hex 32`;"
            " an optional second line is another accepted secret"
        )
    return tokens


def headers_of(token: str) -> dict[str, str]:
    """The headers that carry a secret."""
    return {"Authorization": f"Bearer {token}"}


def operator_headers(file: Path | None, urls: Iterable[str]) -> dict[str, str]:
    """The headers with which an operator's program calls services at `urls`, with the secret in
    `file`. Without a file, the secret of the cluster that `make run` starts here is used, and only
    for services on this machine. Raises: SecretUnusable.
    """
    if file is None:
        file = LOCAL_SECRET
        if not os.access(file, os.R_OK) or not all(map(is_on_this_machine, urls)):
            return {}
    return headers_of(read_secret(file))


def is_loopback(host: str) -> bool:
    """Whether a host is loopback, which only this machine can reach."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_on_this_machine(url: str) -> bool:
    """Whether a URL's host is loopback."""
    try:
        return is_loopback(urlsplit(url.strip()).hostname or "")
    except ValueError:
        return False


class CertificateUnusable(ValueError):
    """A certificate's files can't be used. The message has the reason, but no part of a key."""


def operator_context(
    certificate: Path | None, key: Path | None, authority: Path | None, urls: Iterable[str]
) -> ssl.SSLContext | None:
    """A TLS context that presents a certificate, and verifies services by an authority. Without
    files, the context uses the files of the cluster that `make run TLS=1` starts here, but only for
    services on this machine. None if there are no files. Raises: CertificateUnusable.
    """
    if certificate is key is authority is None:
        certificate = LOCAL_CERTIFICATE
        if not os.access(certificate, os.R_OK) or not all(map(is_on_this_machine, urls)):
            return None
        key = certificate.with_name(f"{certificate.stem}-key.pem")
        authority = certificate.with_name("ca.pem")
    if certificate is None or key is None or authority is None:
        raise CertificateUnusable(
            "--cert-file, --key-file and --ca-file (TLS_CERT_FILE, TLS_KEY_FILE, TLS_CA_FILE) go together: give all or none"
        )
    try:
        return client_context(certificate, key, authority)
    except OSError as error:  # an SSLError is one
        raise CertificateUnusable(f"{certificate}, {key}, {authority}: {error}") from None


def client_context(
    certificate: Path, key: Path, authority: Path | None, password: str | None = None
) -> ssl.SSLContext:
    """A context that verifies the server and presents a certificate. Raises: OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if authority is not None:
        context.load_verify_locations(authority)
    load_own(context, certificate, key, password)
    return context


def load_own(
    context: ssl.SSLContext, certificate: Path, key: Path, password: str | None = None
) -> None:
    """Make a context present a certificate. `password`: that of the key, if any. Raises: OSError."""
    # Without `_no_password`, OpenSSL would prompt for the key's password at the terminal.
    context.load_cert_chain(certificate, key, password=password or _no_password)


def _no_password() -> str:
    raise ssl.SSLError(
        "the key has a password: set TLS_KEY_PASSWORD or PUBLIC_TLS_KEY_PASSWORD, or remove the"
        " password from the key"
    )


@dataclass(frozen=True, slots=True)
class NewToken:
    """A new token, with the only copy of its secret."""

    secret: str = field(repr=False)
    id: str
    hash: bytes
    """SHA-256 of the secret, whose 256 random bits can't be guessed."""


def draw_token() -> NewToken:
    """A new token."""
    secret = _PREFIX + secrets.token_urlsafe(32)
    return NewToken(secret, secrets.token_hex(8), hashlib.sha256(secret.encode()).digest())
