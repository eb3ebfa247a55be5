"""What bookies should hold and may not, in as few ranges as say it (rule 8)."""

from collections.abc import Iterable
from typing import Final

from quorumlog.protocol.messages import MissedRange
from quorumlog.protocol.ranges import union

RANGES_MAX: Final = 64
"""Ranges kept a member (taste). Beyond it they become one: repair looks before it copies."""


def merged(ranges: Iterable[MissedRange], stride: int = 1) -> tuple[MissedRange, ...]:
    """The same entries in ranges that lie apart, by member and first entry.

    `stride` is the greatest step between two entries that one member stores (1 + E - Qw): what
    lies closer together is one range.
    """
    by_member: dict[str, list[tuple[int, int]]] = {}
    for missed in ranges:
        by_member.setdefault(missed.member, []).append((missed.first, missed.last))
    out: list[MissedRange] = []
    for member, found in sorted(by_member.items()):
        joined = union(found, stride)
        if len(joined) > RANGES_MAX:
            joined = ((joined[0][0], joined[-1][1]),)
        out.extend(MissedRange(member, first, last) for first, last in joined)
    return tuple(out)
