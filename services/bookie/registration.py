"""How a start comes to be the process that its bookie's name stands for (rules 15 and 15a).

In order: the directory's cookie and marker, the metadata service's row, a look at whoever that row
names, `decide`, the cookie on disk, and a compare-and-swap of the row. Of two starts at once one
swap is taken; the other one finds the first at its URL. Nothing is served before.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

import orjson

from quorumlog.errors import MetadataUnavailable, QuorumLogError, VersionConflict
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.protocol.ids import member_name
from quorumlog.wire.bodies import CookieRow, LogEnd
from services.bookie.config import Config
from services.bookie.cookie import (
    CookieRefused,
    LocalCookie,
    Situation,
    decide,
    is_displaced,
    write_cookie,
)
from services.bookie.holder import SILENCES, Seen, look
from services.bookie.identity import HardLinked, Identity, identity_of
from services.bookie.replay import Replayed
from services.bookie.witnesses import WitnessFile

log = logging.getLogger(__name__)

T = TypeVar("T")

_PAUSE_S: Final = 0.5


class Displaced(Exception):
    """Another process was registered under this one's name, later."""


async def insist(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask the metadata service until it answers: a bookie may start before it."""
    while True:
        try:
            return await ask()
        except MetadataUnavailable as error:
            log.warning("metadata-unavailable", extra={"why": error.detail})
            await asyncio.sleep(_PAUSE_S)


def _identity(directory: Path) -> Identity:
    try:
        return identity_of(directory)
    except HardLinked as error:
        raise CookieRefused(
            f"{error} has another name: {directory} was copied by hard links, so that two"
            " directories share the files of one log. Remove the copy."
        ) from None


class Registration:
    """One process's place as a bookie."""

    def __init__(self, config: Config, metadata: MetadataClient, process: str) -> None:
        """`process`: the token that this process drew."""
        self._config = config
        self._metadata = metadata
        self._process = process
        self._directory = config.data_dir.resolve()
        self.cluster_id = ""

    async def agree(
        self, local: LocalCookie | None, replayed: Replayed, *, has_data: bool
    ) -> LocalCookie:
        """Agree with the metadata service on what this bookie is; it is registered when this
        returns. `has_data`: the directory held a log. Raises: CookieRefused.
        """
        config = self._config
        name = config.bookie_name
        cluster_id = await insist(self._metadata.cluster_id)
        if config.cluster_id and config.cluster_id != cluster_id:
            raise CookieRefused(f"METADATA_URLS lead to cluster {cluster_id}, not to CLUSTER_ID")
        self._metadata.witnesses = WitnessFile(self._directory).load(cluster_id)
        # What this bookie is must not be decided by the cookies of a database that went back.
        await insist(self._metadata.confirm)
        identity = _identity(self._directory)
        while True:
            row = await insist(lambda: self._metadata.cookie(name))
            holder = "" if row is None else await self._holder(row)
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
                lost_unsynced=(
                    local is not None and local.durability == "deferred" and not replayed.was_clean
                ),
                may_fix=config.auto_fix_cookies or (remote is not None and remote.may_fix),
                identity=identity,
                process=self._process,
                log_end=replayed.position.sequence,
                log_end_told=row.log_end if row is not None and is_same_log else 0,
                holder=holder,
            )
            cookie, reason = decide(found)
            if reason:
                log.warning("new-incarnation", extra={"member": cookie.member, "reason": reason})
            write_cookie(self._directory, cookie)
            if await self._is_registered(cookie, None if row is None else row.version):
                self.cluster_id = cluster_id
                return cookie
            # Somebody was faster, or changed the row: who that is, is to be seen.
            local = cookie

    async def _is_registered(self, cookie: LocalCookie, version: int | None) -> bool:
        """Swap the row. False where it changed meanwhile. Raises: CookieRefused."""
        name = self._config.bookie_name
        said = cookie.cookie.model_copy(update={"url": self._config.url})
        try:
            await insist(lambda: self._metadata.put_cookie(name, said, version=version))
        except VersionConflict as error:
            log.warning("cookie-changed", extra={"why": error.detail})
            return False
        except MetadataUnavailable:
            raise
        except QuorumLogError as error:
            raise CookieRefused(
                f"the metadata service does not take {cookie.member}: {error.detail}. Does another"
                f" bookie use the name {name}?"
            ) from error
        return True

    async def _holder(self, row: CookieRow) -> str:
        """Where and how another process is seen to live as this bookie; "" once it is gone. Waits
        for a while, since one that is about to end still answers.

        One that does not answer here, while its heartbeats come, may serve all others.
        """
        name, url = row.name, row.cookie.url
        if not url:
            return ""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._config.holder_s
        silences = 0
        while True:
            seen = await look(url, name, self._process)
            if seen is Seen.GONE:
                return ""
            why = f"{url} answers as bookie {name}"
            if seen is Seen.SILENT:
                silences += 1
                if await self._is_heard(name):
                    why = f"{url} does not answer, and heartbeats of bookie {name} come from there"
                elif silences >= SILENCES:
                    log.warning("holder-silent", extra={"url": url})
                    return ""
                else:
                    why = ""
            if why and loop.time() >= end:
                return why
            log.info("holder-there", extra={"why": why or f"{url} does not answer"})
            await asyncio.sleep(_PAUSE_S)

    async def _is_heard(self, name: str) -> bool:
        """Whether the registered process gave a heartbeat in time. While Redis is away nobody can
        say, and what is known from before is no word of one that lives.
        """
        listed = await insist(self._metadata.bookies)
        return not listed.stale and any(
            member_name(bookie.id) == name and bookie.state != "lost" for bookie in listed.bookies
        )

    async def tell_log_end(self, cookie: LocalCookie, sequence: int) -> None:
        """Tell how far the log is on disk, so that a directory that goes back to a snapshot is found
        out. Raises: Displaced, and what else asking raises.
        """
        end = LogEnd(process=self._process, log_end=sequence)
        try:
            await self._metadata.log_ends(cookie.name, end)
        except VersionConflict as error:
            now = CookieRow.model_validate_json(orjson.dumps(error.members.get("current")))
            if is_displaced(cookie.cookie, now.cookie):
                raise Displaced(
                    f"{cookie.name}@{now.cookie.incarnation} is registered at {now.cookie.url} now:"
                    " this process did not answer at its URL when that one came. It ends, since a"
                    " name is for one process (rule 15a)."
                ) from error
            # A database that went back (rule 18) names an older one, which is nobody's place.
            log.error("registered-otherwise", extra={"why": error.detail})  # noqa: TRY400
