"""Witnesses of the metadata's database, as they travel and as bookies keep them (rule 18a).

A witness is the attempt token of a change that was answered, with a checksum that binds it to its
cluster. Who holds one knows that the database must contain that token: one that does not went back.
The metadata service makes witnesses; everybody else hands them on as they came. No sockets.
"""

import re
from collections.abc import Iterable
from typing import Final

import google_crc32c

HEADER: Final = "Quorumlog-Witnesses"
"""In a request: have the database looked at for these, in the same transaction or snapshot. In the
answer: it was; these stand for them from now on."""
WITNESSES_MAX: Final = 100
"""In one header. Holders keep what concurrent changes left them, which is a few (taste)."""

WITNESS: Final = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\.[0-9a-f]{8}"


def witness_of(cluster_id: str, token: str) -> str:
    """The witness of a change of this cluster."""
    checksum = google_crc32c.value(f"{cluster_id} {token}".encode())
    return f"{token}.{checksum:08x}"


def token_of(cluster_id: str, witness: str) -> str | None:
    """The token; None for what is damaged or another cluster's, which counts for nothing."""
    token, _, _ = witness.partition(".")
    return token if witness_of(cluster_id, token) == witness else None


def to_header(witnesses: Iterable[str]) -> str:
    """The header's value."""
    return ",".join(witnesses)


def from_header(value: str) -> tuple[str, ...]:
    """What a header names, in its order; empty for what is no list of witnesses."""
    found = tuple(item.strip() for item in value.split(","))
    is_sound = len(found) <= WITNESSES_MAX and all(re.fullmatch(WITNESS, item) for item in found)
    return found if is_sound else ()
