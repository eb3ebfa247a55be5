"""Witnesses of the metadata's database, as they travel and as bookies store them (rule 18a).

A witness is the attempt token of an answered change, with a checksum that binds it to the cluster. The
database must contain the token of every witness: a database that lacks one went back. The metadata
service makes witnesses; all other processes pass them on unchanged. No sockets.
"""

import re
from collections.abc import Iterable
from typing import Final

import google_crc32c

WITNESSES_MAX: Final = 100
"""Witnesses in one header: a process remembers those of its concurrent changes (taste)."""

WITNESS: Final = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\.[0-9a-f]{8}"


def witness_of(cluster_id: str, token: str) -> str:
    """The witness of a change of this cluster."""
    checksum = google_crc32c.value(f"{cluster_id} {token}".encode())
    return f"{token}.{checksum:08x}"


def token_of(cluster_id: str, witness: str) -> str | None:
    """The token; None for a damaged witness or one of another cluster, which proves nothing."""
    token, _, _ = witness.partition(".")
    return token if witness_of(cluster_id, token) == witness else None


def to_header(witnesses: Iterable[str]) -> str:
    """The header's value."""
    return ",".join(witnesses)


def from_header(value: str) -> tuple[str, ...]:
    """The witnesses in a header, in order; none where the header is no list of witnesses."""
    found = tuple(item.strip() for item in value.split(","))
    is_sound = len(found) <= WITNESSES_MAX and all(re.fullmatch(WITNESS, item) for item in found)
    return found if is_sound else ()
