"""Asks the bookies what they know of the database, before this process changes anything (rule 18a).

A process that starts has no memory: over a database that went back meanwhile it would expire a committed
transaction, or assign the id of a ledger that bookies hold. Bookies keep witnesses on disk, and know
the ids of their ledgers.
"""

import asyncio
import logging
from typing import Final

import aiohttp

from quorumlog.errors import DatabaseWentBack, MetadataUnavailable
from quorumlog.net.identity import ANONYMOUS, Credentials, Role
from quorumlog.net.sessions import ExpectedServer, service_session
from quorumlog.net.timers import awake, awake_timeout
from quorumlog.protocol.ids import NO_LEDGER
from quorumlog.wire.bodies import BookieWitnesses, received
from services.metadata.cookies import CookieStore
from services.metadata.database import SERVER, Database
from services.metadata.liveness import Liveness
from services.metadata.memory import Presented

log = logging.getLogger(__name__)

_ASK_S: Final = 2.0
"""For one bookie (taste). All are asked at once, so silent ones delay a start by no more."""
_RETRY_S: Final = 0.5
_AGAIN_S: Final = 1.0
_WAIT_S: Final = 60.0
"""How long bookies that start after this process are waited for before a transaction expires (taste): a late
expiry harms nobody."""
_NO_TIMEOUT: Final = aiohttp.ClientTimeout(total=None)
"""aiohttp's own timers continue while this process stands still."""

# Two processes may do so at once: an id that is assigned twice is refused by the ledgers' key.
_SKIP_IDS: Final = (
    "SELECT setval('ledger_ids', $1) FROM ledger_ids"
    " WHERE last_value < $1 OR (last_value = $1 AND NOT is_called)"
)


class Inquiry:
    """The questions of one process to all bookies."""

    def __init__(
        self,
        database: Database,
        cookies: CookieStore,
        liveness: Liveness,
        credentials: Credentials = ANONYMOUS,
    ) -> None:
        self._database, self._cookies, self._liveness = database, cookies, liveness
        self._credentials = credentials
        self.is_over = asyncio.Event()
        """Set while all registered bookies have answered about the present server, or were waited for: what runs
        by the clock waits for it.
        """

    async def run(self) -> None:
        """Ask as soon as the database answers, and again about a server that took over; then this process
        may change the database.
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
        except MetadataUnavailable as error:
            log.warning("bookies-not-asked", extra={"why": error.detail})
            await asyncio.sleep(_RETRY_S)
            return
        silent = await self._try_to_ask()
        if silent is None:
            await asyncio.sleep(_RETRY_S)
            return
        self._database.asked_about = server
        if silent:
            # Changes wait no longer: after a power cut the bookies wait for this service.
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
        except MetadataUnavailable as error:
            log.warning("bookies-not-asked", extra={"why": error.detail})
        except Exception:
            log.exception("bookies-not-asked")
        return None

    async def ask(self) -> list[str]:
        """Learn what all bookies know, and assign no id that one of them holds; returns the registered
        bookies that did not answer.

        Raises: MetadataUnavailable.
        """
        cluster_id = self._database.memory.cluster_id
        registered, urls = await self.places()
        async with self.session() as session:
            answers = await asyncio.gather(
                *(_ask(session, name, url, cluster_id) for name, url in urls)
            )
        told = [answer for answer in answers if answer is not None]
        for answer in told:
            await self._learn(answer)
        known = {answer.bookie: answer.highest_ledger for answer in told}
        await self._skip_ids(
            max((held for held in known.values() if held is not None), default=NO_LEDGER)
        )
        return [name for name in registered if known.get(name) is None]

    def session(self) -> aiohttp.ClientSession:
        """A session for questions to bookies."""
        return service_session(self._credentials)

    async def places(self) -> tuple[list[str], list[tuple[str, str]]]:
        """The registered bookies, and names and URLs of all that may be asked. Raises: MetadataUnavailable."""
        cookies = await self._cookies.list()
        urls = {(row.name, row.cookie.url) for row in cookies if row.cookie.url}
        # Cookies of a database that went back may be missing, or have old URLs.
        urls.update((await self._liveness.bookie_urls()).items())
        return [row.name for row in cookies], sorted(urls)

    async def _learn(self, answer: BookieWitnesses) -> None:
        try:
            await self._database.learn(Presented(answer.witnesses, answer.bookie))
        except DatabaseWentBack as error:
            log.error(  # noqa: TRY400
                "database-not-confirmed", extra={"bookie": answer.bookie, "why": error.detail}
            )

    async def _skip_ids(self, highest: int) -> None:
        """Assign only ids above this one. Unchecked: whichever database this is, a gap harms nobody."""
        if highest > 0:
            await self._database.run(lambda connection: connection.execute(_SKIP_IDS, highest))


async def _ask(
    session: aiohttp.ClientSession, name: str, url: str, cluster_id: str
) -> BookieWitnesses | None:
    """A bookie's answer; None where the bookie is silent, or another one answers."""
    expected = ExpectedServer(Role.BOOKIE, name)
    try:
        async with (
            awake_timeout(_ASK_S),
            session.get(f"{url}/v1/witnesses", timeout=_NO_TIMEOUT, ssl=expected) as response,
        ):
            answer = received(BookieWitnesses, await response.read())
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        log.info("bookie-silent", extra={"bookie": name, "url": url, "why": repr(error)})
        return None
    if (answer.bookie, answer.cluster_id) != (name, cluster_id):
        log.warning("another-bookie", extra={"bookie": name, "url": url, "found": answer.bookie})
        return None
    return answer
