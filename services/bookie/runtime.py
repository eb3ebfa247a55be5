"""A bookie's life: open the store, agree on the cookie, register, serve, tell that it lives."""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final
from uuid import uuid4

from aiohttp import web

from quorumlog.errors import DatabaseWentBack, QuorumLogError, ReadOnly
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.protocol.ids import member_of
from quorumlog.wire.bodies import BookieHeartbeat, BookieMode
from services.bookie.collect import Collector, MetadataRows
from services.bookie.config import Config
from services.bookie.cookie import (
    CookieRefused,
    LocalCookie,
    check_name,
    read_cookie,
    write_cookie,
)
from services.bookie.directory import SUSPECT, DirectoryInUse
from services.bookie.limbo import Limbo, PlacedRows
from services.bookie.log import LogDamaged
from services.bookie.pace import Pace
from services.bookie.registration import Displaced, Registration, insist
from services.bookie.scrub import Scrubber
from services.bookie.segments import write_durably
from services.bookie.store import Store
from services.bookie.witnesses import WitnessFile

log = logging.getLogger(__name__)

REFUSED_STATUS: Final = 78
"""The process's exit status when it refuses to start: a person must look (EX_CONFIG)."""

_STATE_FILE: Final = "state"

LAST_WORD_S: Final = 3.0
"""For the metadata service to take the log's end at an orderly end (taste)."""

DISK_STATUS: Final = 74
"""The process's exit status when the log can't be written any more (EX_IOERR)."""


def end_process(status: int, message: str) -> None:
    """End at once, without writing anything more."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()
    os._exit(status)


class Bookie:
    """One bookie. `store` is there once it serves."""

    def __init__(self, config: Config, *, end: Callable[[int, str], None] = end_process) -> None:
        """`end(status, message)` ends the process; tests give another one."""
        self.config = config
        self.store: Store | None = None
        self.limbo: Limbo | None = None
        self.cluster_id = ""
        self.sockets: set[web.WebSocketResponse] = set()
        self.is_registered = False
        self.body_bytes = 0
        """Of the HTTP bodies that are being received."""
        self.process = uuid4().hex
        """Who this is among all processes that ever start under this name."""
        self._metadata = MetadataClient(config.metadata_urls)
        self._registration = Registration(config, self._metadata, self.process)
        self._cookie: LocalCookie | None = None
        self._end = end
        self._task: asyncio.Task[None] | None = None
        self._opened: Store | None = None
        self._wanted: BookieMode = "writable"
        self._told = asyncio.Event()
        self.pace = Pace()
        self.scrubber: Scrubber | None = None
        self._rows = MetadataRows(self._metadata, WitnessFile(config.data_dir.resolve()).keep)

    @property
    def missing_rows(self) -> int:
        """Rows that were looked for, and were not there without a tombstone (rule 18)."""
        return self._rows.missing_count

    @property
    def state(self) -> BookieMode:
        """What it takes: an operator's word, and what the disk allows."""
        is_full = self.store is not None and self.store.disk.is_read_only
        return "read-only" if is_full and self._wanted == "writable" else self._wanted

    def set_state(self, wanted: BookieMode) -> None:
        """Do as an operator says, after restarts too. Blocks for one small file."""
        store = self.store
        assert store is not None, "it serves"
        write_durably(store.directory / _STATE_FILE, wanted.encode())
        self._obey(store, wanted)
        log.warning("state-set", extra={"state": wanted})
        self._told.set()

    def _obey(self, store: Store, wanted: BookieMode) -> None:
        self._wanted = wanted
        store.is_closed_to_adds = wanted != "writable"

    async def ready(self) -> None:
        """Raises ReadOnly while it is starting."""
        if self.store is None or not self.is_registered:
            raise ReadOnly("this bookie is starting: it is not registered yet")

    def start(self) -> None:
        """Begin to start; `ready` tells when that is done."""
        self._task = asyncio.create_task(self._run(), name="bookie")

    async def stop(self) -> None:
        """Stop in order: the log gets its end, the index a checkpoint."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        for socket in list(self.sockets):
            await socket.close()
        # It may write already, and not serve yet.
        store = self.store or self._opened
        self.store = self._opened = None
        if store is not None:
            await store.stop()
            await self._tell_last_log_end(store)
        await self._metadata.close()

    async def _tell_last_log_end(self, store: Store) -> None:
        """After an orderly end a snapshot of before is always found out, if this arrives."""
        if self._cookie is None:
            return
        try:
            async with asyncio.timeout(LAST_WORD_S):
                await self._log_ends(store)
        except (Displaced, QuorumLogError, TimeoutError) as error:
            log.warning("log-end-untold", extra={"why": repr(error)})

    async def _run(self) -> None:
        try:
            store = await self._open()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._beat(store))
                group.create_task(self._tell_log_end(store))
                group.create_task(self._remember())
                collector = Collector(
                    store,
                    self._rows,
                    self.cluster_id,
                    grace_s=self.config.collect_grace_s,
                    bytes_per_s=self.config.compact_bytes_per_s,
                    pace=self.pace,
                )
                group.create_task(self._collect(collector))
                group.create_task(self._follow(collector))
                assert self.scrubber is not None
                group.create_task(self.scrubber.run())
                assert self.limbo is not None
                group.create_task(self.limbo.run())
        except (CookieRefused, DirectoryInUse, LogDamaged) as error:
            log.critical("refused-to-start", extra={"reason": str(error)})
            self._end(REFUSED_STATUS, f"bookie {self.config.bookie_name}: {error}")
        except Exception as error:
            log.exception("start-failed")
            self._end(1, f"bookie {self.config.bookie_name}: {error!r}")

    async def _open(self) -> Store:
        config = self.config
        directory = config.data_dir.resolve()
        local = read_cookie(directory)
        has_data = (directory / "log").exists() and any((directory / "log").iterdir())
        me = local.member if local is not None else member_of(config.bookie_name, 0)
        # Before anything in the directory is touched.
        check_name(local, config.bookie_name, directory)
        store = await asyncio.to_thread(Store, directory, me, config.store_options)
        self._opened = store
        replayed = store.replayed
        log.info(
            "log-replayed",
            extra={
                "clean": replayed.was_clean,
                "copied_records": replayed.copied_records,
                "cut_bytes": replayed.cut_bytes,
            },
        )
        cookie = await self._registration.agree(local, replayed, has_data=has_data)
        self.cluster_id = self._registration.cluster_id
        store.rename(cookie.member)
        self._obey(store, _wanted_state(directory))
        store.start(self._writer_failed)
        self.limbo = Limbo(
            store, PlacedRows(self._metadata, config.bookie_name), rest_s=config.limbo_s
        )
        if is_limbo_due(local, cookie):
            # Before it serves or registers: what was lost must not be denied (BP-46).
            await insist(self.limbo.enter)
        cookie = cookie.model_copy(update={"registered": True})
        write_cookie(directory, cookie)
        self._cookie = cookie
        self.scrubber = Scrubber(
            store, self.pace, bytes_per_s=config.scrub_bytes_per_s, pass_s=config.scrub_s
        )
        self.store = store
        return store

    async def _beat(self, store: Store) -> None:
        """Tell that it lives, and look after the room on the disk."""
        config = self.config
        incarnation = int(store.me.rpartition("@")[2])
        while True:
            store.check_space()
            store.holdings.trim()
            if store.index.is_suspect:
                write_durably(store.directory / SUSPECT, b"")
                self._end(
                    DISK_STATUS,
                    f"bookie {config.bookie_name}: the index can't be read. The process ends; the"
                    " next start builds it anew from the log.",
                )
            heartbeat = BookieHeartbeat(
                incarnation=incarnation,
                url=config.url,
                zone=config.zone,
                process=self.process,
                state=self.state,
                free_bytes=store.disk.free_bytes(),
                ttl_s=config.heartbeat_s * 5,
            )
            try:
                await self._metadata.bookie_lives(config.bookie_name, heartbeat)
                if not self.is_registered:
                    self.is_registered = True
                    log.info("registered", extra={"member": store.me})
            except QuorumLogError as error:
                # It goes on serving: liveness is advice, never safety.
                log.warning("heartbeat-failed", extra={"why": error.detail})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(config.heartbeat_s):
                    await self._told.wait()
            self._told.clear()

    async def _tell_log_end(self, store: Store) -> None:
        """Tell the metadata service how far the log is on disk, and hear whether another process
        took this one's name. While it is away the bookie goes on (rule 15a).
        """
        while True:
            await asyncio.sleep(self.config.log_end_s)
            try:
                await self._log_ends(store)
            except Displaced as error:
                log.critical("displaced", extra={"reason": str(error)})
                self._end(REFUSED_STATUS, f"bookie {self.config.bookie_name}: {error}")
            except QuorumLogError as error:
                log.warning("log-end-put-off", extra={"why": error.detail})

    async def _log_ends(self, store: Store) -> None:
        assert self._cookie is not None
        await self._registration.tell_log_end(self._cookie, store.position.sequence)

    async def _remember(self) -> None:
        """Keep what the database is known to have answered, lest a deletion rest on one that went
        back while nobody was there to notice (rule 18a).
        """
        while True:
            try:
                await self._rows.confirm()
            except QuorumLogError as error:
                if isinstance(error, DatabaseWentBack):
                    log.error("database-not-confirmed", extra={"why": error.detail})  # noqa: TRY400
            except OSError as error:
                # A full disk, say: nothing is deleted meanwhile, and the bookie goes on.
                log.warning("witnesses-not-kept", extra={"why": repr(error)})
            await asyncio.sleep(self.config.heartbeat_s)

    async def _collect(self, collector: Collector) -> None:
        """Give up what nobody needs, from time to time."""
        config = self.config
        loop = asyncio.get_running_loop()
        scan_at = loop.time() + config.collect_s
        while True:
            await asyncio.sleep(min(config.collect_s, max(1.0, config.collect_grace_s / 10)))
            try:
                await collector.settle()
                if loop.time() >= scan_at:
                    scan_at = loop.time() + config.collect_s
                    await collector.round()
            except QuorumLogError as error:
                # Nothing is given up without proof; the next round tries again.
                log.warning("collect-put-off", extra={"why": error.detail})
            except Exception:
                # A defect of ours in one round must not end all rounds.
                log.exception("collect-failed")

    async def _follow(self, collector: Collector) -> None:
        """Hear of tombstones as they are made; the scan finds those that are missed."""
        async with contextlib.aclosing(self._metadata.changes()) as changes:
            async for change in changes:
                if change.ledger_id is None or not change.deleted:
                    continue
                try:
                    await collector.announced(change.ledger_id)
                except QuorumLogError as error:
                    # The scan finds it.
                    log.warning(
                        "announcement-put-off",
                        extra={"ledger": change.ledger_id, "why": error.detail},
                    )
                except Exception:
                    log.exception("announcement-failed", extra={"ledger": change.ledger_id})

    def _writer_failed(self, error: BaseException) -> None:
        """In the writer's thread: what can't be synced must not be served (rule 3)."""
        self._end(
            DISK_STATUS,
            f"bookie {self.config.bookie_name}: the log can't be written: {error!r}. The process"
            " ends; the next start trusts only what is proven to be on disk.",
        )


def is_limbo_due(local: LocalCookie | None, cookie: LocalCookie) -> bool:
    """Whether this incarnation has yet to mark what older ones may have lost. A start that ended
    before it was done left the cookie unregistered.
    """
    if cookie.incarnation == 1:
        return False
    return local is None or local.incarnation != cookie.incarnation or not local.registered


def _wanted_state(directory: Path) -> BookieMode:
    """What an operator said last; a file that can't be understood takes no adds."""
    try:
        text = (directory / _STATE_FILE).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return "writable"
    match text:
        case "writable" | "draining":
            return text
        case _:
            return "read-only"
