"""The SDK for code without an event loop: the names of `quorumlog.client`, each of which waits.

Made of that by `python -m tests.client`; do not edit. One client may be used by many threads, and
their appends travel together.

with Client("http://127.0.0.1:8080", "http://127.0.0.1:8081") as client:
    ledger = client.create_ledger()
    ledger.append(b"hello")
    for entry in ledger.entries():
        print(entry.entry_id, entry.payload)
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self

from quorumlog import client as _async
from quorumlog.client import (
    Appended,
    Batching,
    ConnectionLost,
    Entry,
    LogAppended,
    LogPage,
    LogRecord,
    Page,
    Record,
    Start,
    Unsettled,
)
from quorumlog.client.portal import Portal

__all__ = [
    "Appended",
    "Batching",
    "Client",
    "ConnectionLost",
    "Entry",
    "Ledger",
    "Log",
    "LogAppended",
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


class Producer:
    """Appends to a log exactly once: a repeat of a request gets the first one's answer.

    Invariants: `seq` is that of the next request; one whose outcome is unknown keeps its own, and no
    other records are sent under it. `since` is the log's end before this producer had sent anything,
    by which a log that has forgotten some tells a new producer from a forgotten one; once it is known
    it never changes. None: it is not said.
    """

    def __init__(self, portal: Portal, inner: _async.Producer) -> None:
        """Made by a client."""
        self._portal, self._inner = portal, inner

    def __repr__(self) -> str:
        """As the async one."""
        return repr(self._inner)

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

    def append(self, *records: bytes | Record) -> LogAppended:
        """Append records next to each other, all or none, and once.

        Appends that are made while one is under way travel together, in the order of the calls.
        After an error whose outcome is unknown the same call again is harmless, if the records
        travelled alone; else it is Unsettled, and `settle` tells where they are.
        """
        return self._portal.run(self._inner.append(*records))

    def submit(self, *records: bytes | Record) -> Future[LogAppended]:
        """Append records without waiting until they are durable: that is when the future is done.

        Waits only while too much is queued.
        """
        return self._portal.future(self._portal.run(self._inner.submit(*records)))

    def flush(self) -> None:
        """Wait until every append of this object is settled, or failed."""
        self._portal.run(self._inner.flush())

    def settle(self) -> LogAppended | None:
        """Send the request again whose outcome is unknown: where all its records are, in the order
        of their calls. None where there is no such request.
        """
        return self._portal.run(self._inner.settle())


class Ledger:
    """A ledger of a cluster. Holds its id and password, and appends that are on their way."""

    def __init__(self, portal: Portal, inner: _async.Ledger) -> None:
        """Made by a client."""
        self._portal, self._inner = portal, inner

    def __repr__(self) -> str:
        """As the async one."""
        return repr(self._inner)

    @property
    def ledger_id(self) -> int:
        """The async one's `ledger_id`."""
        return self._inner.ledger_id

    def append(self, payload: bytes, *, expect: int | None = None) -> int:
        """Append one entry and return its id once it is durable.

        Appends that are made while one is under way travel together, in the order of the calls.
        An error whose `outcome` is unknown may have appended it; it is never sent twice by itself,
        and what was queued behind it is not sent.
        `expect`: the id that it must get, else UnexpectedEntryId and nothing is written.
        """
        return self._portal.run(self._inner.append(payload, expect=expect))

    def submit(self, payload: bytes) -> Future[Appended]:
        """Append one entry without waiting until it is durable: that is when the future is done.

        Waits only while too much is queued.
        """
        return self._portal.future(self._portal.run(self._inner.submit(payload)))

    def append_batch(self, payloads: Sequence[bytes], *, expect: int | None = None) -> Appended:
        """Append entries that get consecutive ids. Of a batch whose outcome is unknown a prefix may
        be there.
        """
        return self._portal.run(self._inner.append_batch(payloads, expect=expect))

    def flush(self) -> None:
        """Wait until every append of this object is settled."""
        self._portal.run(self._inner.flush())

    def read(
        self, first: int = 0, *, limit: int | None = None, last: int | None = None, wait_ms: int = 0
    ) -> Page:
        """Read entries from `first` on, as many as one answer holds.

        `wait_ms`: how long the server may wait for one at the tail.
        """
        return self._portal.run(self._inner.read(first, limit=limit, last=last, wait_ms=wait_ms))

    def entries(self, first: int = 0, *, last: int | None = None) -> Iterator[Entry]:
        """The entries that are confirmed when it begins, in order."""
        return self._portal.iterate(self._inner.entries(first, last=last))

    def tail(self, first: int = 0) -> Iterator[Entry]:
        """The entries in order, and those to come, until the ledger is closed. Never fences."""
        return self._portal.iterate(self._inner.tail(first))

    def info(self) -> dict[str, Any]:
        """The ledger as the API shows it: state, quorums, fragments, metadata."""
        return self._portal.run(self._inner.info())

    def last_add_confirmed(self) -> int:
        """The last entry that is confirmed, -1 where there is none."""
        return self._portal.run(self._inner.last_add_confirmed())

    def close(self) -> dict[str, Any]:
        """End the ledger after its last acknowledged entry, through its writer."""
        return self._portal.run(self._inner.close())

    def recover(self, *, declare_lost: Sequence[str] = ()) -> dict[str, Any]:
        """End the ledger although its writer may be gone: fence, read on, close. All who ask get
        the same end. `declare_lost` names bookies that never come back: entries may be lacking.
        """
        return self._portal.run(self._inner.recover(declare_lost=declare_lost))

    def accept_loss(
        self, first: int, last: int, *, declare_lost: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Give up entries first..last of a closed ledger for ever: reads of them raise EntryLost.

        Raises: LossNotProven unless all who could hold them answer that they do not, those apart
        that `declare_lost` says are gone for ever.
        """
        return self._portal.run(self._inner.accept_loss(first, last, declare_lost=declare_lost))


class Log:
    """A log of a cluster. Holds its name, appends that are on their way and, once it was opened for
    one writer, the writer token.
    """

    def __init__(self, portal: Portal, inner: _async.Log) -> None:
        """Made by a client."""
        self._portal, self._inner = portal, inner

    def __repr__(self) -> str:
        """As the async one."""
        return repr(self._inner)

    @property
    def name(self) -> str:
        """The async one's `name`."""
        return self._inner.name

    @property
    def writer_token(self) -> int | None:
        """The async one's `writer_token`."""
        return self._inner.writer_token

    def append(self, *records: bytes | Record, expect: int | None = None) -> LogAppended:
        """Append records next to each other, all or none; returns when they are durable.

        Appends that are made while one is under way travel together, in the order of the calls.
        An error whose `outcome` is unknown may have appended them; they are never sent twice by
        itself, and what was queued behind them is not sent. Where that must not be, use a
        `producer`.
        `expect`: the offset that the first must get, else UnexpectedOffset, nothing written.
        """
        return self._portal.run(self._inner.append(*records, expect=expect))

    def submit(self, *records: bytes | Record) -> Future[LogAppended]:
        """Append records without waiting until they are durable: that is when the future is done.

        Waits only while too much is queued.
        """
        return self._portal.future(self._portal.run(self._inner.submit(*records)))

    def flush(self) -> None:
        """Wait until every append of this object is settled."""
        self._portal.run(self._inner.flush())

    def producer(
        self, producer_id: str | None = None, *, epoch: int | None = None, since: int | None = None
    ) -> Producer:
        """Who appends exactly once, whatever dies. One of the same id with a higher epoch ends the
        ones before it; the epoch is the time by the clock where it is not given.

        `since`: the log's `next_offset` before the producer of this id and epoch had sent anything.
        It is read with the first request where the epoch is made here. Who gives an epoch may have
        sent under it before, and gives the `since` of then; without it a log that has forgotten any
        producer takes no requests of one that it does not know. Raises: ExpiredProducer; begin a
        new epoch then.
        """
        return Producer(self._portal, self._inner.producer(producer_id, epoch=epoch, since=since))

    def read(
        self, start: Start = "earliest", *, limit: int | None = None, wait_ms: int = 0
    ) -> LogPage:
        """Read records from `start` on, as many as one answer holds.

        `wait_ms`: how long the server may wait for one at the tail.
        """
        return self._portal.run(self._inner.read(start, limit=limit, wait_ms=wait_ms))

    def records(self, start: Start = "earliest") -> Iterator[LogRecord]:
        """The records that are there when it begins, in order."""
        return self._portal.iterate(self._inner.records(start))

    def tail(self, start: Start = "earliest") -> Iterator[LogRecord]:
        """The records in order, and those to come, until the log is closed. Never fences."""
        return self._portal.iterate(self._inner.tail(start))

    def open(self, owner: str) -> int:
        """Become its only writer: whoever wrote it is fenced off, and this object's appends carry
        the token. Returns the offset that the next record gets.
        """
        return self._portal.run(self._inner.open(owner))

    def info(self) -> dict[str, Any]:
        """The log as the API shows it: settings, ledgers, offsets, owner."""
        return self._portal.run(self._inner.info())

    def roll(self) -> dict[str, Any]:
        """Go on in a new ledger."""
        return self._portal.run(self._inner.roll())

    def truncate(self, before: int) -> dict[str, Any]:
        """Drop whole ledgers that end below an offset; `first_offset` tells the result."""
        return self._portal.run(self._inner.truncate(before))

    def archived(self, through: int, *, expect: int | None = None) -> dict[str, Any]:
        """Say that all records below an offset are kept elsewhere too; retention keeps the others.

        `expect`: `archived_through` as it was before. Raises: VersionConflict, InvalidRequest.
        """
        return self._portal.run(self._inner.archived(through, expect=expect))

    def close(self) -> dict[str, Any]:
        """End the log for good."""
        return self._portal.run(self._inner.close())

    def delete(self) -> None:
        """Delete the log with its records."""
        self._portal.run(self._inner.delete())


class TransactionLedger:
    """A ledger of a transaction, which one task attempt writes and seals.

    Invariant: one append at a time, and `entries` is the entry that the next one gets; so a
    repetition of an append is recognized, and is there once.
    """

    def __init__(self, portal: Portal, inner: _async.TransactionLedger) -> None:
        """Made by a client."""
        self._portal, self._inner = portal, inner

    def __repr__(self) -> str:
        """As the async one."""
        return repr(self._inner)

    @property
    def ledger_id(self) -> int:
        """The async one's `ledger_id`."""
        return self._inner.ledger_id

    @property
    def entries(self) -> int:
        """The async one's `entries`."""
        return self._inner.entries

    def append(self, *records: bytes | Record) -> int:
        """Append records as one entry, whose id is returned when it is durable.

        Raises: TransactionAborted, TransactionCommitted, LedgerClosed, LedgerFenced, WriterLost:
        then this attempt is lost, and another one needs a ledger of its own.
        """
        return self._portal.run(self._inner.append(*records))

    def close(self) -> dict[str, Any]:
        """Seal it: a commit may name it then."""
        return self._portal.run(self._inner.close())


class Transaction:
    """A transaction of a log. Holds nothing but its id."""

    def __init__(self, portal: Portal, inner: _async.Transaction) -> None:
        """Made by a client."""
        self._portal, self._inner = portal, inner

    def __repr__(self) -> str:
        """As the async one."""
        return repr(self._inner)

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
        """A ledger to write into; what is not named by the commit is deleted."""
        return TransactionLedger(
            self._portal, self._portal.run(self._inner.ledger(partition=partition, attempt=attempt))
        )

    def commit(
        self, *ledger_ids: int, overwrite: bool = False, writer_token: int | None = None
    ) -> dict[str, Any]:
        """Put these closed ledgers onto the log, in this order: all of them, once.

        `overwrite`: what was on the log before is dropped. `writer_token`: of a log that was
        opened. Raises: TransactionAborted; TransactionCommitted where other ones were published;
        InvalidRequest.
        """
        return self._portal.run(
            self._inner.commit(*ledger_ids, overwrite=overwrite, writer_token=writer_token)
        )

    def abort(self) -> dict[str, Any]:
        """End it: nothing of it comes onto the log. Raises: TransactionCommitted."""
        return self._portal.run(self._inner.abort())


class Client:
    """Talks to the gateways of one cluster; use it in `async with`, whose end waits for appends that
    are on their way (after an exception it ends them).
    """

    def __init__(
        self, *urls: str, deadline_s: float = 60.0, batching: Batching | None = None
    ) -> None:
        """`urls`: of one or more gateways; when one dies the next is asked.

        `deadline_s`: for one call, with all its repetitions. `batching`: how appends are gathered.
        """
        self._inner = _async.Client(*urls, deadline_s=deadline_s, batching=batching)

    def __enter__(self) -> Self:
        self._portal = Portal()
        self._portal.run(self._inner.__aenter__())
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            self._portal.run(self._inner.__aexit__(kind, *rest))
        finally:
            self._portal.close()

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
        """Create a ledger; what is left out is the server's choice. A repetition of the request
        makes no second one.
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
        """A ledger that exists; asks nobody."""
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
        """All ledgers that fit, by id."""
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
    ) -> Log:
        """Create a log, or get it where it exists with the same settings; what is left out is the
        server's choice.

        Raises: LogExists where it has others.
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
                )
            ),
        )

    def log(self, name: str, *, writer_token: int | None = None) -> Log:
        """A log that exists; asks nobody. `writer_token`: of `Log.open`, in another process."""
        return Log(self._portal, self._inner.log(name, writer_token=writer_token))

    def begin(
        self,
        log: str,
        *,
        app: str | None = None,
        version: int | None = None,
        expires_in_s: int | None = None,
    ) -> Transaction:
        """A transaction on a log. With `app` and `version` the one that all of this version share;
        it may be COMMITTED already (`info`), and then there is nothing to do.
        """
        return Transaction(
            self._portal,
            self._portal.run(
                self._inner.begin(log, app=app, version=version, expires_in_s=expires_in_s)
            ),
        )

    def transaction(self, transaction_id: str) -> Transaction:
        """A transaction that exists; asks nobody."""
        return Transaction(self._portal, self._inner.transaction(transaction_id))

    def logs(self) -> Iterator[dict[str, Any]]:
        """All logs by name."""
        return self._portal.iterate(self._inner.logs())

    def bookies(self) -> Sequence[dict[str, Any]]:
        """All registered bookies with their state."""
        return self._portal.run(self._inner.bookies())

    def cluster(self) -> dict[str, Any]:
        """Every service with its state, and what is under-replicated."""
        return self._portal.run(self._inner.cluster())
