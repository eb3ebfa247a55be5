"""Which bookies are proposed for an ensemble, and what bookies say that they hold."""

import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from quorumlog.errors import MetadataUnavailable
from quorumlog.net import directory as directory_module
from quorumlog.net.directory import Directory, Quarantine, QuarantineRule
from quorumlog.net.holdings import HoldingsClient
from quorumlog.protocol.loss import Word
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.protocol.quorum import Quorum
from quorumlog.wire.bodies import BookieInfo, BookieList, BookieState
from tests.support.answering import answering
from tests.unit.protocol.hands import ledger


def bookie(
    number: int, state: BookieState = "writable", zone: str = "", free_bytes: int = 0
) -> BookieInfo:
    return BookieInfo(
        id=f"b{number}@1", state=state, url=f"http://b{number}", zone=zone, free_bytes=free_bytes
    )


async def directory_of(*bookies: BookieInfo, quarantine: Quarantine | None = None) -> Directory:
    async def fetch() -> BookieList:
        return BookieList(bookies=bookies)

    directory = Directory(fetch, quarantine or Quarantine(), random.Random(1))
    await directory.refresh()
    return directory


async def test_only_writable_members_that_are_not_excluded_are_proposed() -> None:
    directory = await directory_of(
        bookie(1), bookie(2), bookie(3, "read-only"), bookie(4, "draining"), bookie(5, "lost")
    )

    assert set(directory.candidates((), ())) == {"b1@1", "b2@1"}
    assert directory.candidates((), ("b1@1",)) == ("b2@1",)
    assert directory.address("b5") == "http://b5"
    assert directory.address("b9") is None


async def test_an_ensemble_spreads_over_zones() -> None:
    directory = await directory_of(*[bookie(n, zone="abc"[n % 3]) for n in range(9)])

    for _ in range(20):
        found = directory.new_ensemble(3)
        assert found is not None
        members, is_degraded = found
        assert not is_degraded
        assert {int(member[1]) % 3 for member in members} == {0, 1, 2}


async def test_a_replacement_comes_from_the_zone_that_was_left() -> None:
    directory = await directory_of(*[bookie(n, zone="abc"[n % 3]) for n in range(9)])

    found = directory.candidates(("b0@1", "b1@1", "b2@1"), ("b0@1", "b1@1", "b2@1"))
    best = directory.candidates(("b0@1", "b1@1", "b2@1"), ("b0@1", "b1@1"))

    assert Counter(int(member[1]) % 3 for member in found) == {0: 2, 1: 2, 2: 2}
    assert int(best[0][1]) % 3 == 2


@pytest.mark.parametrize("lost", [1, 2, 3])
async def test_a_degraded_ensemble_leaves_every_write_set_its_ack_quorum(lost: int) -> None:
    quorum = Quorum(5, 3, 2)
    bookies = [bookie(n, "lost" if n < lost else "writable") for n in range(5)]
    directory = await directory_of(*bookies)
    dead = {one.id for one in bookies if one.state == "lost"}

    assert directory.new_ensemble(5) is None
    found = directory.new_ensemble(5, degraded_ack=(3, 2))

    if found is None:
        # Five neighbours with two gaps have three in a row with two gaps, wherever those are.
        assert lost > 1
        return
    members, is_degraded = found
    assert is_degraded
    assert len(set(members)) == 5
    for entry_id in range(5):
        live = [p for p in quorum.write_set(entry_id) if members[p] not in dead]
        assert len(live) >= 2


async def test_a_degraded_ensemble_names_a_drained_bookie_only_where_there_is_no_other() -> None:
    live = (bookie(1), bookie(2))
    drained = (bookie(3, "draining"), bookie(4, "draining"))
    with_a_lost_one = await directory_of(*live, *drained, bookie(5, "lost"))
    without = await directory_of(*live, *drained)

    for _ in range(20):
        found = with_a_lost_one.new_ensemble(3, degraded_ack=(3, 2))
        assert found is not None
        assert set(found[0]) == {"b1@1", "b2@1", "b5@1"}
    assert without.new_ensemble(3, degraded_ack=(3, 2)) is not None


async def test_an_old_list_serves_while_metadata_is_away() -> None:
    answers = [BookieList(bookies=(bookie(1),))]

    async def fetch() -> BookieList:
        if not answers:
            raise MetadataUnavailable("away")
        return answers.pop()

    directory = Directory(fetch)
    assert not directory.is_known
    await directory.refresh()
    with pytest.raises(MetadataUnavailable):
        await directory.refresh()

    assert directory.writable() == ("b1@1",)


async def test_bookies_with_more_room_are_chosen_more_often() -> None:
    gib = 1 << 30
    directory = await directory_of(bookie(1, free_bytes=30 * gib), bookie(2, free_bytes=10 * gib))

    first = Counter(directory.writable()[0] for _ in range(2000))

    assert 1400 < first["b1@1"] < 1600  # seeded: 3 of 4
    assert first["b2@1"] == 2000 - first["b1@1"]


async def test_bookies_that_claim_any_room_do_not_get_all_places() -> None:
    honest = [bookie(number, free_bytes=100 << 30) for number in range(4, 10)]
    liars = [bookie(number, free_bytes=2**62) for number in range(1, 4)]
    directory = await directory_of(*liars, *honest)
    names = {liar.id for liar in liars}

    found = [directory.new_ensemble(3) for _ in range(2000)]

    captured = sum(chosen is not None and set(chosen[0]) == names for chosen in found)
    assert 200 < captured < 400  # seeded: 12/18 * 8/14 * 4/10 of all, and not all


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_a_failing_bookie_is_not_chosen_for_a_while_unless_it_is_needed() -> None:
    clock = Clock()
    quarantine = Quarantine(QuarantineRule(failures=3, window_s=60, for_s=300), clock)
    directory = await directory_of(
        *[bookie(n, zone="ab"[n % 2]) for n in range(4)], quarantine=quarantine
    )
    for _ in range(3):
        quarantine.failed("b1")

    assert quarantine.names == ("b1",)
    for _ in range(20):
        assert directory.writable()[-1] == "b1@1"
        found = directory.new_ensemble(3)
        assert found is not None
        assert "b1@1" not in found[0]  # though its zone has but one other
        assert directory.candidates(("b0@1",), ("b0@1",))[-1] == "b1@1"
    needed = directory.new_ensemble(4)
    assert needed is not None
    assert "b1@1" in needed[0]

    clock.now = 301.0
    assert not quarantine.names
    made = [directory.new_ensemble(3) for _ in range(50)]
    assert any(found is not None and "b1@1" in found[0] for found in made)


async def test_failures_far_apart_or_of_a_bookie_that_was_gone_do_not_count() -> None:
    clock = Clock()
    quarantine = Quarantine(QuarantineRule(failures=3, window_s=60, for_s=300), clock)
    for clock.now in (0.0, 40.0, 80.0, 120.0):
        quarantine.failed("b1")
    assert not quarantine.contains("b1")
    for _ in range(3):
        quarantine.failed("b2")
    await directory_of(bookie(2, "lost"), quarantine=quarantine)
    assert not quarantine.contains("b2")


async def test_bookies_beyond_the_bound_are_quarantined(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of the one that failed first goes, and its failures count from zero."""
    monkeypatch.setattr(directory_module, "_BOOKIES_MAX", 2)
    quarantine = Quarantine(QuarantineRule(failures=3, window_s=60, for_s=300), Clock())
    for name in ("b1", "b2", "b3", "b3", "b3"):
        quarantine.failed(name)

    assert list(quarantine.names) == ["b3"]
    for name in ("b2", "b2"):
        quarantine.failed(name)
    assert list(quarantine.names) == ["b2", "b3"], "the known ones are still counted"


async def test_a_census_tells_who_lives_apart_from_who_takes_entries() -> None:
    quarantine = Quarantine(QuarantineRule(1, 60.0, 60.0))
    states: tuple[BookieState, ...] = ("read-only", "read-only", "draining", "writable", "lost")
    directory = await directory_of(
        *(bookie(n, state) for n, state in enumerate(states)), quarantine=quarantine
    )
    quarantine.failed("b3")

    assert directory.census() == (
        "4 of 5 bookies live (1 draining, 2 read-only, 1 writable), 1 lost, "
        "1 suspected here (in quarantine)"
    )
    assert (await directory_of()).census() == "0 of 0 bookies live"


ROW = ledger(e=2, qw=2, qa=1, state=State.CLOSED, last_entry=2499, length=10)


class Peer:
    """A bookie that has entries 0 to 9, and answers with what a test adds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.status = 200
        self.reported: dict[str, Any] = {}
        self.part: dict[str, Any] = {}
        self.asked: list[tuple[int, int]] = []

    async def digests(self, request: web.Request) -> web.Response:
        ((first, last),) = (await request.json())["ranges"]
        self.asked.append((first, last))
        present = [[first, min(last, 9)]] if first <= 9 else []
        part = {"first": first, "last": last, "present": present, "damaged": []} | self.part
        part = {"entries": max(0, min(last, 9) - first + 1), "digest": "d"} | part
        reported = {"bookie": f"{self.name}@1", "ledger_id": 7, "limbo": False, "digests": [part]}
        # What a newer bookie says besides is no reason for silence.
        body = reported | {"newer": 1} | self.reported
        return web.json_response(body, status=self.status)


@asynccontextmanager
async def asking(*peers: Peer) -> AsyncIterator[HoldingsClient]:
    infos: list[BookieInfo] = []

    async def fetch() -> BookieList:
        return BookieList(bookies=tuple(infos))

    async with AsyncExitStack() as stack:
        for peer in peers:
            server = answering(peer.digests, "/v1/ledgers/7/digests")
            url = await stack.enter_async_context(server)
            infos.append(BookieInfo(id=f"{peer.name}@1", state="writable", url=url))
        directory = Directory(fetch)
        await directory.refresh()
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield HoldingsClient(directory, session)


async def lost(
    holdings: HoldingsClient, first: int, last: int, row: LedgerMetadata = ROW
) -> list[tuple[int, int]]:
    return [(a.first, a.last) for a in await holdings.lost(row, ((first, last),))]


async def test_what_both_deny_is_lost_and_nothing_else() -> None:
    b1, b2 = Peer("b1"), Peer("b2")
    async with asking(b1, b2) as holdings:
        assert await lost(holdings, 5, 20) == [(10, 20)]
        b2.part = {"present": [[15, 16]]}
        assert await lost(holdings, 5, 20) == [(10, 14), (17, 20)]
        b2.part = {"present": [[15, 16]], "damaged": [[15, 16]]}
        assert await lost(holdings, 5, 20) == [(10, 14), (17, 20)]


async def test_a_later_incarnation_speaks_for_its_disk_and_limbo_is_no_reason_for_silence() -> None:
    b1, b2 = Peer("b1"), Peer("b2")
    b1.reported = {"bookie": "b1@3", "limbo": True}
    async with asking(b1, b2) as holdings:
        assert await lost(holdings, 10, 10) == [(10, 10)]


async def test_a_reply_about_another_member_or_ledger_is_ignored() -> None:
    wrong: tuple[dict[str, Any], ...] = (
        {"status": 503},
        {"reported": {"bookie": "b2@1"}},
        {"reported": {"bookie": "b1@0"}},
        {"reported": {"bookie": "b1"}},
        {"reported": {"ledger_id": 8}},
        {"reported": {"digests": []}},
        {"reported": {"limbo": None}},
        {"part": {"first": 9}},
        {"part": {"present": None}},
    )
    for manners in wrong:
        b1, b2 = Peer("b1"), Peer("b2")
        for name, value in manners.items():
            setattr(b1, name, value)
        async with asking(b1, b2) as holdings:
            assert await lost(holdings, 10, 10) == [], manners
            (found,) = [a async for a in holdings.answers(ROW, ((10, 10),))]
            assert dict(found.words) == {"b1@1": Word.SILENT, "b2@1": Word.ABSENT}, manners


async def test_nobody_listens_is_silence_and_is_asked_once() -> None:
    b2 = Peer("b2")
    async with asking(b2) as holdings:
        assert await lost(holdings, 0, 2499) == []
        assert b2.asked == [(0, 999)]


async def test_a_bookie_is_asked_for_no_more_than_it_names_whole() -> None:
    b1, b2 = Peer("b1"), Peer("b2")
    async with asking(b1, b2) as holdings:
        assert await lost(holdings, 0, 2499) == [(10, 2499)]
        assert b1.asked == b2.asked == [(0, 999), (1000, 1999), (2000, 2499)]


async def test_what_was_given_up_or_has_no_end_yet_is_not_asked_for() -> None:
    b1, b2 = Peer("b1"), Peer("b2")
    async with asking(b1, b2) as holdings:
        assert await lost(holdings, 10, 12, ROW.given_up(10, 11, ())) == [(12, 12)]
        assert await lost(holdings, 2400, 9999, ROW.given_up(0, 2498, ())) == [(2499, 2499)]
        asked = len(b1.asked)
        open_row = replace(ROW, state=State.OPEN, last_entry=None, length=None)
        assert await lost(holdings, 10, 12, open_row) == []
        assert len(b1.asked) == asked
