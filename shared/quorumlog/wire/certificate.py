"""The certificate that an operator's programs show to the services behind the gateways.

Services, which listen too, have `net/tls.py`.
"""

import os
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from quorumlog.wire.secret import is_on_this_machine

LOCAL_CERTIFICATE: Final = Path(".quorumlog/certificates/operator-local.pem")
"""The operator's certificate of the cluster that `make run TLS=1` starts, seen from the folder in which it runs."""


class CertificateUnusable(ValueError):
    """The files of a certificate can't be used; says why, and nothing of a key."""


def operator_context(
    certificate: Path | None, key: Path | None, authority: Path | None, urls: Iterable[str]
) -> ssl.SSLContext | None:
    """A context that shows a certificate, and verifies the services by an authority. Where no file is named, those of the
    cluster that `make run TLS=1` starts here, and only for services of this machine; None without any. Raises:
    CertificateUnusable.
    """
    if certificate is key is authority is None:
        certificate = LOCAL_CERTIFICATE
        if not os.access(certificate, os.R_OK) or not all(map(is_on_this_machine, urls)):
            return None
        key = certificate.with_name(f"{certificate.stem}-key.pem")
        authority = certificate.with_name("ca.pem")
    if certificate is None or key is None or authority is None:
        raise CertificateUnusable(
            "a certificate needs all of --cert-file, --key-file and --ca-file (TLS_CERT_FILE, TLS_KEY_FILE, TLS_CA_FILE)"
        )
    try:
        return client_context(certificate, key, authority)
    except OSError as error:  # an SSLError is one
        raise CertificateUnusable(f"{certificate}, {key}, {authority}: {error}") from None


def client_context(
    certificate: Path, key: Path, authority: Path | None, password: str | None = None
) -> ssl.SSLContext:
    """A context that verifies the server's certificate and host, and shows a certificate. Raises: OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if authority is not None:
        context.load_verify_locations(authority)
    load_own(context, certificate, key, password)
    return context


def load_own(
    context: ssl.SSLContext, certificate: Path, key: Path, password: str | None = None
) -> None:
    """Have a context show a certificate, whose key may have a password. Raises: OSError."""
    # Without one a password would be asked for at the terminal.
    context.load_cert_chain(certificate, key, password=password or _no_password)


def _no_password() -> str:
    raise ssl.SSLError(
        "the key has a password: set it, or write the key without one, readable by its owner alone"
    )
