"""Requests to the bookies for witnesses, for the copies of a ledger's row, and for all copies.

Before a process changes the database, it collects the bookies' witnesses and ledger ids (rule 18a).
Otherwise a new process could not detect that the database went back in time. It would then expire a
committed transaction, or assign the id of an existing ledger. A rebuild reads all copies (rule 18d).

Any bookie may be a member of a ledger by a row that the database lacks, so requests for copies go to
all bookies. The bookies first fence the ledger, so that no entry is acknowledged under a lost row.
"""

import asyncio
import logging
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import aiohttp
import orjson
from pydantic import ValidationError

from quorumlog import errors
from quorumlog.net.identity import ANONYMOUS, Credentials, Role
from quorumlog.net.sessions import ExpectedServer, service_session
from quorumlog.net.timers import awake, awake_timeout
from quorumlog.protocol.ids import NO_LEDGER, member_incarnation, member_name
from quorumlog.protocol.messages import Status
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.rebuild import Bookies, shown
from quorumlog.wire import row_copies
from quorumlog.wire.bodies import BookieWitnesses, received
from quorumlog.wire.rebuild_bodies import HeldRows, RowsPage
from services.metadata.cookies import CookieStore
from services.metadata.database import SERVER, Database
from services.metadata.liveness import Liveness
from services.metadata.losses import HeldCopies
from services.metadata.memory import Presented
from services.metadata.rebuild_store import registered_of

log = logging.getLogger(__name__)

T = TypeVar("T")

_ASK_S: Final = 2.0
"""Time limit for one bookie (chosen by judgement). Silent bookies delay a start by this time."""
_COPIES_S: Final = 1.5
"""Time limit for one bookie's copies. Meanwhile a client waits up to 3 s for its change."""
_LOST: Final = "SELECT lost_bookies FROM cluster"
_FENCED: Final = (Status.OK, Status.WRONG_KEY)
"""Responses to a fence that rule out adds. WRONG_KEY: the bookie has another ledger (rule 17)."""
_RETRY_S: Final = 0.5
_AGAIN_S: Final = 1.0
_WAIT_S: Final = 60.0
"""How long the expiry of transactions waits for silent bookies, which may start after this process
(chosen by judgement). A late expiry does no harm."""
_PAGE_S: Final = 10.0
"""Time limit of one page of rows (chosen by judgement)."""
_TRIES: Final = 3
_PAGE: Final = 2000
"""Maximum number of ledgers per page. The bookie also limits the page's bytes."""
_NO_TIMEOUT: Final = aiohttp.ClientTimeout(total=None)
"""Disables aiohttp's own timers, which continue while this process is suspended."""

# Two processes may run this query at once. If an id is assigned twice, bookies reject one ledger.
_SKIP_IDS: Final = (
    "SELECT setval('ledger_ids', $1) FROM ledger_ids"
    " WHERE last_value < $1 OR (last_value = $1 AND NOT is_called)"
)


@dataclass(eq=False)
class Inquiry:
    """Sends one metadata process's requests to all bookies."""

    _database: Database
    _cookies: CookieStore
    _liveness: Liveness
    _credentials: Credentials = ANONYMOUS
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once all registered bookies have responded about the current server, or the wait for them
    is over. Expiry waits for this event."""

    async def run(self) -> None:
        """Query the bookies as soon as the database responds, and again after each failover. After
        each round this process may change the database.
        """
        while True:
            if self._database.has_asked:
                await asyncio.sleep(_RETRY_S)
            else:
                self.is_over.clear()
                await self._ask_about_server()

    async def _ask_about_server(self) -> None:
        try:
            server = await self._database.run(lambda connection: connection.fetchval(SERVER))
        except errors.MetadataUnavailable as error:
            log.warning("bookies-not-asked", extra={"why": error.detail})
            await asyncio.sleep(_RETRY_S)
            return
        silent = await self._try_to_ask()
        if silent is None:
            await asyncio.sleep(_RETRY_S)
            return
        self._database.asked_about = server
        if silent:
            # Changes don't wait for silent bookies. After a power cut, bookies wait for this service.
            log.warning("bookies-silent", extra={"bookies": silent})
            await self._wait_for_silent()
        self.is_over.set()

    async def _wait_for_silent(self) -> None:
        clock = awake()
        end = clock.time() + _WAIT_S
        silent: list[str] | None = None
        while silent != [] and clock.time() < end and self._database.has_asked:
            await asyncio.sleep(_AGAIN_S)
            silent = await self._try_to_ask()

    async def _try_to_ask(self) -> list[str] | None:
        try:
            return await self.ask()
        except errors.MetadataUnavailable as error:
            log.warning("bookies-not-asked", extra={"why": error.detail})
        except Exception:
            log.exception("bookies-not-asked")
        return None

    async def ask(self) -> list[str]:
        """Collect the witnesses of all bookies, and skip the ids of their ledgers. Returns the
        registered bookies that did not respond, or that can't report their highest ledger yet.

        Raises: MetadataUnavailable.
        """
        cluster_id = self._database.memory.cluster_id
        registered, urls = await self.places()
        async with service_session(self._credentials) as session:
            answers = await asyncio.gather(
                *(_witnesses_of(session, name, url, cluster_id) for name, url in urls)
            )
        reported = [answer for answer in answers if answer is not None]
        for answer in reported:
            await self._learn(answer)
        known = {answer.bookie: answer.highest_ledger for answer in reported}
        await self._skip_ids(
            max((held for held in known.values() if held is not None), default=NO_LEDGER)
        )
        return [name for name in registered if known.get(name) is None]

    async def copies(self, row: LedgerMetadata) -> Sequence[HeldCopies]:
        """Fence a ledger at all bookies, and return their copies of the ledger's row.

        Raises: NotEnoughBookies while silent bookies may have confirmed entries by a later row.
        """
        registered, urls = await self.places()
        async with service_session(self._credentials) as session:
            asked = (_copies_of(session, name, f"{url}/v1", row) for name, url in urls)
            reported = [each for each in await asyncio.gather(*asked) if each is not None]
        # Bookies that an operator declared lost will never return.
        lost = frozenset(await self._database.run(lambda connection: connection.fetchval(_LOST)))
        directories = await self._database.run(
            lambda connection: registered_of(connection, "cookies WHERE retired_at IS NULL")
        )
        fenced = {held.holder: number for held, number in reported if number is not None}
        known = {*registered, *map(member_name, row.all_members)} - lost
        silent = frozenset(known - fenced.keys())
        bookies = Bookies(fenced, silent, directories, given_up=lost)
        if bookies.may_hide_later(row):
            raise errors.NotEnoughBookies(
                "these bookies may have a later row of the ledger, but do not respond or lost their data:"
                f" {shown(sorted(bookies.lost_of(row)))}. Start the bookies, or declare them lost if their data is gone"
                " (`quorumlog cluster accept --lost`)",
                ledger_id=row.ledger_id,
            )
        return [held for held, _ in reported]

    async def places(self) -> tuple[list[str], list[tuple[str, str]]]:
        """Return registered names, and names and URLs of known bookies. Raises: MetadataUnavailable."""
        cookies = await self._cookies.list()
        urls = {(row.name, row.cookie.url) for row in cookies if row.cookie.url}
        # A database that went back in time may lack cookies, or have cookies with old URLs.
        urls.update((await self._liveness.bookie_urls()).items())
        return [row.name for row in cookies], sorted(urls)

    async def _learn(self, answer: BookieWitnesses) -> None:
        try:
            await self._database.learn(Presented(answer.witnesses, answer.bookie))
        except errors.DatabaseWentBack as error:
            log.error(  # noqa: TRY400
                "database-not-confirmed", extra={"bookie": answer.bookie, "why": error.detail}
            )

    async def _skip_ids(self, highest: int) -> None:
        """Assign only ids above `highest` from now on. A gap in the ids does no harm."""
        if highest > 0:
            await self._database.run(lambda connection: connection.execute(_SKIP_IDS, highest))


async def _reported_in_time(name: str, url: str, limit_s: float, asking: Awaitable[T]) -> T | None:
    """Wait for a bookie's response. Returns None if the bookie is silent or returns an error."""
    try:
        async with awake_timeout(limit_s):
            return await asking
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        log.info("bookie-silent", extra={"bookie": name, "url": url, "why": repr(error)})
        return None


async def _get(session: aiohttp.ClientSession, url: str, name: str, gives: type[T]) -> T:
    expected = ExpectedServer(Role.BOOKIE, name)
    async with session.get(url, timeout=_NO_TIMEOUT, ssl=expected) as answer:
        return received(gives, await answer.read())


async def _witnesses_of(
    session: aiohttp.ClientSession, name: str, url: str, cluster_id: str
) -> BookieWitnesses | None:
    """Return a bookie's witnesses, or None if the bookie is silent or another bookie responds."""
    asking = _get(session, f"{url}/v1/witnesses", name, BookieWitnesses)
    answer = await _reported_in_time(name, url, _ASK_S, asking)
    if answer is not None and (answer.bookie, answer.cluster_id) != (name, cluster_id):
        log.warning("another-bookie", extra={"bookie": name, "url": url, "found": answer.bookie})
        return None
    return answer


async def _copies_of(
    session: aiohttp.ClientSession, name: str, url: str, row: LedgerMetadata
) -> tuple[HeldCopies, int | None] | None:
    """Fence the ledger at a bookie, and return the bookie's copies of the row. Returns None if the
    bookie is silent or another bookie responds. The second value is the bookie's incarnation if the
    bookie accepts no further adds and has reported all copies that it acknowledged, else None.
    """

    async def fenced() -> tuple[HeldCopies, int | None] | None:
        status = await _fence(session, name, url, row)
        rows = f"{url}/rows?limit=1&after={row.ledger_id - 1}"
        page = await _get(session, rows, name, RowsPage)
        held = next((held for held in page.ledgers if held.ledger_id == row.ledger_id), None)
        texts = () if held is None else held.copies
        attempts = tuple(row_copies.decode(text).attempt for text in texts)
        if member_name(page.bookie) != name:
            return None
        is_deleted = held is not None and held.deleted
        is_fenced = (status in _FENCED or is_deleted) and not page.may_lack
        # An earlier version may have written copies without a token.
        copies = HeldCopies(name, tuple(attempt for attempt in attempts if attempt))
        return copies, member_incarnation(page.bookie) if is_fenced else None

    return await _reported_in_time(name, url, _COPIES_S, fenced())


async def _fence(
    session: aiohttp.ClientSession, name: str, url: str, row: LedgerMetadata
) -> object:
    """Fence a ledger at a bookie, and return the status. Raises: aiohttp's errors, ValueError."""
    key = {"X-Ledger-Key": b64encode(row.ledger_key).decode()}
    fence = f"{url}/ledgers/{row.ledger_id}/fence"
    async with session.post(fence, headers=key, ssl=ExpectedServer(Role.BOOKIE, name)) as answer:
        reported = orjson.loads(await answer.read())
    return reported.get("status") if isinstance(reported, dict) else None


# A rebuild reads the bookies' copies of rows, ledger by ledger (rule 18d).


class SourceAway(errors.Unavailable, title="A bookie stopped responding", travels=False):
    """A bookie stopped responding. Run the rebuild again with `after`. Written rows are kept."""


@dataclass(frozen=True, slots=True)
class Source:
    """A bookie that responded, with its first page of rows."""

    url: str
    head: RowsPage

    @property
    def name(self) -> str:
        """The bookie's name, without its incarnation."""
        return member_name(self.head.bookie)

    @property
    def incarnation(self) -> int:
        """The bookie's current incarnation."""
        return member_incarnation(self.head.bookie)


async def find_sources(session: aiohttp.ClientSession, urls: Iterable[str]) -> list[Source]:
    """Find the bookies at these URLs, sorted by name. Raises: InvalidRequest for a shared name."""
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
        raise errors.InvalidRequest(f"two processes respond as bookie {min(twice)}: stop one")
    return sources


async def _head(session: aiohttp.ClientSession, url: str) -> RowsPage | None:
    try:
        return await _page(session, url, "", after=-1, limit=1)
    except SourceAway:
        return None


async def merged(
    session: aiohttp.ClientSession, sources: Sequence[Source], after: int
) -> AsyncIterator[tuple[int, list[tuple[Source, HeldRows]]]]:
    """Yields each ledger above `after` with the bookies' copies, by id. Raises: SourceAway."""
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
            detail = f"{source.url} now responds as {page.bookie}: run the rebuild again"
            raise SourceAway(detail, bookie=source.name)
        for held in page.ledgers:
            yield held
        following = page.next


async def _page(
    session: aiohttp.ClientSession, url: str, name: str, *, after: int, limit: int
) -> RowsPage:
    """Fetch a page of a bookie's rows. `name` is the bookie's name, or "" if still unknown."""
    expected = ExpectedServer(Role.BOOKIE, name)
    why: Exception | None = None
    for _ in range(_TRIES):
        try:
            async with (
                asyncio.timeout(_PAGE_S),
                session.get(f"{url}/v1/rows?after={after}&limit={limit}", ssl=expected) as answer,
            ):
                answer.raise_for_status()
                return received(RowsPage, await answer.read())
        except (aiohttp.ClientError, OSError, TimeoutError, ValidationError) as error:
            why = error
    raise SourceAway(f"the bookie at {url} did not return its rows: {why!r}")
