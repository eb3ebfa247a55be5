"""One gateway's engine. It serves all ledgers, including the ledgers of other writers.

The engine builds its parts, and closes, recovers and deletes ledgers. All of its state may be lost
at any moment (rule 11).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final
from uuid import uuid4

from quorumlog import errors
from quorumlog.net.bookie_client import BookieClient
from quorumlog.net.directory import Directory, Quarantine
from quorumlog.net.driver import spread
from quorumlog.net.holdings import HoldingsClient
from quorumlog.net.metadata_client import MetadataClient, RepairClient
from quorumlog.net.ports import Ports
from quorumlog.net.sessions import service_session
from quorumlog.net.timers import HeardClock, Tasks, Timers, awake, restarted
from quorumlog.protocol.ends import End, end_after
from quorumlog.protocol.ids import member_name
from quorumlog.protocol.messages import CasStatus, Status
from quorumlog.protocol.metadata import Deletion, LedgerMetadata, Writer
from quorumlog.protocol.once import Once
from quorumlog.wire.bodies import ServiceHeartbeat
from services.gateway.engine.ends import Ends
from services.gateway.engine.handles import Handles
from services.gateway.engine.keys import with_password
from services.gateway.engine.ledger_reads import LedgerReads
from services.gateway.engine.ledger_writes import Appends, Creations, Placing, check_not_of_log
from services.gateway.engine.peers import Peers
from services.gateway.engine.presence import Presence
from services.gateway.engine.rows import LedgerRows, Rereads, ThrottledMetadata, is_closed
from services.gateway.interface import EngineConfig, LedgerOptions

_DRAINS: Final = "this gateway is shutting down: send the request to another gateway"
_HEARTBEAT_S: Final = 1.0
_KEPT_SHOWN_MAX: Final = 100
"""The cluster state lists at most this many ledgers that bookies have and the database lacks."""
_READ_AT_ONCE: Final = 32
"""One call reads the metadata of at most this many ledgers at once (chosen by judgement)."""


class Engine:
    """One gateway's engine: creates, closes and deletes ledgers; see also `appends` and `reads`."""

    def __init__(
        self,
        config: EngineConfig,
        metadata: MetadataClient,
        directory: Directory,
        bookies: BookieClient,
        ports: Ports,
        peers: Peers,
        holdings: HoldingsClient,
    ) -> None:
        """Internal: use `Engine.running`, which also starts the background tasks."""
        self.writer = Writer(str(uuid4()), config.url, config.internal_url)
        self.metadata, self.peers = metadata, peers
        self.directory, self.bookies = directory, bookies
        self.database_clock = HeardClock(config.clock_difference_s)
        self.throttled = ThrottledMetadata(metadata)
        """The metadata client of the protocol machines, with a limit on concurrent requests."""
        self._ports = ports = replace(ports, metadata=self.throttled)
        self.placing = Placing(
            directory, zones_min=config.zones_min, enforces_zones=config.enforces_zones
        )
        self.rows = LedgerRows(metadata, self._row_changed, self._ledger_ended)
        self._ends = Ends(self.rows, ports)
        self._holdings = holdings
        self.handles = Handles(
            self.writer,
            config,
            rows=self.rows,
            ends=self._ends,
            metadata=metadata,
            ports=ports,
            lacs=bookies,
        )
        self._gatekeeper = self.handles.gatekeeper
        self._passwords = Rereads(self.handles.with_password, self._read_rows, self.rows.put)
        """Rereads the metadata of password-protected ledgers that this process writes, because
        another gateway may change their passwords."""
        self.rows.on_gap += [self.handles.rereads.gap, self._passwords.gap]
        self._creations = Creations(self.handles, metadata, self.placing)
        self.reads = LedgerReads(self.handles, peers)
        self.appends = Appends(self.handles, peers)
        self._presence = Presence(lambda: directory.bookies, metadata.services)
        self._is_draining = False

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, config: EngineConfig) -> AsyncIterator["Engine"]:
        """Context manager that runs an engine with its connections and background tasks."""
        tasks, timers = Tasks(), Timers(asyncio.get_running_loop(), awake().time)
        async with service_session(config.credentials) as session:
            metadata = MetadataClient(config.metadata_urls, session, deadline_s=config.metadata_s)
            directory = Directory(metadata.bookies, Quarantine(config.quarantine))
            bookies = BookieClient(directory.address, session, failed=directory.quarantine.failed)
            engine = cls(
                config,
                metadata,
                directory,
                bookies,
                Ports(bookies, metadata, directory, timers, tasks, config.times),
                Peers(session, config.times.quorum_s),
                HoldingsClient(directory, session),
            )
            for work in (
                directory.follow,
                engine._presence.follow,
                engine.rows.follow,
                engine.handles.rereads.run,
                engine._passwords.run,
                engine._send_heartbeats,
                partial(metadata.keep_confirmed, _HEARTBEAT_S),
            ):
                tasks.start(restarted(work))
            try:
                yield engine
            finally:
                engine.handles.abandon()
                await engine._ends.close()
                await tasks.close()
                timers.close()
                await bookies.close()

    async def create(self, options: LedgerOptions) -> LedgerMetadata:
        """Creates a ledger whose only writer is this process.

        Raises: ShuttingDown, and the errors of `Creations.create`.
        """
        if self._is_draining:
            raise errors.ShuttingDown(_DRAINS)
        return await self._creations.create(options)

    async def get(self, ledger_id: int) -> LedgerMetadata:
        """Reads a ledger's metadata from the primary; ensures that bookies keep its end (rule 18b).

        Raises: NoSuchLedger, MetadataUnavailable, DatabaseWentBack.
        """
        return await self._ends.reported(await self.rows.fresh(ledger_id))

    def writes(self, ledger_id: int) -> bool:
        """Whether this process has the ledger open for appends."""
        return ledger_id in self.handles.by_ledger

    # Closing, recovering and deleting ledgers.

    async def close(self, ledger_id: int, *, password: str | None = None) -> LedgerMetadata:
        """Closes a ledger through its writer, in this or another gateway; returns the metadata.

        Raises: LedgerClosed, LedgerFenced, WriterLost, OwnedByLog, WrongPassword.
        """
        row = await self.rows.fresh(ledger_id)
        check_not_of_log(row, "close")
        self._gatekeeper.check(row, password)
        if row.writer is None or row.writer.id == self.writer.id:
            return await self._ends.kept(*await self.handles.close(row))
        try:
            await self.peers.close(row.writer, ledger_id, password=password)
        except errors.WriterLost as error:
            if is_closed(row):
                # The lost writer's last entry id is unknown, so any end is accepted.
                return await self._ends.copied(row)
            raise await self.handles.prefer_ledger_state(error, ledger_id) from error
        return await self.rows.fresh_closed(ledger_id)

    async def close_for_log(self, ledger_id: int) -> LedgerMetadata:
        """Closes a log's ledger, which only the log's owner may do (rule 27)."""
        row, _ = await self.handles.close(await self.rows.fresh(ledger_id))
        return row

    async def recover(
        self, ledger_id: int, *, password: str | None = None, declare_lost: Sequence[str] = ()
    ) -> LedgerMetadata:
        """Closes a ledger without its writer: fences it, finds its end, and stores the end. Returns
        the metadata. A ledger that is CLOSED already stays as it is.
        """
        row = await self._allowed(ledger_id, password)
        if is_closed(row):
            return await self._ends.copied(row)
        declared = _members(row, declare_lost)
        return await self._ends.kept(*await self._ends.recover(row, declare_lost=declared))

    async def change_password(
        self,
        ledger_id: int,
        new: str,
        *,
        password: str | None = None,
        once: Once | None = None,
    ) -> LedgerMetadata:
        """Changes a ledger's password (rule 30). A retry with the old password succeeds. A late
        copy of the request `once` changes nothing. The metadata is written even if the password is
        set already, because the change also stores the request's token (rule 6a).

        Raises: WrongPassword, InvalidRequest, NoSuchLedger, MetadataUnavailable.
        """
        while True:
            row = await self.rows.fresh(ledger_id)
            if not row.access_key:
                detail = "a password can't be added to a ledger created without a password"
                raise errors.InvalidRequest(detail, ledger_id=ledger_id)
            if not self._gatekeeper.opens(row, new):
                row = with_password(await self._allowed(ledger_id, password), new)
            elif once is None:
                break
            status, changed = await self.metadata.cas(row, once=once)
            if status is CasStatus.OK and changed is not None:
                self.rows.put(row := changed)
                break
            if status is CasStatus.MISSING:
                raise errors.NoSuchLedger("the ledger was deleted", ledger_id=ledger_id)
            if changed is None:
                raise errors.MetadataUnavailable(ledger_id=ledger_id)
        await spread(row, self._ports)  # bookies store copies of the metadata (rule 18b)
        return row

    async def accept_loss(
        self,
        ledger_id: int,
        first: int,
        last: int,
        *,
        password: str | None = None,
        declare_lost: Sequence[str] = (),
    ) -> LedgerMetadata:
        """Declares entries first..last of a CLOSED ledger lost, if no bookie has them (rule 31).

        Raises: LossNotProven, InvalidRequest, NoSuchLedger, MetadataUnavailable.
        """
        row = await self._allowed(ledger_id, password)
        row = await self._ends.reported(row)
        declared = _members(row, declare_lost)
        row = await self._ends.accept_loss(row, first, last, declared, self._holdings)
        return await self._ends.copied(row)

    async def delete(self, ledger_id: int, *, password: str | None = None) -> None:
        """Deletes a ledger; recovers an open ledger first. Raises: NoSuchLedger, OwnedByLog."""
        row = await self._allowed(ledger_id, password)
        while True:
            if row.log is not None:
                detail = f"the ledger belongs to the log {row.log}: delete the log instead"
                raise errors.OwnedByLog(detail, ledger_id=ledger_id, log=row.log)
            if not is_closed(row):
                row, _ = await self._ends.recover(row)
            try:
                attempt = await self.metadata.delete(
                    ledger_id, version=row.version, row_attempt=row.attempt
                )
            except errors.VersionConflict:
                row = await self._allowed(ledger_id, password)  # checks the password again
                continue
            break
        self.rows.deleted(ledger_id)
        await spread(row.deleted(attempt), self._ports)
        await self.rows.require_deleted(ledger_id)

    async def existing(self, ledger_ids: Sequence[int]) -> Sequence[LedgerMetadata]:
        """Reads existing ledgers' metadata from the primary. Raises: MetadataUnavailable."""
        room = asyncio.Semaphore(_READ_AT_ONCE)

        async def read(ledger_id: int) -> LedgerMetadata | None:
            async with room:
                with contextlib.suppress(errors.NoSuchLedger):
                    return await self.rows.fresh(ledger_id)
            return None

        found = await asyncio.gather(*map(read, ledger_ids))
        return [row for row in found if row is not None]

    async def notify_deleted(
        self, rows: Sequence[LedgerMetadata], deletion: Deletion = Deletion.ALONE
    ) -> None:
        """Sends bookies the last metadata of deleted ledgers, marked as deleted (rule 18e)."""
        reported = [row.deleted(deletion=deletion) for row in rows]
        await asyncio.gather(*[spread(row, self._ports) for row in reported])

    async def copy_rows(self, ledger_ids: Sequence[int]) -> None:
        """Sends bookies copies of metadata that the metadata service or another process has changed
        (rule 18b). If a read fails, autorecovery's check sends the copies later.
        """
        room = asyncio.Semaphore(_READ_AT_ONCE)

        async def copy(ledger_id: int) -> None:
            async with room:
                with contextlib.suppress(errors.QuorumLogError):
                    await spread(await self.rows.fresh(ledger_id), self._ports)

        await asyncio.gather(*map(copy, ledger_ids))

    async def keep_place(self, ledger_id: int) -> None:
        """Makes every member store a copy of a CLOSED ledger's metadata, including the ledger's
        first offset in its log (rule 27c). A member confirms the copy once its entries of the
        ledger are on disk too, even if it defers syncs. Raises: NoSuchLedger, EntryUnavailable.
        """
        row = await self.rows.fresh(ledger_id)
        members = {member for fragment in row.fragments for member in fragment.bookies}
        kept = await asyncio.gather(*[self._keeps_copy(row, member) for member in members])
        end = end_after(row, sum(kept), await self.rows.fresh(ledger_id))
        if row.first_offset is None or end is not End.KEPT or not all(kept):
            raise errors.EntryUnavailable(
                f"only {sum(kept)} of {len(kept)} bookies stored the ledger's first offset: retry",
                ledger_id=ledger_id,
            )

    async def _keeps_copy(self, row: LedgerMetadata, member: str) -> bool:
        """Whether a member confirms a copy of the metadata, within the deadline of an add."""
        answer: asyncio.Future[Status] = asyncio.get_running_loop().create_future()

        def answered(status: Status) -> None:
            if not answer.done():
                answer.set_result(status)

        self._ports.bookies.keep_row(member, row.ledger_key, row, answered)
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(answer, self._ports.times.add_s) is Status.OK
        return False

    async def _allowed(self, ledger_id: int, password: str | None) -> LedgerMetadata:
        """Reads the metadata from the primary, and checks the caller's password."""
        while True:
            row = await self.rows.fresh(ledger_id)
            opened = self._gatekeeper.check(row, password)
            if opened == row:
                return row
            # Stores the keys that rebuilt metadata lacks (rule 18d), for recovery and repair.
            status, changed = await self.metadata.cas(opened)
            if status is not CasStatus.CONFLICT:  # otherwise the password may have changed
                return opened if changed is None else changed

    # The state of the gateway and of the cluster.

    async def gateways(self) -> Sequence[Writer]:
        """The gateways with a recent heartbeat."""
        services = (await self.metadata.services()).services
        return [
            Writer(found.id, found.url, found.internal_url)
            for found in services
            if found.kind == "gateway"
        ]

    async def cluster(self) -> dict[str, Any]:
        """Returns every service with its state, including services that disappeared within the last
        hour, and the ledgers that are degraded, under-replicated, or kept by bookies (rule 18c).
        """
        queue = RepairClient(self.metadata, self.writer.id)
        bookies, services, metadata, missing, repairs, summary = await asyncio.gather(
            self.directory.refresh(),
            self.metadata.services(),
            self.metadata.own_services(),
            self.metadata.missing_witnesses(),
            queue.list(),
            queue.summary(),
        )
        cluster_id, kept = await asyncio.gather(
            self.metadata.cluster_id(), self.metadata.kept_ledgers(limit=_KEPT_SHOWN_MAX)
        )
        shown, processes = self._presence.shown(bookies.bookies, services)
        return {
            "cluster_id": cluster_id,
            "clock_doubt": self.database_clock.doubt or None,
            "bookies": shown,
            "services": [*(service.model_dump(mode="json") for service in metadata), *processes],
            "writer": self.writer,
            "degraded_ledgers": self.degraded_ledgers(),
            "quarantined": self.directory.quarantine.names,
            "missing_witnesses": [witness.model_dump(mode="json") for witness in missing],
            "kept_count": kept.count,
            "kept_ledgers": [
                {"ledger_id": ledger.ledger_id, "holders": ledger.holders}
                for ledger in kept.ledgers
            ],
            "under_replicated_count": summary.ledgers,
            "under_replicated": [
                {"ledger_id": repair.ledger_id, "bookie": repair.member} for repair in repairs[0]
            ],
        }

    def degraded_ledgers(self) -> Sequence[int]:
        """Ids of this process's ledgers with a bookie that accepts no appends (rule 8)."""
        return [handle.ledger_id for handle in self.handles.live if handle.is_degraded]

    async def ready(self) -> None:
        """Checks that a default ledger could be created now. Raises: the errors of `create`."""
        if self._is_draining:
            raise errors.ShuttingDown(_DRAINS)
        size = LedgerOptions().quorum.ensemble_size
        await self.directory.refresh()
        if not self.directory.new_ensemble(size):
            raise self.placing.too_few(size)

    async def drain(self) -> None:
        """Rejects new ledgers, waits for appends in flight, and closes this writer's ledgers."""
        self._is_draining = True
        await self.handles.drain()

    def waits_for(self) -> Sequence[str]:
        """Describes, for operators, each ledger that a drain still waits for."""
        return [handle.waits_for for handle in self.handles.live if self._is_draining]

    async def _send_heartbeats(self) -> None:
        while True:
            state = "draining" if self._is_draining else "ready"
            heartbeat = ServiceHeartbeat(
                url=self.writer.url, internal_url=self.writer.internal_url, state=state
            )
            with contextlib.suppress(errors.QuorumLogError):
                await self.metadata.send_service_heartbeat("gateway", self.writer.id, heartbeat)
            await asyncio.sleep(_HEARTBEAT_S)

    # Notifications of changed metadata.

    def _row_changed(self, ledger_id: int) -> None:
        self.reads.tails.changed(ledger_id)
        self.handles.row_changed(ledger_id)
        if not self.rows.is_current(ledger_id) and self.handles.has_password(ledger_id):
            self._passwords.want(ledger_id)

    def _ledger_ended(self, ledger_id: int) -> None:
        self.handles.ledger_ended(ledger_id)

    async def _read_rows(self, ledger_ids: Sequence[int]) -> Mapping[int, LedgerMetadata]:
        return {row.ledger_id: row for row in await self.existing(ledger_ids)}


def _members(row: LedgerMetadata, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the members with these names: `b1@2` names one member, `b1` every incarnation."""
    members = sorted(row.all_members)
    for name in names:
        if not any(name in (member, member_name(member)) for member in members):
            raise errors.InvalidRequest(
                f"`declare_lost` must name the ledger's bookies: {', '.join(members)} (got {name})",
                ledger_id=row.ledger_id,
            )
    return tuple(m for m in members if m in names or member_name(m) in names)
