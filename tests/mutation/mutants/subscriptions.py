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
        "the answer to an earlier creation acknowledges a wake", "34"
    ),
    Patch(subscriptions.Discovery, "answered", always(None)).mutant(
        "a stream whose link failed is not linked again", "34"
    ),
    Patch(simulation, "discovered", _by_its_name).mutant(
        "a stream that was created again is known by its name", "34"
    ),
    Patch(Subscription, "sends_in_ms", _sent_once).mutant(
        "a wake that no worker claims is announced once", "34"
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
    Patch(subscriptions, "_acked", _any_offset).mutant("acknowledged offsets go back", "34"),
    Patch(SubscriptionDraft, "_acknowledged", _up_to_the_end).mutant(
        "an end acknowledges what the wake did not show", "34"
    ),
    Patch(SubscriptionDraft, "_woken", _with_the_old_number).mutant(
        "two wakes have one generation", "34"
    ),
    Patch(SubscriptionDraft, "_failed", _given_up).mutant(
        "a wake that was not delivered is given up", "34"
    ),
    Patch(Subscriptions, "held_until", always(0.0)).mutant("no wake is held", "34"),
    Patch(Rows, "learned", always(None)).mutant(
        "a new owner ends at once a wake that may be held", "34"
    ),
    Patch(subscriptions, "_without_stream", _whatever_its_creation).mutant(
        "the deletion of a stream ends the link of a later one", "34"
    ),
    Patch(subscriptions, "_again", _where_the_old_one_was).mutant(
        "a stream that was created again begins where the old one was", "34"
    ),
    Patch(OffsetStore, "_append", told_at_once).mutant(
        "a claimed wake is told before it is in the log", "34"
    ),
    Patch(OffsetStore, "step", by_the_wall).mutant("a wake ends by the clock on the wall", "34"),
)
