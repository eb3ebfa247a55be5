"""Queries bookies for their stored entries of a CLOSED ledger, to prove a loss (rule 31).

`POST /v1/ledgers/{id}/digests` reads every entry that it reports, so a reported copy can be served.
Any result except a checked answer counts as silence.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

import aiohttp

from quorumlog.net.directory import Directory
from quorumlog.net.identity import Role
from quorumlog.net.sessions import ExpectedServer
from quorumlog.protocol import loss
from quorumlog.protocol.ids import member_incarnation, member_name
from quorumlog.protocol.loss import Answers, Holding, Word
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.ranges import Ranges
from quorumlog.wire.bodies import Body, T, json_of, received
from quorumlog.wire.rebuild_bodies import DigestsAsked, DigestsBody

_SPAN: Final = 1000
"""Number of entries in one request: a bookie's answer can list at most 1,000 ranges."""
_ASK_S: Final = 60.0


class HoldingsClient:
    """Queries a ledger's bookies for their stored entries."""

    def __init__(self, directory: Directory, session: aiohttp.ClientSession) -> None:
        """`session`: shared, and not closed by this client."""
        self._directory = directory
        self._session = session

    async def answers(self, row: LedgerMetadata, ranges: Ranges) -> AsyncIterator[Answers]:
        """Yield for each entry, in order, the answers of all bookies that could store it."""
        for low, high in ranges:
            for first in range(low, high + 1, _SPAN):
                last = min(high, first + _SPAN - 1)
                ids = range(first, last + 1)
                members = tuple({m: None for e in ids for m in loss.holders(row, e)})
                found_by = await asyncio.gather(
                    *(self._ask(member, row.ledger_id, first, last) for member in members)
                )
                for found in loss.answers(row, ids, dict(zip(members, found_by, strict=True))):
                    yield found

    async def lost(self, row: LedgerMetadata, ranges: Ranges) -> tuple[Answers, ...]:
        """The lost entries: every bookie that could store them reports that it lacks them."""
        if row.last_entry is None:
            return ()  # the ledger has no last entry yet, so nothing can be proven lost
        kept = tuple(
            part
            for first, last in ranges
            for part in row.kept(max(0, first), min(last, row.last_entry))
        )
        lost: list[Answers] = []
        silent: set[str] = set()
        for first, last in kept:
            # One silent bookie makes a proof impossible, so the first silence ends the search.
            if silent.isdisjoint(loss.holders(row, first)):
                async for found in self.answers(row, ((first, last),)):
                    if found.is_lost():
                        begun = lost[-1] if lost else found
                        if (begun.words, begun.last + 1) == (found.words, found.first):
                            lost[-1] = replace(begun, last=found.last)
                        else:
                            lost.append(found)
                    silent.update(who for who, word in found.words if word is Word.SILENT)
                    if silent:
                        break
        return tuple(lost)

    async def _ask(self, member: str, ledger_id: int, first: int, last: int) -> Holding | None:
        """A member's answer; None if the member is silent."""
        name = member_name(member)
        url = f"{self._directory.address(name)}/v1/ledgers/{ledger_id}/digests"
        asked = DigestsAsked(ranges=((first, last),))
        answer = await ask_bookie(self._session, name, url, DigestsBody, asked, limit_s=_ASK_S)
        if answer is None or len(answer.digests) != 1:
            return None
        part = answer.digests[0]
        if (answer.ledger_id, part.first, part.last) != (ledger_id, first, last):
            return None
        return Holding(part.present, part.damaged) if _speaks_for(answer.bookie, member) else None


def answers_json(found: Answers) -> dict[str, Any]:
    """A lost range, and the answer of each bookie that could store it, as a JSON object."""
    return {"first": found.first, "last": found.last, "answers": dict(found.words)}


async def ask_bookie(
    session: aiohttp.ClientSession,
    name: str,
    url: str,
    gives: type[T],
    asked: Body | None = None,
    *,
    limit_s: float,
) -> T | None:
    """Send a bookie a GET, or a POST with the body `asked`, and return the answer, parsed as
    `gives`. Returns None unless the bookie `name` answers 200 with a valid body within `limit_s`.
    """
    ask = session.get if asked is None else partial(session.post, data=json_of(asked))
    limit, expected = aiohttp.ClientTimeout(total=limit_s), ExpectedServer(Role.BOOKIE, name)
    try:
        async with ask(url, timeout=limit, ssl=expected) as response:
            body = await response.read()
        return received(gives, body) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return None


def _speaks_for(bookie: str, member: str) -> bool:
    """Whether the answer of `bookie` counts as that of `member`. A later incarnation's answer
    counts, because it has the remaining data of earlier incarnations (rule 15). An earlier
    incarnation's answer does not, because it comes from an old copy of the directory.
    """
    try:
        is_later = member_incarnation(bookie) >= member_incarnation(member)
    except ValueError:
        return False
    return is_later and member_name(bookie) == member_name(member)
