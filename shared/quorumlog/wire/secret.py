"""The secret of a cluster: the file that it is read from, and the header that carries it.

Services check it (`net/identity.py`); an operator's programs, which are no services, show it.
"""

import os
import re
from collections.abc import Iterable
from ipaddress import ip_address
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

LOCAL_SECRET: Final = Path(".quorumlog/cluster-secret")
"""The secret of the cluster that `make run` starts, seen from the folder in which it runs."""
LOCAL_GATEWAYS: Final = LOCAL_SECRET.with_name("gateways")
"""The URLs of its gateways, one a line, while it runs."""

_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/=-]{32,1024}")
"""What a bearer token may consist of (RFC 6750), and at least 128 bits if each character is a hexadecimal digit."""


class SecretUnusable(ValueError):
    """The file of a secret can't be used; says why, and nothing of what is in it."""


def read_secret(file: Path) -> str:
    """The secret in a file that is shown. Raises: SecretUnusable."""
    return read_secrets(file)[0]


def read_secrets(file: Path) -> tuple[str, ...]:
    """The secret in a file and, while another one takes its place, that one. Raises: SecretUnusable."""
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
    """The secrets in a text, one or two lines, without the space around them. Raises: SecretUnusable."""
    tokens = tuple(line.strip() for line in text.strip().splitlines())
    if not 1 <= len(tokens) <= 2 or not all(map(_TOKEN.fullmatch, tokens)):
        raise SecretUnusable(
            "a secret is one line of 32 to 1024 letters, digits or ._~+/=-, as of `openssl rand -hex 32`;"
            " a second line is another secret that is accepted"
        )
    return tokens


def headers_of(token: str) -> dict[str, str]:
    """The headers that carry a secret."""
    return {"Authorization": f"Bearer {token}"}


def operator_headers(file: Path | None, urls: Iterable[str]) -> dict[str, str]:
    """What an operator's program shows to services at `urls`: the secret in a file. Where none is named, that of the
    cluster that `make run` starts here, and only to services of this machine. Raises: SecretUnusable.
    """
    if file is None:
        file = LOCAL_SECRET
        if not os.access(file, os.R_OK) or not all(map(is_on_this_machine, urls)):
            return {}
    return headers_of(read_secret(file))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_on_this_machine(url: str) -> bool:
    """Whether a URL is of this machine's loopback."""
    try:
        return is_loopback(urlsplit(url.strip()).hostname or "")
    except ValueError:
        return False
