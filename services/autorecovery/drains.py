"""Computes a drain's progress: the ledgers whose metadata still names the bookie, and why.

The progress is computed from the current metadata, so a drain survives any restart. A drain is done
when no metadata names the bookie any longer, whichever process removed it.
"""

from collections import Counter
from collections.abc import Sequence

from quorumlog.net.metadata_client import MetadataClient
from quorumlog.protocol.ids import member_name
from quorumlog.protocol.metadata import State
from quorumlog.wire.bodies import Body, BookieState, LedgerUse


class LedgerLeft(Body):
    """A ledger whose metadata still names the draining bookie, and the reason."""

    ledger_id: int
    bookie: str
    state: State
    reason: str


class Drain(Body):
    """The progress of a drain: the response of `GET /v1/drains/{bookie}`."""

    bookie: str
    state: BookieState
    done: bool
    """True if no metadata names the bookie, so that it may be stopped and decommissioned."""
    ledgers: int
    repairs: int
    """The number of items for the bookie in the repair queue."""
    why: str
    """The reason why the drain is not done, as a sentence; empty if the drain is done."""
    first: tuple[LedgerLeft, ...]


async def drain_of(name: str, metadata: MetadataClient, *, is_paused: bool = False) -> Drain:
    """Computes the progress of a bookie's drain. Raises: NoSuchBookie, MetadataUnavailable."""
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
    """Why a drain is not done: one cause for all ledgers, or their most frequent reason."""
    if is_paused:
        return "copying is paused: run `quorumlog repair resume` to continue"
    if state not in ("draining", "lost", None):
        return f"the bookie is {state}, not draining, so its entries are not moved"
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
    # The bookie was replaced, but the metadata keeps it until the repair's last step (rule 20b).
    kept = "it was replaced, and is kept until its successor has a copy of the metadata"
    return f"{kept}: {why}" if why else kept
