"""What an audit concludes: who is lost, what is missing, and when nothing may be concluded."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from quorumlog.protocol import limbo
from quorumlog.protocol.loss import Answers
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.ranges import Ranges
from quorumlog.wire.bodies import BookieInfo
from services.autorecovery import findings as losses_module
from services.autorecovery.findings import (
    GracePeriod,
    LostMembers,
    is_believable,
    missing_zones,
    survivors_of,
)

ROW = LedgerMetadata(
    1,
    Quorum(3, 3, 2),
    DigestKind.CRC32C,
    (Fragment(0, ("a@1", "b@1", "c@1")), Fragment(10, ("a@1", "d@1", "c@1"))),
)


def bookies(*states: str) -> list[BookieInfo]:
    return [
        BookieInfo.model_validate({"id": f"{name}@1", "state": state, "url": ""})
        for name, state in zip("abcd", states, strict=False)
    ]


def test_a_bookie_is_lost_only_after_the_delay() -> None:
    lost = LostMembers(60.0)

    assert lost.update(bookies("lost", "writable", "read-only"), now=0.0) == ()
    assert lost.update(bookies("lost", "writable", "read-only"), now=59.0) == ()
    assert lost.update(bookies("lost", "writable", "read-only"), now=60.0) == ("a@1",)


def test_a_bookie_that_returned_gets_a_new_delay() -> None:
    lost = LostMembers(60.0)
    lost.update(bookies("lost", "writable", "writable"), now=0.0)
    lost.update(bookies("writable", "writable", "writable"), now=30.0)

    assert lost.update(bookies("lost", "writable", "writable"), now=61.0) == ()


def test_a_second_loss_within_the_delay_ends_the_delay() -> None:
    lost = LostMembers(60.0)
    lost.update(bookies("lost", "writable", "writable"), now=0.0)

    assert lost.update(bookies("lost", "lost", "writable"), now=1.0) == ("a@1", "b@1")


def test_earlier_incarnations_of_a_live_bookie_are_lost_at_once() -> None:
    reborn = BookieInfo.model_validate({"id": "a@3", "state": "writable", "url": ""})

    assert LostMembers(60.0).update([reborn], now=0.0) == ("a@1", "a@2")


def test_liveness_without_most_bookies_is_not_believed() -> None:
    assert is_believable(bookies("lost", "writable", "writable", "writable"), share_max=0.5)
    assert not is_believable(bookies("lost", "lost", "lost", "writable"), share_max=0.5)
    assert not is_believable([], share_max=0.5)


def test_a_lost_member_lacks_its_fragments_and_the_open_one_without_end() -> None:
    assert tuple(limbo.places(ROW, "b@1")) == ((0, 9),)
    assert tuple(limbo.places(ROW, "d@1")) == ((10, limbo.ENDLESS),)
    assert tuple(limbo.places(ROW, "e@1")) == ()


def test_a_ledger_counts_its_weakest_fragment() -> None:
    assert survivors_of(ROW, ("b@1",)) == 2
    assert survivors_of(ROW, ("a@1", "d@1")) == 1


def test_a_grace_period_expires_only_for_keys_seen_without_a_break() -> None:
    grace = GracePeriod(30.0)
    list(grace.expired({"x": 1, "y": 2}, now=0.0))
    list(grace.expired({"x": 1}, now=15.0))

    assert list(grace.expired({"x": 1, "y": 2}, now=30.0)) == [1]


def test_a_grace_period_restarts_after_an_equally_long_time_without_observation() -> None:
    """Who was missing before it and is after it may have been there all the time (rule 21)."""
    grace, lost = GracePeriod(30.0), LostMembers(30.0)
    away = bookies("lost", "writable", "writable")
    for now, is_over in ((0.0, False), (25.0, False), (60.0, False), (89.0, False), (90.0, True)):
        assert list(grace.expired({"x": 1}, now=now)) == [1] * is_over
        assert lost.update(away, now=now) == ("a@1",) * is_over
        if now == 25.0:
            for blind in (30.0, 50.0):
                grace.note_unobserved(blind)
                lost.note_unobserved(blind)


def test_a_grace_period_continues_over_a_short_time_without_observation() -> None:
    grace, lost = GracePeriod(30.0), LostMembers(30.0)
    away = bookies("lost", "writable", "writable")
    list(grace.expired({"x": 1}, now=0.0))
    lost.update(away, now=0.0)
    grace.note_unobserved(10.0)
    lost.note_unobserved(10.0)

    assert list(grace.expired({"x": 1}, now=30.0)) == [1]
    assert lost.update(away, now=30.0) == ("a@1",)


def test_a_ledger_in_fewer_zones_than_possible_is_reported() -> None:
    zones = {"b1@1": "a", "b2@1": "a", "b3@1": "b", "b4@1": "c"}
    live = [
        BookieInfo(id=member, state="writable", url="", zone=zone) for member, zone in zones.items()
    ]
    spread = LedgerMetadata(1, Quorum(2, 2, 1), DigestKind.CRC32C, (Fragment(0, ("b1@1", "b3@1")),))
    together = replace(spread, fragments=(Fragment(0, ("b1@1", "b2@1")),))
    assert missing_zones(spread, live) == 0
    assert missing_zones(together, live) == 1
    assert missing_zones(together, live[:2]) == 0  # there is only one zone
    lost = [BookieInfo.lost("b2", 1), *(bookie for bookie in live if bookie.id != "b2@1")]
    assert missing_zones(together, lost) == 0  # that is repair's


async def test_beyond_the_bound_the_oldest_loss_recurs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses_module, "_LEDGERS_MAX", 1)

    class Denied:
        async def lost(self, _row: LedgerMetadata, ranges: Ranges) -> tuple[Answers, ...]:
            return tuple(Answers(first, last, ()) for first, last in ranges)

    losses = losses_module.KnownLosses(cast(Any, Denied()))
    for ledger_id in (7, 8):
        row = cast(LedgerMetadata, SimpleNamespace(ledger_id=ledger_id))
        assert len(await losses.recheck(row, ((0, 1),))) == 1
    assert [found["ledger_id"] for found in losses.json()] == [8]

    await losses.recheck(cast(LedgerMetadata, SimpleNamespace(ledger_id=7)), ((0, 1),))

    assert [found["ledger_id"] for found in losses.json()] == [7]
    assert losses.entries == 2
