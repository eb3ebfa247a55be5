"""Runs a bookie: opens the store, decides the cookie, registers, serves, and sends heartbeats."""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final
from uuid import uuid4

from quorumlog.errors import DatabaseWentBack, QuorumLogError, ReadOnly
from quorumlog.net.framed import Framed
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.protocol.ids import ASSIGNED_ID_END, member_of
from quorumlog.wire import bodies
from services.bookie import registration
from services.bookie.collect import Collector, MetadataRows
from services.bookie.config import Config
from services.bookie.cookie import (
    CookieRefused,
    LocalCookie,
    check_name,
    read_cookie,
    write_cookie,
)
from services.bookie.directory import SUSPECT, DirectoryInUse, DirectoryTooNew
from services.bookie.limbo import Limbo, logged
from services.bookie.log import LogDamaged
from services.bookie.scrub import Pace, Scrubber
from services.bookie.segments import write_durably
from services.bookie.space import Space
from services.bookie.store import Store
from services.bookie.witnesses import FRESH_MAX, WitnessFile, witnesses_of

log = logging.getLogger(__name__)

REFUSED_STATUS: Final = 78
"""Exit status if the bookie refuses to start and an operator must act (EX_CONFIG)."""

_STATE_FILE: Final = "state"

FINAL_REPORT_S: Final = 3.0
"""Timeout of the report of the log's end at shutdown; chosen by judgement."""

_ANNOUNCED_MAX: Final = 1000
"""Maximum number of queued announced deletions; above it, the stream of changes waits."""

DISK_STATUS: Final = 74
"""Exit status if the log can no longer be written (EX_IOERR)."""


def end_process(status: int, message: str) -> None:
    """End the process at once, without writing anything more."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()
    os._exit(status)


class BookieRuntime:
    """One running bookie. `store` is None until the bookie serves."""

    def __init__(self, config: Config, *, end: Callable[[int, str], None] = end_process) -> None:
        """`end(status, message)` ends the process; tests replace it."""
        self.config = config
        self.store: Store | None = None
        self.limbo: Limbo | None = None
        self.cluster_id = ""
        self.channels: set[Framed] = set()
        self.is_registered = False
        self.channel_refusals = 0
        """Number of handshakes refused because the peer had no common channel version."""
        self.process = uuid4().hex
        """A random token that identifies this process among all processes of this name."""
        self._metadata = MetadataClient(config.metadata_urls, credentials=config.credentials)
        self._registration = registration.Registration(config, self._metadata, self.process)
        self._cookie: LocalCookie | None = None
        self._found_cookie: LocalCookie | None = None
        self._end = end
        self._task: asyncio.Task[None] | None = None
        self._opened: Store | None = None
        self._wanted_mode: bodies.BookieMode = "writable"
        self._heartbeat_due = asyncio.Event()
        self.pace = Pace()
        self.scrubber: Scrubber | None = None
        self._witness_file = WitnessFile(config.data_dir.resolve())
        self.rows = MetadataRows(self._metadata, self._witness_file.keep)

    @property
    def replayed_store(self) -> Store | None:
        """The store, once its log is replayed. Until the bookie is registered, the store serves
        only requests of a rebuild of the metadata database (rule 18d).
        """
        return self.store or self._opened

    @property
    def cookie(self) -> LocalCookie | None:
        """The directory's cookie; None until the directory has registered as this incarnation,
        because a rebuild must not take the directory for the member that ledgers name (rule 15b).
        """
        found = self._found_cookie
        return self._cookie or (found if found is not None and found.was_registered else None)

    @property
    def may_lack(self) -> bool:
        """Whether the directory may lack acknowledged entries and has no new incarnation yet."""
        found, store = self._found_cookie, self.replayed_store
        return (
            self._cookie is None
            and found is not None
            and store is not None
            and (found.salvaged or registration.has_lost_unsynced(found, store.replayed))
        )

    async def known_witnesses(self) -> tuple[str, ...]:
        """All known witnesses of this directory's metadata database (rule 18a): those in the file,
        those received later, and those from fresh copies, even of dropped ledgers.
        """
        kept = await asyncio.to_thread(self._witness_file.lines)
        store, cookie = self.replayed_store, self.cookie
        if store is None or cookie is None:
            return kept
        fresh = store.holdings.fresh.newest(FRESH_MAX)
        held = witnesses_of(cookie.cookie.cluster_id, fresh)
        return tuple(dict.fromkeys((*kept, *self._metadata.witnesses, *held)))

    def witnesses(self) -> bodies.BookieWitnesses:
        """Witnesses and the highest ledger id, which a metadata process reads when it starts, or
        when an operator accepts a loss.
        """
        store = self.replayed_store
        fresh = () if store is None else store.holdings.fresh.newest(bodies.COPIES_PRESENTED_MAX)
        return bodies.BookieWitnesses(
            bookie=self.config.bookie_name,
            cluster_id=self.cluster_id,
            witnesses=(*self._metadata.witnesses, *witnesses_of(self.cluster_id, fresh)),
            highest_ledger=(
                None if store is None else store.holdings.highest_ledger(ASSIGNED_ID_END)
            ),
        )

    @property
    def state(self) -> bodies.BookieMode:
        """The operator's mode, with `read-only` in place of `writable` while the disk is full."""
        is_full = self.store is not None and self.store.disk.is_read_only
        return "read-only" if is_full and self._wanted_mode == "writable" else self._wanted_mode

    def set_state(self, wanted: bodies.BookieMode) -> None:
        """Apply the operator's mode, and store it for restarts. Blocks to write one small file."""
        store = self.store
        assert store is not None, "it serves"
        write_durably(store.directory / _STATE_FILE, wanted.encode())
        self._apply_state(store, wanted)
        log.warning("state-set", extra={"state": wanted})
        self._heartbeat_due.set()

    def _apply_state(self, store: Store, wanted: bodies.BookieMode) -> None:
        self._wanted_mode = wanted
        store.is_closed_to_adds = wanted != "writable"

    async def ready(self) -> None:
        """Check that the bookie serves. Raises ReadOnly during startup."""
        if self.store is None or not self.is_registered:
            raise ReadOnly("this bookie is starting and not registered yet: retry later")

    def start(self) -> None:
        """Start in the background; `ready` raises until the start is complete."""
        self._task = asyncio.create_task(self._run(), name="bookie")

    async def stop(self) -> None:
        """Stop cleanly: write the log's clean end and a checkpoint."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self.close_channels()
        # During a start, the store may already write although the bookie does not serve yet.
        store = self.replayed_store
        self.store = self._opened = None
        if store is not None:
            await store.stop()
            await self._report_final_log_end(store)
        await self._metadata.close()

    def close_channels(self) -> None:
        """Close all channels; their peers see pending requests as unknown."""
        for channel in list(self.channels):
            channel.close()

    async def _report_final_log_end(self, store: Store) -> None:
        """Report the log's end after a clean stop, so that any older snapshot is detected."""
        if self._cookie is None:
            return
        try:
            async with asyncio.timeout(FINAL_REPORT_S):
                await self._report_log_end(store)
        except (registration.Displaced, QuorumLogError, TimeoutError) as error:
            log.warning("log-end-untold", extra={"why": repr(error)})

    async def _run(self) -> None:
        try:
            store, limbo, scrubber = await self._open()
            space = Space(store, bytes_per_s=self.config.compact_bytes_per_s, pace=self.pace)
            grace_s = self.config.collect_grace_s
            collector = Collector(store, self.rows, self.cluster_id, grace_s=grace_s, space=space)
            announced: asyncio.Queue[int] = asyncio.Queue(_ANNOUNCED_MAX)
            async with asyncio.TaskGroup() as group:
                for work in (
                    self._send_heartbeats(store),
                    self._report_log_ends(store),
                    self._keep_witnesses(),
                    self._collect_garbage(collector),
                    self._follow_deletions(announced),
                    self._look_at_announced(announced, collector),
                    scrubber.run(),
                    limbo.run(),
                ):
                    group.create_task(work)
        except (CookieRefused, DirectoryInUse, DirectoryTooNew, LogDamaged) as error:
            log.critical("refused-to-start", extra={"reason": str(error)})
            self._end(REFUSED_STATUS, f"bookie {self.config.bookie_name}: {error}")
        except Exception as error:
            log.exception("start-failed")
            self._end(1, f"bookie {self.config.bookie_name}: {error!r}")

    async def _open(self) -> tuple[Store, Limbo, Scrubber]:
        config = self.config
        directory = config.data_dir.resolve()
        local = read_cookie(directory)
        has_data = (directory / "log").exists() and any((directory / "log").iterdir())
        me = local.member if local is not None else member_of(config.bookie_name, 0)
        # Check the name before anything in the directory is touched.
        check_name(local, config.bookie_name, directory)
        if local is not None:
            # A starting metadata process waits for the witnesses before it registers any bookie
            # (rule 18a).
            self.cluster_id = local.cluster_id
            self._metadata.witnesses = self._witness_file.load(local.cluster_id)
        store = await asyncio.to_thread(Store, directory, me, config.store_options)
        replayed = store.replayed
        self._found_cookie = local
        self._opened = store
        log.info(
            "log-replayed",
            extra={
                "clean": replayed.was_clean,
                "copied_records": replayed.copied_records,
                "cut_bytes": replayed.cut_bytes,
            },
        )
        cookie = await self._registration.register(local, replayed, has_data=has_data)
        self.cluster_id = self._registration.cluster_id
        store.set_member(cookie.member)
        self._apply_state(store, _stored_state(directory))
        self.rows.present(store.holdings.fresh, config.bookie_name, self.cluster_id)
        store.start(self._writer_failed)
        self.limbo = limbo = Limbo(store, self._metadata, rest_s=config.limbo_s)
        if is_limbo_due(local, cookie):
            # Limbo comes first: a registered bookie must not deny lost entries (BP-46).
            await registration.retry_until_available(limbo.enter)
        cookie = cookie.model_copy(update={"registered": True})
        write_cookie(directory, cookie)
        self._cookie = cookie
        self.scrubber = scrubber = Scrubber(
            store, self.pace, bytes_per_s=config.scrub_bytes_per_s, pass_s=config.scrub_s
        )
        self.store = store
        return store, limbo, scrubber

    async def _send_heartbeats(self, store: Store) -> None:
        """Send heartbeats, and check the free disk space."""
        config = self.config
        incarnation = int(store.me.rpartition("@")[2])
        while True:
            store.check_space()
            store.holdings.evict_idle()
            if store.index.is_suspect:
                write_durably(store.directory / SUSPECT, b"")
                self._end(
                    DISK_STATUS,
                    f"bookie {config.bookie_name}: the index is unreadable. The process ends;"
                    " the next start rebuilds the index from the log.",
                )
            heartbeat = bodies.BookieHeartbeat(
                incarnation=incarnation,
                url=config.url,
                zone=config.zone,
                process=self.process,
                state=self.state,
                free_bytes=store.disk.free_bytes(),
                ttl_s=config.heartbeat_s * 5,
            )
            try:
                await self._metadata.send_bookie_heartbeat(config.bookie_name, heartbeat)
                if not self.is_registered:
                    self.is_registered = True
                    log.info("registered", extra={"member": store.me})
            except QuorumLogError as error:
                # The bookie keeps serving, because no guarantee depends on heartbeats.
                log.warning("heartbeat-failed", extra={"why": error.detail})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(config.heartbeat_s):
                    await self._heartbeat_due.wait()
            self._heartbeat_due.clear()

    async def _report_log_ends(self, store: Store) -> None:
        """Report the log's end periodically; end this process if another process displaced it.
        While the metadata service is unavailable, the bookie continues to serve (rule 15a).
        """
        while True:
            await asyncio.sleep(self.config.log_end_s)
            try:
                await self._report_log_end(store)
            except registration.Displaced as error:
                log.critical("displaced", extra={"reason": str(error)})
                self._end(REFUSED_STATUS, f"bookie {self.config.bookie_name}: {error}")
            except QuorumLogError as error:
                log.warning("log-end-put-off", extra={"why": error.detail})

    async def _report_log_end(self, store: Store) -> None:
        assert self._cookie is not None
        await self._registration.report_log_end(self._cookie, store.position.sequence)

    async def _keep_witnesses(self) -> None:
        """Store the witnesses in the database's answers. These witnesses reveal, before any
        deletion, that the database went back, even if no process was running then (rule 18a).
        """
        while True:
            try:
                await self.rows.confirm()
            except QuorumLogError as error:
                if isinstance(error, DatabaseWentBack):
                    log.error("database-not-confirmed", extra={"why": error.detail})  # noqa: TRY400
            except OSError as error:
                # The disk may be full. The bookie keeps serving, but deletes nothing meanwhile.
                log.warning("witnesses-not-kept", extra={"why": repr(error)})
            await asyncio.sleep(self.config.heartbeat_s)

    async def _collect_garbage(self, collector: Collector) -> None:
        """Periodically drop ledgers that no longer belong on this bookie."""
        config = self.config
        loop = asyncio.get_running_loop()
        scan_at = loop.time() + config.collect_s
        while True:
            await asyncio.sleep(min(config.collect_s, max(1.0, config.collect_grace_s / 10)))
            # If the check fails, nothing is dropped, and the next round retries.
            with logged("collect"):
                await collector.recheck()
                if loop.time() >= scan_at:
                    scan_at = loop.time() + config.collect_s
                    await collector.round()

    async def _follow_deletions(self, announced: asyncio.Queue[int]) -> None:
        """Queue ledgers of announced tombstones; a periodic scan finds missed tombstones."""
        async with contextlib.aclosing(self._metadata.changes()) as changes:
            async for change in changes:
                if change.ledger_id is not None and change.deleted:
                    await announced.put(change.ledger_id)

    async def _look_at_announced(self, announced: asyncio.Queue[int], collector: Collector) -> None:
        """Check ledgers announced as deleted; announcements during a check are checked together."""
        while True:
            ledger_ids = [await announced.get()]
            while not announced.empty():
                ledger_ids.append(announced.get_nowait())
            with logged("announcement", ledgers=ledger_ids):
                await collector.deletions_announced(ledger_ids)

    def _writer_failed(self, error: BaseException) -> None:
        """Exit, as unsynced records must not be served (rule 3). Called in the writer's thread."""
        self._end(
            DISK_STATUS,
            f"bookie {self.config.bookie_name}: the log can't be written ({error!r}). The process"
            " ends; the next start serves only records that are proven to be on disk.",
        )


def is_limbo_due(local: LocalCookie | None, cookie: LocalCookie) -> bool:
    """Whether phase one of limbo must run, for a new incarnation or after an interrupted start."""
    if cookie.incarnation == 1:
        return False
    return local is None or local.incarnation != cookie.incarnation or not local.registered


def _stored_state(directory: Path) -> bodies.BookieMode:
    """The operator's last mode; a file with unknown content means read-only."""
    try:
        text = (directory / _STATE_FILE).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return "writable"
    match text:
        case "writable" | "draining":
            return text
        case _:
            return "read-only"
