"""Creates ledgers and appends to them.

A ledger is created with this process as its only writer, on an ensemble of live bookies. If too few
bookies or zones are live, the creation is rejected, or the ledger is marked as degraded. Appends go
to this process's write handle, or to the gateway that is the ledger's writer.

A transaction's ledger stores record batches in the format of the log that may publish it. One
request is one entry (rule 25), which stores the number of earlier records in the ledger.
"""

import asyncio
import logging
import struct
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final

import orjson

from quorumlog import errors
from quorumlog.net.budget import PEER
from quorumlog.net.directory import Directory
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.net.metadata_requests import new_attempt
from quorumlog.protocol import batch, packed
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata, State
from quorumlog.protocol.once import Once
from quorumlog.protocol.quorum import Quorum
from quorumlog.wire.log_bodies import PACKED_TAG, TRANSACTION_TAG
from services.gateway.engine.handles import Handles
from services.gateway.engine.keys import new_keys
from services.gateway.engine.peers import SILENT_WRITER, Peers
from services.gateway.engine.rows import is_closed
from services.gateway.interface import DEGRADED, FRAMES, EntriesAppended, LedgerOptions

log = logging.getLogger(__name__)

_RETRY_S: Final = 1.0
_PLACINGS: Final = 3
"""Maximum attempts to choose an ensemble, if chosen bookies register again meanwhile."""
LARGE_BYTES: Final = 512 << 10
"""Batches of this size or more are compressed in a thread. The compression takes about 1 ms
(docs/internals/performance.md), and the thread adds about 0.1 ms."""

_U32: Final = struct.Struct(">I")


class Placing:
    """Chooses the ensembles of new ledgers for one gateway."""

    def __init__(self, directory: Directory, *, zones_min: int, enforces_zones: bool) -> None:
        """`zones_min`: how many zones must have a copy of each entry. With fewer zones, the
        creation is rejected (if `enforces_zones`), or the ledger is marked as degraded.
        """
        self.directory = directory
        self._zones_min = zones_min
        self._enforces_zones = enforces_zones
        self.narrow_count = 0
        """The number of ledgers that were created in fewer zones than `zones_min`."""

    async def new_ensemble(
        self, quorum: Quorum, *, allow_degraded: bool
    ) -> tuple[tuple[str, ...], bool]:
        """Chooses the members of a new ledger; also returns whether the ensemble is degraded.

        Raises: NotEnoughBookies, MetadataUnavailable.
        """
        degraded_ack = (quorum.write_quorum, quorum.ack_quorum) if allow_degraded else None
        for is_retry in (False, True):
            if is_retry or not self.directory.is_known:
                await self.directory.refresh()
            # Only the second try, with a refreshed list of bookies, accepts a degraded ensemble.
            found = self.directory.new_ensemble(
                quorum.ensemble_size, degraded_ack=degraded_ack if is_retry else None
            )
            if found is not None:
                members, is_degraded = found
                return members, self._is_narrow(quorum, members) or is_degraded
        raise self.too_few(quorum.ensemble_size)

    def too_few(self, needed: int) -> errors.NotEnoughBookies:
        """The error for a creation that found too few bookies."""
        return errors.NotEnoughBookies(
            f"the ledger needs {needed} bookies that accept entries, and the cluster now has "
            f"{self.directory.census()}: start more bookies"
        )

    def _is_narrow(self, quorum: Quorum, members: tuple[str, ...]) -> bool:
        wanted = min(self._zones_min, quorum.write_quorum)
        used = min(
            self.directory.zone_count(tuple(members[p] for p in quorum.write_set(entry_id)))
            for entry_id in range(quorum.ensemble_size)
        )
        if used >= wanted:
            return False
        if self._enforces_zones:
            raise errors.NotEnoughBookies(
                f"the copies of an entry would be in {used} zones, but ZONES_MIN requires {wanted}:"
                " start bookies in more zones"
            )
        self.narrow_count += 1
        log.warning("too-few-zones", extra={"used": used, "wanted": wanted})
        return True


class Creations:
    """Creates ledgers. Invariant: a running creation counts against the budget of open ledgers
    until it fails, or until the ledger's handle counts instead.
    """

    def __init__(self, handles: Handles, metadata: MetadataClient, placing: Placing) -> None:
        """`metadata` stores the new ledgers, and `placing` chooses their ensembles."""
        self._handles, self._metadata, self._placing = handles, metadata, placing

    async def create(self, options: LedgerOptions) -> LedgerMetadata:
        """Creates a ledger whose only writer is this process.

        Raises: NotEnoughBookies, LedgerExists, Overloaded, InvalidRequest, MetadataUnavailable.
        """
        peer, places = PEER.get(), self._handles.places
        if options.log is None:
            places.take(peer)
        else:
            places.back(peer)  # the budget never rejects the ledger of a log's roll or takeover
        is_kept = False
        try:
            stale: errors.StaleMember | None = None
            for _ in range(_PLACINGS):
                draft = await self._draft(options)
                attempt, once = new_attempt(), options.once
                try:
                    row, is_kept = await self._create(draft, attempt, once, peer)
                except errors.StaleMember as error:
                    # A bookie has registered since the list of bookies was read (rule 15b).
                    stale = error
                    await self._placing.directory.refresh()
                except (errors.MetadataUnavailable, asyncio.CancelledError) as error:
                    if (
                        not isinstance(error, errors.MetadataUnavailable)
                        or error.outcome == errors.UNKNOWN
                    ):
                        is_kept = True
                        self._handles.ports.tasks.start(self._settle(draft, attempt, once, peer))
                    raise
                else:
                    return row
            raise errors.NotEnoughBookies(
                f"the ledger was not created: in each of {_PLACINGS} attempts, a chosen bookie had "
                f"registered again ({stale}): retry"
            ) from stale
        finally:
            if not is_kept:
                places.give(peer)

    async def _draft(self, options: LedgerOptions) -> LedgerMetadata:
        """Returns the metadata of the ledger to create, with a new ensemble and new keys."""
        if options.digest is DigestKind.HMAC_SHA256 and options.password is None:
            raise errors.InvalidRequest("`password` is required with the digest hmac-sha256")
        members, is_degraded = await self._placing.new_ensemble(
            options.quorum, allow_degraded=options.allow_degraded
        )
        keys = new_keys(options.password, options.digest)
        return LedgerMetadata(
            ledger_id=-1 if options.ledger_id is None else options.ledger_id,
            quorum=options.quorum,
            digest=options.digest,
            fragments=(Fragment(0, members),),
            writer=self._handles.writer,
            ledger_key=keys.ledger_key,
            access_key=keys.access_key,
            mac_key=keys.mac_key,
            custom=tuple(sorted(options.custom)),
            log=options.log,
            extra=(*options.tags, *(((DEGRADED, "true"),) if is_degraded else ())),
        )

    async def _create(
        self, draft: LedgerMetadata, attempt: str, once: Once | None, peer: str
    ) -> tuple[LedgerMetadata, bool]:
        """Returns the ledger's metadata, and whether a new handle counts against the budget now."""
        rereads = self._handles.rereads
        gaps = rereads.gaps
        row = await self._metadata.create(draft, attempt=attempt, once=once)
        is_new = self._adopt(row, draft.ledger_key, peer)
        if gaps != rereads.gaps and row.ledger_id in self._handles.by_ledger:
            rereads.want(row.ledger_id)  # changes may have been missed since the request
        return row, is_new

    def _adopt(self, row: LedgerMetadata, ledger_key: bytes, peer: str) -> bool:
        """Opens a write handle for the new ledger, unless one exists; returns whether it did so."""
        self._handles.rows.put(row)
        is_ours = row.writer is not None and row.writer.id == self._handles.writer.id
        # A client's retry gets the metadata of the first request's ledger, which may have a handle
        # already. Another process may have ended the ledger before this response.
        is_new = row.ledger_id not in self._handles.by_ledger and row.state is State.OPEN
        if is_ours and row.ledger_key == ledger_key and is_new:
            self._handles.open(row, peer)
            return True
        return False

    async def _settle(
        self, draft: LedgerMetadata, attempt: str, once: Once | None, peer: str
    ) -> None:
        """Retries a creation until its outcome is known. No other process would close or repair the
        ledger, because this process counts as the ledger's writer while it lives (rule 11).
        """
        is_kept = False
        try:
            while True:
                try:
                    _, is_kept = await self._create(draft, attempt, once, peer)
                except errors.MetadataUnavailable:
                    await asyncio.sleep(_RETRY_S)
                except errors.QuorumLogError:
                    return  # the ledger was never created
                else:
                    return
        finally:
            if not is_kept:
                self._handles.places.give(peer)


def transaction_of(row: LedgerMetadata) -> str | None:
    """Returns the id of the transaction to which a ledger belongs, or None."""
    return dict(row.extra).get(TRANSACTION_TAG) if row.extra else None


def check_not_of_log(row: LedgerMetadata, verb: str) -> None:
    """Raises OwnedByLog if only a log may append to the ledger and close it (rule 27). Clients may
    append to a transaction's ledger and close it, although the ledger names a log.
    """
    if row.log is not None and transaction_of(row) is None:
        detail = f"the ledger belongs to the log {row.log}: {verb} the log instead"
        raise errors.OwnedByLog(detail, ledger_id=row.ledger_id, log=row.log)


async def packed_batch(data: bytes) -> bytes:
    """Returns the shorter of a batch and its compressed form. A thread compresses large batches."""
    if len(data) < LARGE_BYTES:
        return packed.pack(data)
    return await asyncio.to_thread(packed.pack, data)


class Appends:
    """Carries out the appends of this gateway's clients. Stateless."""

    def __init__(self, handles: Handles, peers: Peers) -> None:
        """`handles`: the ledgers that this process writes; `peers`: the other gateways."""
        self._handles, self._peers = handles, peers
        self._rows, self._gatekeeper = handles.rows, handles.gatekeeper

    async def append(
        self,
        ledger_id: int,
        payloads: Sequence[bytes],
        *,
        password: str | None = None,
        expect: int | None = None,
    ) -> EntriesAppended:
        """Appends payloads as contiguous entries. Returns when all entries are acknowledged."""
        handle = self._handles.by_ledger.get(ledger_id)
        row = await self._row(ledger_id) if handle is None else handle.row
        if row.log is not None:
            detail = f"the ledger belongs to the log {row.log}: append to the log instead"
            raise errors.OwnedByLog(detail, ledger_id=ledger_id, log=row.log)
        if handle is None:
            frames = b"".join([part for p in payloads for part in (_U32.pack(len(p)), p)])
            reported = orjson.loads(
                await self.forward(ledger_id, FRAMES, frames, password=password, expect=expect)
            )
            return EntriesAppended(
                reported["first_entry"], reported["last_entry"], reported["last_add_confirmed"]
            )
        self._gatekeeper.check(row, password)
        try:
            submitted = handle.append(payloads, expect)
        except (errors.LedgerClosed, errors.LedgerFenced, errors.WriterLost) as error:
            raise await self._handles.prefer_ledger_state(error, ledger_id) from error
        return await submitted

    async def forward(
        self,
        ledger_id: int,
        media: str,
        data: bytes,
        *,
        password: str | None = None,
        expect: int | None = None,
    ) -> bytes:
        """Forwards a client's append to the ledger's writer; returns the JSON of the response."""
        row = await self._row(ledger_id)
        check_not_of_log(row, "append to")
        self._gatekeeper.check(row, password)
        writer, peers = self._handles.writer_of(row), self._peers
        query = "" if expect is None else f"?expect={expect}"
        path = f"/v1/ledgers/{ledger_id}/entries{query}"
        try:
            return await peers.send(
                writer, "POST", path, peers.append_s, data, media=media, password=password
            )
        except TimeoutError as error:
            raise errors.QuorumTimeout(SILENT_WRITER, ledger_id=ledger_id) from error
        except errors.WriterLost as error:
            raise await self._handles.prefer_ledger_state(error, ledger_id) from error

    def at_hand(
        self, ledger_id: int
    ) -> Callable[[Sequence[bytes]], asyncio.Future[EntriesAppended]] | None:
        """Returns a function that starts an append without waiting (`WriteHandle.append`). Returns
        None unless this process writes the ledger, and the ledger has no password, log or
        transaction. If the function raises, nothing is appended.
        """
        handle = self._handles.by_ledger.get(ledger_id)
        if handle is None or not handle.takes_appends:
            return None
        row, own = handle.access_row, handle.row
        if own.log is not None or own.access_key or row.access_key or transaction_of(row):
            return None
        return handle.append

    async def append_batch(
        self, ledger_id: int, data: bytes, *, expect: int | None = None
    ) -> EntriesAppended:
        """Appends a record batch as one entry to a transaction's ledger that this process writes;
        adds the time and the number of earlier records. Returns when the entry is acknowledged.
        """
        try:
            handle = self._handles.get(ledger_id)
            if transaction_of(handle.access_row) is None:
                detail = "record batches can be appended only to a transaction's ledger"
                raise errors.OwnedByLog(detail, ledger_id=ledger_id)
            if (PACKED_TAG, "true") in handle.access_row.extra:
                data = await packed_batch(data)
            if len(data) > batch.BATCH_BYTES_MAX:
                detail = f"a record batch may have at most {batch.BATCH_BYTES_MAX} bytes"
                raise errors.TooLarge(f"{detail} (got {len(data)})")
            now_ms, count = int(datetime.now(UTC).timestamp() * 1000), handle.records
            entry = batch.placed(data, append_time_ms=now_ms, records_before=count)
            # No `await` follows the read of `records`, so counts are in the order of entry ids.
            submitted = handle.append((entry,), expect)
            handle.records += batch.decode_head(data).count
        except (errors.LedgerClosed, errors.LedgerFenced, errors.WriterLost) as error:
            raise await self._handles.prefer_ledger_state(error, ledger_id) from error
        return await submitted

    async def transaction_of(self, ledger_id: int) -> str | None:
        """Returns the id of the ledger's transaction; None for other ledgers and unknown ledgers.

        Raises: MetadataUnavailable.
        """
        handle = self._handles.by_ledger.get(ledger_id)
        if handle is not None:
            return transaction_of(handle.access_row)
        try:
            return transaction_of(await self._rows.row(ledger_id))
        except errors.NoSuchLedger:
            return None  # the following append reports it

    async def _row(self, ledger_id: int) -> LedgerMetadata:
        """Reads the metadata. CLOSED metadata is read from the primary, and copies of its end are
        checked (rule 18b), because the error for the append reports the end.
        """
        row = await self._rows.row(ledger_id)
        if is_closed(row):
            row = await self._rows.fresh(ledger_id)
        return await self._handles.ends.reported(row)
