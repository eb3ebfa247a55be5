"""The bookies that a rebuild asks, and what they hold, ledger by ledger (rule 18d)."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import aiohttp
from pydantic import ValidationError

from quorumlog.errors import InvalidRequest, Unavailable
from quorumlog.net.identity import Role
from quorumlog.net.sessions import ExpectedServer
from quorumlog.protocol.ids import member_incarnation, member_name
from quorumlog.wire.bodies import received
from quorumlog.wire.rebuild_bodies import HeldRows, RowsPage

_ASK_S: Final = 10.0
"""Timeout of one page (taste)."""
_TRIES: Final = 3
_PAGE: Final = 2000
"""Ledgers of one page; its bytes are bounded by the bookie."""


class SourceAway(Unavailable, title="A bookie stopped answering", travels=False):
    """A bookie that a rebuild reads stopped answering. What is written stays; run the rebuild again, with `after`."""


@dataclass(frozen=True, slots=True)
class Source:
    """A bookie that answered, and the head of its first page."""

    url: str
    head: RowsPage

    @property
    def name(self) -> str:
        """Without its incarnation."""
        return member_name(self.head.bookie)

    @property
    def incarnation(self) -> int:
        """The present one."""
        return member_incarnation(self.head.bookie)


async def find_sources(session: aiohttp.ClientSession, urls: Iterable[str]) -> list[Source]:
    """The bookies that answer at these URLs, by name. Raises: InvalidRequest if one name answers twice."""
    asked = sorted(set(urls))
    heads = await asyncio.gather(*(_head(session, url) for url in asked))
    sources = [
        Source(url, head)
        for url, head in zip(asked, heads, strict=True)
        if head is not None and head.cookie is not None
    ]
    sources.sort(key=lambda source: source.name)
    names = [source.name for source in sources]
    if twice := {name for name in names if names.count(name) > 1}:
        raise InvalidRequest(f"two processes answer as bookie {min(twice)} (rule 15a)")
    return sources


async def _head(session: aiohttp.ClientSession, url: str) -> RowsPage | None:
    try:
        return await _page(session, url, "", after=-1, limit=1)
    except SourceAway:
        return None


async def merged(
    session: aiohttp.ClientSession, sources: Sequence[Source], after: int
) -> AsyncIterator[tuple[int, list[tuple[Source, HeldRows]]]]:
    """Each ledger above `after` that a bookie holds, ascending, with what each bookie holds of it. Raises: SourceAway."""
    streams = [aiter(_ledgers(session, source, after)) for source in sources]
    heads = [await anext(stream, None) for stream in streams]
    while found := [head.ledger_id for head in heads if head is not None]:
        ledger_id = min(found)
        holding = []
        for index, head in enumerate(heads):
            if head is not None and head.ledger_id == ledger_id:
                holding.append((sources[index], head))
                heads[index] = await anext(streams[index], None)
        yield ledger_id, holding


async def _ledgers(
    session: aiohttp.ClientSession, source: Source, after: int
) -> AsyncIterator[HeldRows]:
    following: int | None = after
    while following is not None:
        page = await _page(session, source.url, source.name, after=following, limit=_PAGE)
        if page.bookie != source.head.bookie:
            raise SourceAway(f"{source.url} answers as {page.bookie} now", bookie=source.name)
        for held in page.ledgers:
            yield held
        following = page.next


async def _page(
    session: aiohttp.ClientSession, url: str, name: str, *, after: int, limit: int
) -> RowsPage:
    """`name`: that of the bookie; "" where nobody has told it yet."""
    expected = ExpectedServer(Role.BOOKIE, name)
    why: Exception | None = None
    for _ in range(_TRIES):
        try:
            async with (
                asyncio.timeout(_ASK_S),
                session.get(f"{url}/v1/rows?after={after}&limit={limit}", ssl=expected) as answer,
            ):
                answer.raise_for_status()
                return received(RowsPage, await answer.read())
        except (aiohttp.ClientError, OSError, TimeoutError, ValidationError) as error:
            why = error
    raise SourceAway(f"{url} does not tell its rows: {why!r}")
