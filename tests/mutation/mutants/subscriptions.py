"""Mutants of subscriptions: the guards of rule 34, which seeds of their simulation must miss."""

from dataclasses import replace
from typing import Any, Final

from quorumlog.protocol import subscriptions
from quorumlog.protocol.offset_store import OffsetStore
from quorumlog.protocol.rows import Rows
from quorumlog.protocol.subscriptions import (
    AckWake,
    Delivered,
    Ends,
    Link,
    Phase,
    Subscription,
    SubscriptionDraft,
    Subscriptions,
)
from tests.model.subscriptions import simulation
from tests.model.subscriptions.simulation import run
from tests.mutation.mutants.guards import always
from tests.mutation.mutants.hunt import Histories, Patch, stand_in
from tests.mutation.mutants.positions import by_the_wall, told_at_once

SUBSCRIPTIONS: Final = Histories("subscriptions", run, range(1, 201))


@stand_in
def _of_any_wake(
    original: Any, self: SubscriptionDraft, row: Subscription, request: AckWake
) -> Any:
    return original(self, row, replace(request, generation=row.generation, wake_id=row.wake_id))


@stand_in
def _of_any_delivery(
    original: Any, self: SubscriptionDraft, row: Subscription, request: Delivered
) -> Any:
    return original(self, row, replace(request, generation=row.generation))


@stand_in
def _any_offset(_original: Any, row: Subscription, request: AckWake) -> tuple[Link, ...]:
    links = {each.log: each for each in row.links}
    for log, created, offset in request.acks:
        if log in links and links[log].created == created:
            links[log] = replace(links[log], acked=offset)
    return tuple(links.values())


@stand_in
def _with_the_old_number(
    original: Any, self: SubscriptionDraft, row: Subscription, ends: Ends, wake_id: str
) -> Subscription:
    woken: Subscription = original(self, row, ends, wake_id)
    return replace(woken, generation=max(row.generation, 1))


@stand_in
def _given_up(original: Any, self: SubscriptionDraft, row: Subscription, request: Any) -> Any:
    failed: Subscription = original(self, row, request)
    is_now = failed.attempts > row.attempts
    return self._put(replace(failed, phase=Phase.IDLE, wake_id=""), row) if is_now else failed


@stand_in
def _whatever_its_creation(
    original: Any, row: Subscription, stream: str, created: str
) -> Subscription:
    found = next((each.created for each in row.links if each.log == stream), created)
    gone: Subscription = original(row, stream, found)
    return gone


@stand_in
def _where_the_old_one_was(original: Any, old: Link, new: Link) -> Link:
    again: Link = original(old, new)
    return replace(again, acked=old.acked)


@stand_in
def _up_to_the_end(
    original: Any, self: SubscriptionDraft, row: Subscription, request: AckWake
) -> Any:
    """A `done` acknowledges all, also what came after the wake."""
    acks = tuple((log, created, end) for log, created, end in request.ends)
    known = {(each.log, each.created) for each in row.links if each.created}
    if request.is_done and {each[:2] for each in acks} <= known:
        request = replace(request, acks=acks)
    return original(self, row, request)


@stand_in
def _by_its_name(
    original: Any, row: Subscription, stream: str, created: str, *, is_match: bool
) -> Any:
    is_known = any(each.log == stream for each in row.links)
    return None if is_known else original(row, stream, created, is_match=is_match)


@stand_in
def _as_before(original: Any, self: SubscriptionDraft, row: Subscription, request: Any) -> Any:
    return row if row.last == request.wake_id else original(self, row, request)


@stand_in
def _sent_once(original: Any, self: Subscription, wall_ms: int) -> int | None:
    left_ms: int | None = original(self, wall_ms)
    return None if self.phase == Phase.OPEN else left_ms


SUBSCRIPTION_MUTANTS: Final = (
    Patch(subscriptions, "_is_meant", always(True)).mutant(
        "an answer for an earlier creation of a subscription acknowledges a wake", "34"
    ),
    Patch(subscriptions.Discovery, "answered", always(None)).mutant(
        "a stream whose link failed is not linked again", "34"
    ),
    Patch(simulation, "discovered", _by_its_name).mutant(
        "a stream that was created again is taken for the old stream", "34"
    ),
    Patch(Subscription, "sends_in_ms", _sent_once).mutant(
        "an unclaimed wake is announced only once", "34"
    ),
    Patch(SubscriptionDraft, "_acknowledged", _of_any_wake).mutant(
        "a stale wake acknowledges offsets", "34"
    ),
    Patch(SubscriptionDraft, "_claimed", _as_before).mutant(
        "a late copy of a claim gets the wake of another worker", "34"
    ),
    Patch(SubscriptionDraft, "_delivered", _of_any_delivery).mutant(
        "the answer to an earlier wake ends the current one", "34"
    ),
    Patch(subscriptions, "_acked", _any_offset).mutant("an acknowledged offset moves back", "34"),
    Patch(SubscriptionDraft, "_acknowledged", _up_to_the_end).mutant(
        "a finished wake acknowledges records that the wake did not show", "34"
    ),
    Patch(SubscriptionDraft, "_woken", _with_the_old_number).mutant(
        "two wakes share one generation", "34"
    ),
    Patch(SubscriptionDraft, "_failed", _given_up).mutant(
        "a subscription gives up a wake that was not delivered", "34"
    ),
    Patch(Subscriptions, "held_until", always(0.0)).mutant(
        "a wake is not held for its worker", "34"
    ),
    Patch(Rows, "learned", always(None)).mutant(
        "a new owner ends a wake at once that may be held", "34"
    ),
    Patch(subscriptions, "_without_stream", _whatever_its_creation).mutant(
        "a stream's deletion ends the link of a later stream", "34"
    ),
    Patch(subscriptions, "_again", _where_the_old_one_was).mutant(
        "a stream that was created again begins at the old offset", "34"
    ),
    Patch(OffsetStore, "_append", told_at_once).mutant(
        "a claimed wake is reported before it is in the log", "34"
    ),
    Patch(OffsetStore, "step", by_the_wall).mutant("a wake ends by the wall clock", "34"),
)
