"""Registration: a starting process becomes the only process of its bookie's name (rules 15, 15a).

A start reads the directory's cookie and marker and the registered cookie, and probes the process
that the registered cookie names. Then it calls `decide`, writes the local cookie, and registers it
by compare-and-swap. If two processes start at once, the loser then finds the winner at its URL.
"""

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Final, TypeVar

import aiohttp
import orjson
from pydantic import ValidationError

from quorumlog import errors
from quorumlog.net.identity import ANONYMOUS, Credentials, Role
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.net.sessions import ExpectedServer, service_session
from quorumlog.protocol.ids import member_name
from quorumlog.wire.bodies import CookieRow, LogEnd, ServiceHeartbeat, received
from services.bookie.bodies import ProcessBody
from services.bookie.config import Config
from services.bookie.cookie import (
    CookieRefused,
    LocalCookie,
    Situation,
    awaits_rebuild,
    decide,
    identity_of,
    is_copy,
    is_displaced,
    write_cookie,
)
from services.bookie.replay import Replayed
from services.bookie.witnesses import WitnessFile

PROBE_TIMEOUT_S: Final = 2.0
"""Timeout of one probe; chosen by judgement."""

SILENT_PROBES_MAX: Final = 3
"""Number of unanswered probes that count as silence; a single answer may get lost."""


class Presence(StrEnum):
    """The result of probing a URL."""

    GONE = "gone"
    SILENT = "silent"
    ALIVE = "there"


async def probe(
    url: str, name: str, process: str, credentials: Credentials = ANONYMOUS
) -> Presence:
    """Whether a process other than `process` answers at a URL as the bookie `name` (rule 15a).

    As in rule 21a, a process is proven gone if its address refuses the connection or another
    process answers there. Silence is no proof: the process may be paused, or reachable elsewhere.
    """
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    # Accept a bookie of any name, because another name proves that the process is gone.
    expected = ExpectedServer(Role.BOOKIE)
    try:
        async with (
            service_session(credentials) as session,
            session.get(f"{url}/v1/process", timeout=timeout, ssl=expected) as answer,
        ):
            reply = received(ProcessBody, await answer.read())
    except aiohttp.ClientConnectorError as error:
        return Presence.GONE if error.os_error.errno == errno.ECONNREFUSED else Presence.SILENT
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError, ValidationError):
        # A malformed answer counts as silence: a proxy in front of a live bookie may have sent it.
        return Presence.SILENT
    is_other = reply.bookie == name and reply.process != process
    return Presence.ALIVE if is_other else Presence.GONE


log = logging.getLogger(__name__)

T = TypeVar("T")

_PAUSE_S: Final = 0.5

_WAITING_S: Final = 5.0
"""Time for which a bookie that waits for a rebuild counts as live after an announcement."""


class Displaced(Exception):
    """A process that started later registered under this bookie's name."""


async def retry_until_available(ask: Callable[[], Awaitable[T]]) -> T:
    """Retry until the metadata service answers, because a bookie may start before the service."""
    while True:
        try:
            return await ask()
        except errors.MetadataUnavailable as error:
            log.warning("metadata-unavailable", extra={"why": error.detail})
            await asyncio.sleep(_PAUSE_S)


def has_lost_unsynced(local: LocalCookie, replayed: Replayed) -> bool:
    """Whether entries that were acknowledged before they were synced may be lost (rule 31)."""
    return local.durability == "deferred" and not replayed.was_clean


class Registration:
    """Registers one process as its bookie."""

    def __init__(self, config: Config, metadata: MetadataClient, process: str) -> None:
        """`process`: the random token of this process."""
        self._config = config
        self._metadata = metadata
        self._process = process
        self._directory = config.data_dir.resolve()
        self.cluster_id = ""

    async def register(
        self, local: LocalCookie | None, replayed: Replayed, *, has_data: bool
    ) -> LocalCookie:
        """Decide this bookie's cookie, and register it. `has_data`: whether the directory had a
        log. Raises: CookieRefused.
        """
        config = self._config
        name = config.bookie_name
        cluster_id = await self._find_cluster(local)
        if config.cluster_id and config.cluster_id != cluster_id:
            raise CookieRefused(f"METADATA_URLS lead to {cluster_id}, which is not CLUSTER_ID")
        self._metadata.witnesses = WitnessFile(self._directory).load(cluster_id)
        # Confirm first: no decision may use cookies of a database that went back in time.
        await retry_until_available(self._metadata.confirm)
        identity = identity_of(self._directory)
        named = -1
        while True:
            row = await retry_until_available(lambda: self._metadata.cookie(name))
            holder = "" if row is None else await self._live_holder(row)
            remote = None if row is None else row.cookie
            is_same_log = (
                row is not None and local is not None and (row.cookie.instance == local.instance)
            )
            found = Situation(
                name=name,
                directory=self._directory.as_posix(),
                cluster_id=cluster_id,
                durability=config.durability,
                local=local,
                remote=remote,
                has_data=has_data,
                lost_unsynced=local is not None and has_lost_unsynced(local, replayed),
                may_fix=config.auto_fix_cookies or (remote is not None and remote.may_fix),
                identity=identity,
                process=self._process,
                log_end=replayed.position.sequence,
                log_end_reported=row.log_end if row is not None and is_same_log else 0,
                named=named,
                holder=holder,
            )
            cookie, reason = decide(found)
            if reason:
                log.warning("new-incarnation", extra={"member": cookie.member, "reason": reason})
            write_cookie(self._directory, cookie)
            try:
                is_registered = await self._try_register(
                    cookie, None if row is None else row.version
                )
            except errors.IncarnationUsed as error:
                log.warning("incarnation-used", extra={"why": error.detail})
                is_registered, named = False, int(error.members["named"])
            if is_registered:
                self.cluster_id = cluster_id
                return cookie
            # Retry, because another process changed the cookie, or ledgers name this incarnation.
            local = cookie

    async def _find_cluster(self, local: LocalCookie | None) -> str:
        """The id of the metadata service's cluster. If a rebuild may restore this bookie's missing
        cookie, waits, and announces the bookie to that rebuild (rule 18d).
        """
        while True:
            cluster_id = await retry_until_available(self._metadata.cluster_id)
            if local is None or (
                local.cluster_id == cluster_id and not await self._has_no_cookie(local)
            ):
                return cluster_id
            if not await self._awaits_rebuild(local, cluster_id):
                # The rebuild may have begun between the two requests.
                if await retry_until_available(self._metadata.cluster_id) == cluster_id:
                    return cluster_id
                continue
            log.warning("waiting-for-rebuild", extra={"cluster": local.cluster_id})
            await retry_until_available(self._announce)
            await asyncio.sleep(_WAITING_S / 5)

    async def _announce(self) -> None:
        """Send a service's heartbeat, because a bookie's heartbeat requires a registered cookie."""
        alive = ServiceHeartbeat(
            url=self._config.url, state="waits for a rebuild", ttl_s=_WAITING_S
        )
        await self._metadata.send_service_heartbeat("bookie", self._config.bookie_name, alive)

    async def _has_no_cookie(self, local: LocalCookie) -> bool:
        name = self._config.bookie_name
        row = await retry_until_available(lambda: self._metadata.cookie(name))
        return awaits_rebuild(local, None if row is None else row.cookie)

    async def _awaits_rebuild(self, local: LocalCookie, cluster_id: str) -> bool:
        if not local.was_registered or is_copy(local, identity_of(self._directory)):
            return False
        state = await retry_until_available(self._metadata.rebuild_state)
        return state.was_rebuilt if local.cluster_id == cluster_id else state.is_empty

    async def _try_register(self, cookie: LocalCookie, version: int | None) -> bool:
        """Register the cookie; returns False if the registered cookie changed in the meantime."""
        name = self._config.bookie_name
        wanted = cookie.cookie.model_copy(update={"url": self._config.url})
        try:
            await retry_until_available(
                lambda: self._metadata.put_cookie(name, wanted, version=version)
            )
        except errors.VersionConflict as error:
            log.warning("cookie-changed", extra={"why": error.detail})
            return False
        except (errors.MetadataUnavailable, errors.IncarnationUsed):
            raise
        except errors.QuorumLogError as error:
            raise CookieRefused(
                f"the metadata service rejected {cookie.member}: {error.detail}. Check that no"
                f" other bookie uses the name {name}."
            ) from error
        return True

    async def _live_holder(self, row: CookieRow) -> str:
        """Evidence, with a URL, that another process runs as this bookie; "" once the process is
        gone. Waits up to `holder_s`, since a process that is shutting down still answers.

        A process that sends heartbeats but does not answer may still serve other processes.
        """
        name, url = row.name, row.cookie.url
        if not url:
            return ""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._config.holder_s
        silent_probes = 0
        while True:
            presence = await probe(url, name, self._process, self._config.credentials)
            if presence is Presence.GONE:
                return ""
            why = f"{url} answers as bookie {name}"
            if presence is Presence.SILENT:
                silent_probes += 1
                if await self._has_live_heartbeat(name):
                    why = f"{url} does not answer, but heartbeats of bookie {name} arrive"
                elif silent_probes >= SILENT_PROBES_MAX:
                    log.warning("holder-silent", extra={"url": url})
                    return ""
                else:
                    why = ""
            if why and loop.time() >= end:
                return why
            log.info("holder-there", extra={"why": why or f"{url} does not answer"})
            await asyncio.sleep(_PAUSE_S)

    async def _has_live_heartbeat(self, name: str) -> bool:
        """Whether the registered process sent a recent heartbeat. False while Redis is unavailable,
        because a stale list does not show that a process is alive.
        """
        listed = await retry_until_available(self._metadata.bookies)
        return not listed.stale and any(
            member_name(bookie.id) == name and bookie.state != "lost" for bookie in listed.bookies
        )

    async def report_log_end(self, cookie: LocalCookie, sequence: int) -> None:
        """Report how far the log is on disk, so that a return to a snapshot is detected later.
        Raises: Displaced, and errors of the metadata service.
        """
        end = LogEnd(process=self._process, log_end=sequence)
        try:
            await self._metadata.log_ends(cookie.name, end)
        except errors.VersionConflict as error:
            now = received(CookieRow, orjson.dumps(error.members.get("current")))
            if is_displaced(cookie.cookie, now.cookie):
                raise Displaced(
                    f"{cookie.name}@{now.cookie.incarnation} is now registered at {now.cookie.url}, since"
                    " this process did not answer at its URL when the other process started. This process ends,"
                    " because only one process may use a name (rule 15a)."
                ) from error
            # A database that went back (rule 18) names an older process, which does not displace
            # this process.
            log.error("registered-otherwise", extra={"why": error.detail})  # noqa: TRY400
