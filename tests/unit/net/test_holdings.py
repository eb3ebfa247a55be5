"""What counts as the word of all who could hold an entry: against peers of any manners (rule 31)."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
from aiohttp import web

from quorumlog.net.directory import Directory
from quorumlog.net.holdings import HoldingsClient
from quorumlog.protocol.loss import Word
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.wire.bodies import BookieInfo, BookieList
from tests.support.answering import answering
from tests.unit.protocol.hands import ledger

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
