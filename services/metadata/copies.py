"""Asks all bookies for the copies that they hold of one ledger's row, and fences the ledger there (rule 18d).

Any bookie may be a member by a row that the database lacks. After the fence no writer gets an acknowledgement by
such a row, so that what the bookies hold then is all that a recovery could cut off.
"""

import asyncio
import logging
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import aiohttp
import orjson

from quorumlog.errors import NotEnoughBookies
from quorumlog.net.identity import Role
from quorumlog.net.sessions import ExpectedServer
from quorumlog.net.timers import awake_timeout
from quorumlog.protocol.ids import member_incarnation, member_name
from quorumlog.protocol.messages import Status
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.rebuild import Bookies
from quorumlog.wire import row_copies
from quorumlog.wire.bodies import received
from quorumlog.wire.rebuild_bodies import RowsPage
from services.metadata.database import Connection, Database, RowStore, plain
from services.metadata.inquiry import Inquiry
from services.metadata.kept import HeldCopies

log = logging.getLogger(__name__)

_ASK_S: Final = 1.5
"""For one bookie (taste). All are asked at once, and a client waits 3 s for the change."""
_FENCED: Final = (Status.OK, Status.WRONG_KEY)
"""A bookie that has another ledger of this id takes no add of this one either (rule 17)."""


class CopyInquiry(RowStore):
    """The questions of one process to all bookies about one ledger."""

    def __init__(self, database: Database, inquiry: Inquiry) -> None:
        super().__init__(database)
        self._inquiry = inquiry

    async def ask(self, row: LedgerMetadata) -> Sequence[HeldCopies]:
        """Fence the ledger at all bookies, and return the copies of its row that they hold.

        Raises: NotEnoughBookies while as many bookies are silent as may have confirmed entries by a later row.
        """
        registered, urls = await self._inquiry.places()
        async with self._inquiry.session() as session:
            asked = (_ask(session, name, f"{url}/v1", row) for name, url in urls)
            told = [each for each in await asyncio.gather(*asked) if each is not None]
        fenced = {each.name: each.incarnation for each in told if each.is_fenced}
        known = {*registered, *map(member_name, row.all_members)} - await self._lost()
        bookies = Bookies(fenced, frozenset(known - fenced.keys()))
        if bookies.may_hide_later(row):
            raise NotEnoughBookies(
                "the loss of changes was accepted, and bookies that may hold a later row of the ledger do not answer or"
                f" lost their data ({', '.join(sorted(bookies.silent))}): start them, or, if they never return, name"
                " them as lost (`quorumlog cluster accept --lost`)",
                ledger_id=row.ledger_id,
            )
        return [HeldCopies(each.name, each.attempts) for each in told]

    @plain
    async def _lost(self, connection: Connection) -> set[str]:
        """Bookies that never return, by an operator's word."""
        return set(await connection.fetchval("SELECT lost_bookies FROM cluster"))


@dataclass(frozen=True, slots=True)
class _Told:
    """What a bookie tells of the ledger."""

    name: str
    incarnation: int
    is_fenced: bool
    """Whether it takes no add by any row, and tells of all copies that it ever acknowledged."""
    attempts: tuple[str, ...]
    """Of its copies. One without a token is from before tokens were kept."""


async def _ask(
    session: aiohttp.ClientSession, name: str, url: str, row: LedgerMetadata
) -> _Told | None:
    """A bookie's copies once it was asked to fence the ledger; None where it is silent, or another one answers."""
    rows = f"{url}/rows?limit=1&after={row.ledger_id - 1}"
    expected = ExpectedServer(Role.BOOKIE, name)
    try:
        async with awake_timeout(_ASK_S):
            status = await _fence(session, url, row, expected)
            async with session.get(rows, ssl=expected) as answer:
                page = received(RowsPage, await answer.read())
        held = next((held for held in page.ledgers if held.ledger_id == row.ledger_id), None)
        copies = () if held is None else held.copies
        attempts = tuple(row_copies.decode(copy).attempt for copy in copies)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        log.info("bookie-silent", extra={"bookie": name, "url": url, "why": repr(error)})
        return None
    if member_name(page.bookie) != name:
        return None
    is_deleted = held is not None and held.deleted
    return _Told(
        name,
        member_incarnation(page.bookie),
        is_fenced=(status in _FENCED or is_deleted) and not page.may_lack,
        attempts=tuple(attempt for attempt in attempts if attempt),
    )


async def _fence(
    session: aiohttp.ClientSession, url: str, row: LedgerMetadata, expected: ExpectedServer
) -> object:
    """The bookie's verdict. Raises: as aiohttp does, ValueError."""
    key = {"X-Ledger-Key": b64encode(row.ledger_key).decode()}
    fence = f"{url}/ledgers/{row.ledger_id}/fence"
    async with session.post(fence, headers=key, ssl=expected) as answer:
        told = orjson.loads(await answer.read())
    return told.get("status") if isinstance(told, dict) else None
