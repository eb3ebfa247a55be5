"""Chooses the bookies of an ensemble. The caller decides which candidates are alive, and passes
them in the order of preference (liveness is only advice: I31).
"""

from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import Final

from quorumlog.protocol.ids import member_name

_ROOM_MIN_BYTES: Final = 64 << 20
_ROOM_TIMES: Final = 4
"""Largest credible ratio of a member's free space to the median. Chosen by judgement."""


def ensemble(
    size: int, candidates: Sequence[str], zones: Mapping[str, str] | None = None
) -> tuple[str, ...] | None:
    """Choose `size` candidates, spread over zones as evenly as possible; None if there are too few.
    Neighbours come from different zones where possible, because they share a write set.
    """
    chosen: list[str] = []
    for _ in range(size):
        best = spread(chosen, candidates, zones)
        if not best:
            return None
        chosen.append(best[0])
    return tuple(chosen)


def spread(
    members: Sequence[str], candidates: Sequence[str], zones: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Sort the candidates that may join these members, best first: by the number of members in the
    candidate's zone, then by how recently a member of the zone was chosen, then in the given order.
    Other incarnations of a member are left out.
    """
    known = zones or {}
    taken = {member_name(member) for member in members}
    used: dict[str, tuple[int, int]] = {}
    for place, member in enumerate(members):
        zone = known.get(member, "")
        # Neighbours share a write set, so the zone chosen last is the worst choice.
        used[zone] = (used.get(zone, (0, 0))[0] + 1, place)
    free = [member for member in dict.fromkeys(candidates) if member_name(member) not in taken]
    return tuple(sorted(free, key=lambda member: used.get(known.get(member, ""), (0, 0))))


def weights(rooms: Mapping[str, int]) -> dict[str, int]:
    """Relative frequency at which each member should be chosen, by its reported free bytes.

    Reports are not verified. So the weight is at most four times the lower median: no member
    attracts most new ledgers by reporting a large number. A member that is nearly full or
    reported nothing is chosen rarely, but not never.
    """
    floored = {member: max(room, _ROOM_MIN_BYTES) for member, room in rooms.items()}
    if not floored:
        return {}
    # The lower median, so that half of the members can't raise it.
    most = _ROOM_TIMES * median_low(floored.values())
    return {member: min(room, most) for member, room in floored.items()}


def replacements(
    members: Sequence[str], leaving: Sequence[int], candidates: Sequence[str]
) -> dict[int, str]:
    """Choose the new member for each leaving position. A new incarnation of a leaving member gets
    that member's position; other candidates get the remaining positions, in the given order.
    Members of the ensemble are not candidates. Positions without a candidate are left out.
    """
    names = [member_name(member) for member in members]
    chosen: dict[int, str] = {}
    strangers: list[str] = []
    for candidate in dict.fromkeys(candidates):
        name = member_name(candidate)
        if name not in names:
            strangers.append(candidate)
        elif candidate not in members:
            position = names.index(name)
            if position in leaving:
                chosen.setdefault(position, candidate)
    seen: set[str] = set()
    for position in leaving:
        if position in chosen:
            continue
        while strangers:
            candidate = strangers.pop(0)
            if member_name(candidate) not in seen:
                seen.add(member_name(candidate))
                chosen[position] = candidate
                break
    return chosen
