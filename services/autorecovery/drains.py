"""A drain's progress: which ledgers still name the bookie, and why.

The progress is computed from the present metadata and not counted down. So a drain survives any
restart, and ends when nothing names the bookie, whoever caused that.
"""

from collections import Counter
from collections.abc import Sequence

from quorumlog.net.metadata_client import MetadataClient
from quorumlog.protocol.ids import member_name
from quorumlog.protocol.metadata import State
from quorumlog.wire.bodies import Body, BookieState, LedgerUse


class LedgerLeft(Body):
    """A ledger that still names the bookie."""

    ledger_id: int
    bookie: str
    state: State
    reason: str


class Drain(Body):
    """`GET /v1/drains/{bookie}`."""

    bookie: str
    state: BookieState
    done: bool
    """Nothing names the bookie: it may be stopped and decommissioned."""
    ledgers: int
    repairs: int
    """Items of the repair queue."""
    why: str
    """What it waits for, for people; empty where it is done."""
    first: tuple[LedgerLeft, ...]


async def drain_of(name: str, metadata: MetadataClient, *, is_paused: bool = False) -> Drain:
    """How far a bookie is drained. Raises: NoSuchBookie, MetadataUnavailable."""
    uses = await metadata.uses(name)
    states = {member_name(b.id): b.state for b in (await metadata.bookies()).bookies}
    done = uses.ledgers == 0 and uses.repairs == 0
    return Drain(
        bookie=name,
        state=states.get(name, "lost"),
        done=done,
        ledgers=uses.ledgers,
        repairs=uses.repairs,
        why="" if done else _why(uses.first, states.get(name), is_paused=is_paused),
        first=tuple(
            LedgerLeft(
                ledger_id=use.ledger_id, bookie=use.member, state=use.state, reason=_reason(use)
            )
            for use in uses.first
        ),
    )


def _why(first: Sequence[LedgerUse], state: BookieState | None, *, is_paused: bool) -> str:
    """What stops all of it, else what stops the most of the first ledgers."""
    if is_paused:
        return "copying is paused: `quorumlog repair resume` ends that"
    if state not in ("draining", "lost", None):
        return f"the bookie is {state}: nothing moves its entries"
    reasons = Counter(_reason(use) for use in first)
    return reasons.most_common(1)[0][0] if reasons else "repairs are queued"


def _reason(use: LedgerUse) -> str:
    why = f"{use.detail} ({use.failures} tries)" if use.detail else ""
    if use.has_place:
        is_open = use.state is State.OPEN
        waits = "waits for its writer to replace the bookie" if is_open else "waits for a worker"
        return why or waits
    if not use.leaves:
        return why or "is the target of a repair that is under way"
    # Rule 20b.
    kept = "its place is given away; kept until its successor has a copy of the row"
    return f"{kept}: {why}" if why else kept
