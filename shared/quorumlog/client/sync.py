"""The SDK for code without an event loop: the names of `quorumlog.client`, each of which waits.

Made of that by `python -m tests.client`; do not edit. One client may be used by many threads, and
their appends travel together.

with Client("http://127.0.0.1:8080", "http://127.0.0.1:8081") as client:
    ledger = client.create_ledger()
    ledger.append(b"hello")
    for entry in ledger.entries():
        print(entry.entry_id, entry.payload)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self

from quorumlog import client as _async
from quorumlog.client import (
    Appended,
    Batching,
    ClientBroke,
    ClientClosed,
    ClusterInfo,
    ConnectionLost,
    ConsumerInfo,
    Entry,
    LedgerInfo,
    LogAppended,
    LogInfo,
    LogPage,
    LogRecord,
    Page,
    Record,
    Start,
    Unsettled,
)
from quorumlog.client.portal import Face, Portal

__all__ = [
    "Appended",
    "Batching",
    "Client",
    "ClientBroke",
    "ClientClosed",
    "ClusterInfo",
    "ConnectionLost",
    "Consumer",
    "ConsumerInfo",
    "Entry",
    "Ledger",
    "LedgerInfo",
    "Log",
    "LogAppended",
    "LogInfo",
    "LogPage",
    "LogRecord",
    "Page",
    "Producer",
    "Record",
    "Start",
    "Transaction",
    "TransactionLedger",
    "Unsettled",
]


class Producer(Face[_async.Producer]):
    """Appends to a log exactly once: a repeat of a request gets the first request's answer.

    Invariants: `seq` is the sequence number of the next request; a request whose outcome is unknown
    keeps its number, and no other records are sent under that number. `since` is the log's end before
    this producer sent its first request: a log that has forgotten some producers tells new ones from
    forgotten ones by it. Once known, `since` never changes; while None, requests do not carry it. A producer that has read
    `since` appends to the log of that time, and to no later one of its name.
    """

    @property
    def producer_id(self) -> str:
        """The async one's `producer_id`."""
        return self._inner.producer_id

    @property
    def epoch(self) -> int:
        """The async one's `epoch`."""
        return self._inner.epoch

    @property
    def seq(self) -> int:
        """The async one's `seq`."""
        return self._inner.seq

    @property
    def since(self) -> int | None:
        """The async one's `since`."""
        return self._inner.since

    def append(self, *records: bytes | Record, expect: int | None = None) -> LogAppended:
        """Append records at consecutive offsets, all or none, and once.

        Appends that are made while a request is under way travel together, in the order of the calls.
        After an error whose outcome is unknown the same call again is harmless if its records travelled
        alone; else it raises Unsettled, and `settle` tells where the records are.
        `expect`: the offset that the first record must get, unless an earlier request appended the
        records; else UnexpectedOffset, and nothing is written.
        """
        return self._portal.run(self._inner.append(*records, expect=expect))

    def submit(self, *records: bytes | Record) -> Future[LogAppended]:
        """Queue records; the future is done once the records are durable.

        Waits only while too much is queued.
        """
        return self._portal.submit(self._inner.batcher, records)

    def flush(self) -> None:
        """Wait until every append of this producer has succeeded or failed."""
        self._portal.run(self._inner.flush())

    def settle(self) -> LogAppended | None:
        """Repeat the request whose outcome is unknown, and return where all its records are, in the
        order of their calls; None where there is no such request.
        """
        return self._portal.run(self._inner.settle())


class Ledger(Face[_async.Ledger]):
    """A handle of a ledger: its id and password, and appends that are under way."""

    @property
    def ledger_id(self) -> int:
        """The async one's `ledger_id`."""
        return self._inner.ledger_id

    def append(self, payload: bytes, *, expect: int | None = None) -> int:
        """Append one entry and return the entry's id once the entry is durable.

        Appends that are made while a request is under way travel together, in the order of the calls.
        After an error whose `outcome` is unknown the entry may have been appended: the client never
        sends the entry again by itself, and does not send what was queued behind it.
        `expect`: the id that the entry must get; else UnexpectedEntryId, and nothing is written.
        """
        return self._portal.run(self._inner.append(payload, expect=expect))

    def submit(self, payload: bytes) -> Future[Appended]:
        """Queue one entry; the future is done once the entry is durable.

        Waits only while too much is queued.
        """
        return self._portal.submit(self._inner.batcher, (payload,))

    def append_batch(self, payloads: Sequence[bytes], *, expect: int | None = None) -> Appended:
        """Append entries under consecutive ids. If the outcome is unknown, a prefix of the batch may
        have been appended.
        """
        return self._portal.run(self._inner.append_batch(payloads, expect=expect))

    def flush(self) -> None:
        """Wait until every append of this handle has succeeded or failed."""
        self._portal.run(self._inner.flush())

    def read(
        self, first: int = 0, *, limit: int | None = None, last: int | None = None, wait_ms: int = 0
    ) -> Page:
        """Read entries from `first` on, as many as one answer holds.

        `wait_ms`: how long the server may wait for a new entry at the tail.
        """
        return self._portal.run(self._inner.read(first, limit=limit, last=last, wait_ms=wait_ms))

    def entries(self, first: int = 0, *, last: int | None = None) -> Iterator[Entry]:
        """The entries that are confirmed when the iteration begins, in order."""
        return self._portal.iterate(self._inner.entries(first, last=last))

    def tail(self, first: int = 0) -> Iterator[Entry]:
        """Follow the ledger: all entries in order, and new ones as they are confirmed, until the ledger
        is closed. Never fences.
        """
        return self._portal.iterate(self._inner.tail(first))

    def info(self) -> LedgerInfo:
        """The ledger as the API shows it: state, quorums, fragments, metadata."""
        return self._portal.run(self._inner.info())

    def last_add_confirmed(self) -> int:
        """The last add confirmed; -1 while no entry is confirmed."""
        return self._portal.run(self._inner.last_add_confirmed())

    def close(self) -> dict[str, Any]:
        """Close the ledger after its last acknowledged entry, through its writer."""
        return self._portal.run(self._inner.close())

    def recover(self, *, declare_lost: Sequence[str] = ()) -> dict[str, Any]:
        """Recover the ledger, whose writer may be gone: fence, read forward, close. Every caller gets
        the same last entry. `declare_lost` names bookies that never come back: the ledger may lack
        entries then.
        """
        return self._portal.run(self._inner.recover(declare_lost=declare_lost))

    def change_password(self, password: str) -> dict[str, Any]:
        """Set another password in place of this handle's, which goes on with it.

        Raises: WrongPassword, InvalidRequest for a ledger without one.
        """
        return self._portal.run(self._inner.change_password(password))

    def accept_loss(
        self, first: int, last: int, *, declare_lost: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Give up entries first..last of a closed ledger for ever: reads of these raise EntryLost.

        Raises: LossNotProven unless every bookie that could hold the entries answers that it does not;
        bookies in `declare_lost` need not answer, as they are gone for ever.
        """
        return self._portal.run(self._inner.accept_loss(first, last, declare_lost=declare_lost))


class Consumer(Face[_async.Consumer]):
    """Reads a log as a consumer of a name: from the committed position on, while it holds the lease.

    Inside of `with` or `async with` it holds the lease, and renews it in the background. Iterating over it gives
    each record from the position on, and follows the log. `commit` says that all records which the loop has got are
    processed; what was not committed comes again, here or at the next worker.

    Invariant: a record is only given out while the lease is held by this process's clock.
    """

    @property
    def name(self) -> str:
        """The async one's `name`."""
        return self._inner.name

    @property
    def holder(self) -> str:
        """The async one's `holder`."""
        return self._inner.holder

    @property
    def position(self) -> int:
        """The async one's `position`."""
        return self._inner.position

    @property
    def fencing_token(self) -> int:
        """The async one's `fencing_token`."""
        return self._inner.fencing_token

    def records(self, *, follow: bool = True) -> Iterator[LogRecord]:
        """The records after those that were taken, page by page, until the log is closed; without `follow` up to
        its end. What of a page is processed must be told by `taken` before a commit.
        """
        return self._portal.iterate(self._inner.records(follow=follow))

    def taken(self, record: LogRecord) -> None:
        """The next commit covers all records up to this one."""
        self._inner.taken(record)

    @property
    def is_held(self) -> bool:
        """Whether this worker is the active one, by its own clock."""
        return self._inner.is_held

    def check(self) -> None:
        """Raise LeaseLost, or why else this worker is not the active one any more."""
        self._portal.run(self._inner.check())

    def commit(self, offset: int | None = None) -> int:
        """Commit that all records up to the last one of the loop are processed, or all below `offset`. Returns the
        position. Once it returns, no worker gets these records again.

        Raises: LeaseLost where another worker may have taken over; LogReplaced; PositionBehind.
        """
        return self._portal.run(self._inner.commit(offset))

    def __enter__(self) -> Self:
        """Wait for the lease, and take it. Raises: LeaseHeld after `wait_s`; LogReplaced, OffsetTruncated."""
        self._portal.run(self._inner.__aenter__())
        return self

    def __exit__(self, *reason: object) -> None:
        """Let the lease go: another worker gets it at once. Commits nothing."""
        self._portal.run(self._inner.__aexit__(*reason))

    def __iter__(self) -> Iterator[LogRecord]:
        """Each record from the position on, in order, as they come. Raises: LeaseLost."""
        for record in self._portal.iterate(self._inner.records()):
            if not self._inner.is_held:
                self._portal.run(self._inner.check())
            self._inner.taken(record)
            yield record


class Log(Face[_async.Log]):
    """A handle of a log: its name, appends that are under way and, after `open`, the writer token."""

    @property
    def name(self) -> str:
        """The async one's `name`."""
        return self._inner.name

    @property
    def writer_token(self) -> int | None:
        """The async one's `writer_token`."""
        return self._inner.writer_token

    def append(self, *records: bytes | Record, expect: int | None = None) -> LogAppended:
        """Append records at consecutive offsets, all or none; return once the records are durable.

        Appends that are made while a request is under way travel together, in the order of the calls.
        After an error whose `outcome` is unknown the records may have been appended: the client never
        sends records again by itself, and does not send what was queued behind them. A `producer`
        appends exactly once instead.
        `expect`: the offset that the first record must get; else UnexpectedOffset, and nothing is
        written.
        """
        return self._portal.run(self._inner.append(*records, expect=expect))

    def submit(self, *records: bytes | Record) -> Future[LogAppended]:
        """Queue records; the future is done once the records are durable.

        Waits only while too much is queued.
        """
        return self._portal.submit(self._inner.batcher, records)

    def flush(self) -> None:
        """Wait until every append of this handle has succeeded or failed."""
        self._portal.run(self._inner.flush())

    def producer(
        self, producer_id: str | None = None, *, epoch: int | None = None, since: int | None = None
    ) -> Producer:
        """A producer, which appends exactly once whatever process dies. A producer of the same id with
        a higher epoch ends older ones. The default epoch is the wall clock's time, or one more than the epoch that ended
        a producer of this client, whichever is later: a clock that was put back ends no new producer.

        `since`: the log's `next_offset` before the producer of this id and epoch sent its first
        request. With the default epoch the first append reads `since` from the log. A caller that gives
        an epoch may have sent requests under that epoch before, and gives the `since` of that time;
        without `since`, a log that has forgotten any producer refuses producers that it does not know
        with ExpiredProducer: begin a new epoch then.
        """
        return Producer(self._portal, self._inner.producer(producer_id, epoch=epoch, since=since))

    def read(
        self,
        start: Start = "earliest",
        *,
        limit: int | None = None,
        wait_ms: int = 0,
        created_at: str | None = None,
    ) -> LogPage:
        """Read records from `start` on, as many as one answer holds.

        `start`: an offset; -10: ten offsets before the end; a datetime: the first record that was appended then or
        later. Before the first record both are where the log begins; a time after the last one is the end.
        `wait_ms`: how long the server may wait for a new record at the tail. `created_at`: of the page before, to go on in
        the same log.

        Raises: LogReplaced where the log was deleted and created again since; OffsetBeyondEnd; OffsetTruncated.
        """
        return self._portal.run(
            self._inner.read(start, limit=limit, wait_ms=wait_ms, created_at=created_at)
        )

    def records(self, start: Start = "earliest") -> Iterator[LogRecord]:
        """The records that are confirmed when the iteration begins, in order. Raises: as `read`."""
        return self._portal.iterate(self._inner.records(start))

    def tail(self, start: Start = "earliest") -> Iterator[LogRecord]:
        """Follow the log: all records in order, and new ones as they are confirmed, until the log is
        closed. Never fences. Raises: as `read`: LogReplaced ends it, with none of the new log's records.
        """
        return self._portal.iterate(self._inner.tail(start))

    def consumer(
        self,
        name: str,
        *,
        start: Start = "earliest",
        holder: str | None = None,
        lease_s: float = 30.0,
        wait_s: float | None = None,
    ) -> Consumer:
        """A worker of the consumer `name`, which goes on where the last one has committed; for `with` or `async with`.

        `start`: where a consumer begins that has no position yet. `holder`: a name of this worker. A process of the same
        name that was started later gets the lease from it at once, others once it was silent for `lease_s`. `wait_s`: how
        long to wait for the lease; None: as long as it takes, 0: not at all.
        """
        return Consumer(
            self._portal,
            self._inner.consumer(name, start=start, holder=holder, lease_s=lease_s, wait_s=wait_s),
        )

    def consumers(self, *, prefix: str | None = None) -> Iterator[dict[str, Any]]:
        """All consumers by name, with what each has not processed yet (`lag`); `prefix`: those whose names begin with
        it.
        """
        return self._portal.iterate(self._inner.consumers(prefix=prefix))

    def consumer_info(self, name: str) -> ConsumerInfo:
        """A consumer as the API shows it: position, lease, lag. Raises: NoSuchConsumer."""
        return self._portal.run(self._inner.consumer_info(name))

    def reset_consumer(self, name: str, to: Start) -> dict[str, Any]:
        """Put a consumer wherever a read may begin: an offset, one before the end, a time, the log's beginning or its
        end. Its worker loses the lease.

        Raises: NoSuchConsumer.
        """
        return self._portal.run(self._inner.reset_consumer(name, to))

    def delete_consumer(self, name: str) -> None:
        """Forget a consumer. Raises: NoSuchConsumer; LeaseHeld while a worker is active."""
        self._portal.run(self._inner.delete_consumer(name))

    def open(self, owner: str, *, created_at: str | None = None) -> int:
        """Become the log's only writer: fence former writers, and send the writer token with this
        handle's appends. Returns the offset that the next record gets. `created_at` as for `truncate`.
        """
        return self._portal.run(self._inner.open(owner, created_at=created_at))

    def info(self) -> LogInfo:
        """The log as the API shows it: settings, ledgers, offsets, owner."""
        return self._portal.run(self._inner.info())

    def roll(self) -> dict[str, Any]:
        """Roll: close the log's open ledger and continue in a new one."""
        return self._portal.run(self._inner.roll())

    def truncate(self, before: int, *, created_at: str | None = None) -> dict[str, Any]:
        """Drop whole ledgers that end below an offset; `first_offset` of `info` shows the result.

        `created_at`: of the log that is meant, as `info` and pages have it. Raises: LogReplaced.
        """
        return self._portal.run(self._inner.truncate(before, created_at=created_at))

    def archived(
        self, through: int, *, expect: int | None = None, created_at: str | None = None
    ) -> dict[str, Any]:
        """Record that all records below an offset are archived elsewhere; retention keeps the others.

        `expect`: `archived_through` as it was before; `created_at` as for `truncate`. Raises: VersionConflict,
        InvalidRequest, LogReplaced.
        """
        return self._portal.run(self._inner.archived(through, expect=expect, created_at=created_at))

    def close(self, *, created_at: str | None = None) -> dict[str, Any]:
        """Close the log for good. `created_at` as for `truncate`."""
        return self._portal.run(self._inner.close(created_at=created_at))

    def change(
        self,
        *,
        roll_bytes: int | None = None,
        roll_entries: int | None = None,
        roll_seconds: int | None = None,
        retention_bytes: int | None = None,
        retention_seconds: int | None = None,
        if_version: int | None = None,
        created_at: str | None = None,
    ) -> dict[str, Any]:
        """Change the limits that are given; 0 switches one off. The log's owner and its retention keep to them within
        seconds.

        `if_version`: the `version` of `info` from which the change was made. Raises: VersionConflict if the log has
        another one since, which a roll or a new owner gives it too. `created_at` as for `truncate`.
        """
        return self._portal.run(
            self._inner.change(
                roll_bytes=roll_bytes,
                roll_entries=roll_entries,
                roll_seconds=roll_seconds,
                retention_bytes=retention_bytes,
                retention_seconds=retention_seconds,
                if_version=if_version,
                created_at=created_at,
            )
        )

    def protect(
        self, *, deletion_protection: bool = True, created_at: str | None = None
    ) -> dict[str, Any]:
        """Switch the log's protection on or off: a protected log can't be deleted, truncated or overwritten. `created_at`
        as for `truncate`.
        """
        return self._portal.run(
            self._inner.protect(deletion_protection=deletion_protection, created_at=created_at)
        )

    def delete(self, *, created_at: str | None = None) -> None:
        """Delete the log with its records; with `created_at` that log alone. Raises: LogProtected, NoSuchLog."""
        self._portal.run(self._inner.delete(created_at=created_at))


class TransactionLedger(Face[_async.TransactionLedger]):
    """A ledger of a transaction, which one task attempt writes and seals.

    Invariant: one append is under way at a time, and `entries` is the id of the next entry; so a retry
    of an append is recognized, and the entry exists once.
    """

    @property
    def ledger_id(self) -> int:
        """The async one's `ledger_id`."""
        return self._inner.ledger_id

    @property
    def entries(self) -> int:
        """The async one's `entries`."""
        return self._inner.entries

    def append(self, *records: bytes | Record) -> int:
        """Append records as one entry and return the entry's id once the entry is durable.

        Raises: TransactionAborted, TransactionCommitted, LedgerClosed, LedgerFenced, WriterLost:
        this attempt is lost then, and the next attempt needs a ledger of its own.
        """
        return self._portal.run(self._inner.append(*records))

    def close(self) -> dict[str, Any]:
        """Seal the ledger: a commit may name it then."""
        return self._portal.run(self._inner.close())


class Transaction(Face[_async.Transaction]):
    """A handle of a transaction of a log: its id."""

    @property
    def transaction_id(self) -> str:
        """The async one's `transaction_id`."""
        return self._inner.transaction_id

    def info(self) -> dict[str, Any]:
        """The transaction as the API shows it: state, ledgers, offsets."""
        return self._portal.run(self._inner.info())

    def ledger(
        self, *, partition: int | None = None, attempt: int | None = None
    ) -> TransactionLedger:
        """Create a ledger to write to. Ledgers that the commit does not name are deleted."""
        return TransactionLedger(
            self._portal, self._portal.run(self._inner.ledger(partition=partition, attempt=attempt))
        )

    def commit(
        self, *ledger_ids: int, overwrite: bool = False, writer_token: int | None = None
    ) -> dict[str, Any]:
        """Publish these closed ledgers to the log, in this order: all of them, once.

        `overwrite`: drop what was on the log before. `writer_token`: of a log that was opened.
        Raises: TransactionAborted; TransactionCommitted where other ledgers were published;
        InvalidRequest.
        """
        return self._portal.run(
            self._inner.commit(*ledger_ids, overwrite=overwrite, writer_token=writer_token)
        )

    def abort(self) -> dict[str, Any]:
        """Abort: nothing of the transaction is published. Raises: TransactionCommitted."""
        return self._portal.run(self._inner.abort())


class Client:
    """The client of one cluster's gateways. Use it in `async with`: leaving waits for appends that are
    under way, or cancels them after an exception.
    """

    def __init__(
        self,
        *urls: str,
        token: str | Callable[[], str] | None = None,
        deadline_s: float = 60.0,
        batching: Batching | None = None,
        compression: str | None = None,
    ) -> None:
        """`urls`: of one or more gateways, as http://host:port; when one dies the next one is asked.

        `token`: an access token, where the gateways require one; or a function that returns the present
        one, for tokens that end soon: each request asks it, so it must not block. `deadline_s`: for one
        call with all its retries. `batching`: how appends are batched. `compression`: `gzip` or `zstd` (which needs
        the extra `zstd`) for what is sent and read, where the network is slower than a processor compresses.
        """
        self._inner = _async.Client(
            *urls, token=token, deadline_s=deadline_s, batching=batching, compression=compression
        )
        self._portal = Portal()

    def __enter__(self) -> Self:
        self._portal.open(self._inner)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._portal.close(kind, *rest)

    def create_ledger(
        self,
        *,
        ensemble_size: int | None = None,
        write_quorum: int | None = None,
        ack_quorum: int | None = None,
        digest: str | None = None,
        password: str | None = None,
        metadata: Mapping[str, str] | None = None,
        ledger_id: int | None = None,
        allow_degraded: bool | None = None,
    ) -> Ledger:
        """Create a ledger; the server chooses what is left out. A retry of the request creates no
        second ledger. `ledger_id`: from 2^52 on, since lower ids are assigned.
        """
        return Ledger(
            self._portal,
            self._portal.run(
                self._inner.create_ledger(
                    ensemble_size=ensemble_size,
                    write_quorum=write_quorum,
                    ack_quorum=ack_quorum,
                    digest=digest,
                    password=password,
                    metadata=metadata,
                    ledger_id=ledger_id,
                    allow_degraded=allow_degraded,
                )
            ),
        )

    def ledger(self, ledger_id: int, *, password: str | None = None) -> Ledger:
        """A handle of an existing ledger. Sends no request."""
        return Ledger(self._portal, self._inner.ledger(ledger_id, password=password))

    def delete_ledger(self, ledger_id: int, *, password: str | None = None) -> None:
        """Delete a ledger with its entries; an open one is recovered first."""
        self._portal.run(self._inner.delete_ledger(ledger_id, password=password))

    def ledgers(
        self,
        *,
        state: str | None = None,
        bookie: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """All ledgers that match, by id."""
        return self._portal.iterate(
            self._inner.ledgers(state=state, bookie=bookie, metadata=metadata)
        )

    def create_log(
        self,
        name: str,
        *,
        ensemble_size: int | None = None,
        write_quorum: int | None = None,
        ack_quorum: int | None = None,
        digest: str | None = None,
        metadata: Mapping[str, str] | None = None,
        roll_bytes: int | None = None,
        roll_entries: int | None = None,
        roll_seconds: int | None = None,
        retention_bytes: int | None = None,
        retention_seconds: int | None = None,
        batch_compression: str | None = None,
        deletion_protection: bool | None = None,
    ) -> Log:
        """Create a log, or get an existing log of the same settings; the server chooses what is left
        out. `batch_compression`: `zstd` stores record batches compressed.

        Raises: LogExists where the log has other settings.
        """
        return Log(
            self._portal,
            self._portal.run(
                self._inner.create_log(
                    name,
                    ensemble_size=ensemble_size,
                    write_quorum=write_quorum,
                    ack_quorum=ack_quorum,
                    digest=digest,
                    metadata=metadata,
                    roll_bytes=roll_bytes,
                    roll_entries=roll_entries,
                    roll_seconds=roll_seconds,
                    retention_bytes=retention_bytes,
                    retention_seconds=retention_seconds,
                    batch_compression=batch_compression,
                    deletion_protection=deletion_protection,
                )
            ),
        )

    def log(self, name: str, *, writer_token: int | None = None) -> Log:
        """A handle of an existing log. Sends no request. `writer_token`: of `Log.open`, in another
        process.
        """
        return Log(self._portal, self._inner.log(name, writer_token=writer_token))

    def begin(
        self,
        log: str,
        *,
        app: str | None = None,
        version: int | None = None,
        expires_in_s: int | None = None,
    ) -> Transaction:
        """Begin a transaction on a log. With `app` and `version`: the transaction that all processes of
        this version share; if it is COMMITTED already (`info`), there is nothing left to do.
        """
        return Transaction(
            self._portal,
            self._portal.run(
                self._inner.begin(log, app=app, version=version, expires_in_s=expires_in_s)
            ),
        )

    def transaction(self, transaction_id: str) -> Transaction:
        """A handle of an existing transaction. Sends no request."""
        return Transaction(self._portal, self._inner.transaction(transaction_id))

    def logs(self, *, prefix: str | None = None) -> Iterator[dict[str, Any]]:
        """All logs by name; `prefix`: those whose names begin with it."""
        return self._portal.iterate(self._inner.logs(prefix=prefix))

    def bookies(self) -> Sequence[dict[str, Any]]:
        """All registered bookies with their state."""
        return self._portal.run(self._inner.bookies())

    def cluster(self) -> ClusterInfo:
        """Every service with its state, and what is under-replicated."""
        return self._portal.run(self._inner.cluster())

    def create_token(
        self,
        name: str,
        grants: Sequence[str],
        *,
        expires_in_s: int | None = None,
        quotas: Mapping[str, int] | None = None,
    ) -> dict[str, Any]:
        """Make an access token. The answer's `token` is its secret, which nobody can show again.

        `quotas`: what it may use of each gateway, as `requests_per_s`, `bytes_per_s`, `connections`,
        `open_ledgers`.
        """
        return self._portal.run(
            self._inner.create_token(name, grants, expires_in_s=expires_in_s, quotas=quotas)
        )

    def tokens(self) -> Sequence[dict[str, Any]]:
        """All access tokens, without their secrets."""
        return self._portal.run(self._inner.tokens())

    def revoke_token(self, token_id: str) -> None:
        """End an access token. Raises: NoSuchToken."""
        self._portal.run(self._inner.revoke_token(token_id))

    def audit(
        self, *, since: str | None = None, target: str | None = None
    ) -> Iterator[dict[str, Any]]:
        """Who changed what, in order. `since`: a time in RFC 3339; `target`: like `logs/events`."""
        return self._portal.iterate(self._inner.audit(since=since, target=target))

    def consumers(
        self, *, log: str | None = None, prefix: str | None = None
    ) -> Iterator[dict[str, Any]]:
        """The consumers of all logs by log and name, without lags. `log`: of this log only, also of one that is no more;
        `prefix`: those whose names begin with it.
        """
        return self._portal.iterate(self._inner.consumers(log=log, prefix=prefix))
