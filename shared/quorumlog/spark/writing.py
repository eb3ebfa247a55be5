"""Exactly-once writes: executors write ledgers, and the driver publishes them.

A task attempt writes to its own ledger, tagged with the transaction, and closes the ledger.
Readers see nothing until the driver's one commit publishes the ledgers of the attempts that Spark
chose. The cluster deletes ledgers that were not chosen, and ledgers that a dead driver left. The
transaction of an app and a version is committed once, however often it is begun.

Invariant of a `LogRowsWriter`: entries below `_next` of the open ledger are acknowledged. Each entry is
a batch of rows in the order of their arrival, and at most one entry is in flight. So when a gateway is
lost, the ledger's last entry shows whether the entry in flight was appended.
"""

import base64
import contextlib
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from quorumlog import errors
from quorumlog.spark.http import Gateways
from quorumlog.spark.options import WriteOptions
from quorumlog.spark.rows import by_log, crc32, sizes
from quorumlog.wire.columns import MEDIA, stream

_WRITER_GONE: Final = (
    errors.WriterLost,
    errors.LedgerFenced,
    errors.LedgerClosed,
    errors.QuorumTimeout,
)
"""Errors after which a ledger accepts no more entries: the writer continues in another ledger."""

_OVER: Final = (
    errors.TransactionAborted,
    errors.TransactionCommitted,
    errors.NoSuchTransaction,
    errors.NoSuchLedger,
)
"""Errors of a task whose transaction ended before the task did; the task's ledgers are deleted."""

LEDGER_BYTES: Final = 64 << 20
"""Minimum size for a ledger when an error recommends a number of partitions; by judgement."""


class TooManyLedgers(RuntimeError):
    """A write has too many small partitions; the message recommends a number."""


class WriteOver(RuntimeError):
    """The transaction of a write ended before its commit: none of its rows are in the log."""

    def __init__(self, log: str) -> None:
        super().__init__(
            f"the transaction of this write on {log} has ended: nothing was written or appended for "
            "longer than txnExpiresInSeconds, or another run of the same version has ended it. "
            "None of its rows are in the log: run the write again"
        )


@dataclass(frozen=True, slots=True)
class Whose:
    """Identifies a write's transaction: by its id, or by an app and a version."""

    app: str | None = None
    version: int | None = None
    transaction: str | None = None


class WrittenLedger(NamedTuple):
    """A closed ledger of a task."""

    ledger_id: int
    last_entry: int
    rows: int
    bytes: int
    """Bytes of values, keys and headers."""
    crc32: int
    """CRC32 of the concatenated values. Not CRC32C: executors have zlib only."""


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """The ledgers that a task has written for one log."""

    log: str
    transaction: str
    partition: int
    ledgers: tuple[WrittenLedger, ...]
    """The ledgers, in the order of their rows."""
    is_duplicate: bool = False
    """This version is published already, so nothing was written."""


class PublishedLedger(NamedTuple):
    """A ledger that a commit has published."""

    partition: int
    ledger_id: int
    first_offset: int
    last_offset: int
    rows: int
    bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Published:
    """A commit's records in a log. `is_duplicate`: an earlier commit had published them."""

    log: str
    transaction: str
    first_offset: int | None
    last_offset: int | None
    rows: int
    is_duplicate: bool
    ledgers: tuple[PublishedLedger, ...] = ()
    """The ledgers, in the order of the log."""


@dataclass(frozen=True)
class TaskMessage(WriterCommitMessage):
    """A task's message to the driver, with the ledgers that the task has written."""

    parts: tuple[WrittenPart, ...]


def begin(gateways: Gateways, options: WriteOptions, log: str, whose: Whose) -> tuple[str, bool]:
    """Begin a write's transaction. Returns its id and whether it is committed already.
    Raises: NoSuchLog.
    """
    if whose.transaction is not None:
        return whose.transaction, False
    wanted: dict[str, Any] = {"log": log}
    if whose.app is not None:
        wanted |= {"app": whose.app, "version": whose.version}
    if options.expires_in_s is not None:
        wanted["expires_in_s"] = options.expires_in_s
    found = gateways.post("/v1/transactions", wanted)
    return str(found["transaction"]), found["state"] == "COMMITTED"


def write_task(options: WriteOptions, whose: Whose, batches: Iterable[Any]) -> TaskMessage:
    """Write all rows of a task to ledgers that readers do not see yet."""
    context = TaskContext.get()
    assert context is not None, "this must run in a Spark task"
    writers: dict[str, LogRowsWriter] = {}
    with options.connection.connect() as gateways:
        for batch in batches:
            if batch.num_rows == 0:
                continue
            for log, table in by_log(batch, options.log):
                writer = writers.get(log)
                if writer is None:
                    at = (context.partitionId(), context.attemptNumber())
                    writer = writers[log] = LogRowsWriter(gateways, options, log, whose, at)
                writer.add(table)
        return TaskMessage(tuple(writer.seal() for _, writer in sorted(writers.items())))


class LogRowsWriter:
    """Writes a task's rows for one log."""

    def __init__(
        self,
        gateways: Gateways,
        options: WriteOptions,
        log: str,
        whose: Whose,
        at: tuple[int, int],
    ) -> None:
        """`at`: the task's partition and attempt numbers."""
        self._gateways, self._options, self._log, self._at = gateways, options, log, at
        self._transaction, self._is_duplicate = begin(gateways, options, log, whose)
        self._has_rivals = whose.app is not None
        self._waiting: list[Any] = []
        self._waiting_rows = self._waiting_bytes = 0
        self._ledger: int | None = None
        self._next = self._rows = self._bytes = self._crc32 = 0
        """The open ledger's next entry id; rows, bytes and CRC32 of the entries below that id."""
        self._sealed: list[WrittenLedger] = []

    def add(self, table: Any) -> None:
        """Add rows; the writer sends them as soon as they fill a request. Raises: WriteOver."""
        if self._is_duplicate:
            return
        self._waiting.append(table)
        self._waiting_rows += table.num_rows
        self._waiting_bytes += int(sizes(table).sum())
        most = self._options
        if (
            self._waiting_rows >= most.rows_per_request
            or self._waiting_bytes >= most.bytes_per_request
        ):
            with self._watched():
                self._flush()

    def seal(self) -> WrittenPart:
        """Send the remaining rows and close the ledger, so that it can be committed.

        Raises: WriteOver.
        """
        if not self._is_duplicate:
            with self._watched():
                self._flush()
                if self._ledger is not None:
                    self._end_ledger(is_lost=False)
        sealed = () if self._is_duplicate else tuple(self._sealed)
        return WrittenPart(
            self._log, self._transaction, self._at[0], sealed, is_duplicate=self._is_duplicate
        )

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Handle an ended transaction. Raises: WriteOver, unless a rival committed this version."""
        try:
            yield
        except _OVER as error:
            if not (self._has_rivals and self._is_committed()):
                raise WriteOver(self._log) from error
            # Another driver of this version committed first: this task's rows are deleted.
            self._is_duplicate = True

    def _is_committed(self) -> bool:
        try:
            found = self._gateways.get(f"/v1/transactions/{self._transaction}")
        except errors.NoSuchTransaction:
            return False
        return bool(found["state"] == "COMMITTED")

    def _flush(self) -> None:
        if not self._waiting:
            return
        table = pa.concat_tables(self._waiting, promote_options="default")
        self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0
        for part in _requests(table, self._options):
            self._append(part)

    def _append(self, table: Any) -> None:
        """Append rows as one entry, exactly once, to the open ledger or else to a new ledger."""
        while True:
            ledger = self._ledger if self._ledger is not None else self._open()
            try:
                self._post(ledger, table)
            except errors.UnexpectedEntryId as error:
                # An earlier attempt appended the entry, and its response was lost.
                if error.members.get("next_entry_id") != self._next + 1:
                    raise
            except _WRITER_GONE:
                if self._end_ledger(is_lost=True, in_flight=table):
                    return
                continue
            self._took(table)
            return

    def _took(self, table: Any) -> None:
        """Count rows that were appended to the open ledger as its next entry."""
        self._next += 1
        self._rows += table.num_rows
        self._bytes += int(sizes(table).sum())
        self._crc32 = crc32(table, self._crc32)

    def _post(self, ledger: int, table: Any) -> None:
        path = f"/v1/ledgers/{ledger}/entries"
        if self._gateways.speaks_arrow:
            try:
                self._gateways.request(
                    "POST",
                    path,
                    body=stream(table.schema, table.to_batches()),
                    headers={"Content-Type": MEDIA},
                    params={"expect": self._next},
                    # Repeatable: a second append would get another id than the expected one.
                    is_repeatable=True,
                )
            except errors.UnsupportedMediaType:
                self._gateways.speaks_arrow = False
            else:
                return
        self._gateways.post(path, {"entries": _json(table)}, params={"expect": self._next})

    def _check_room(self) -> None:
        """Raise TooManyLedgers if other partitions already have all ledgers that a commit may have.
        Runs before this partition writes a row. The driver checks the number again.
        """
        partition, most = self._at[0], self._options.ledgers_max
        if partition < most:
            return
        found = self._gateways.get(f"/v1/transactions/{self._transaction}")
        others = {item["partition"] for item in found["ledgers"]} - {partition}
        if len(others) >= most:
            raise TooManyLedgers(
                f"the write to {self._log} needs more ledgers than maxLedgersPerCommit allows ({most}): {len(others)} other partitions"
                f" have ledgers, and partition {partition} needs one, too; write df.coalesce({most}) instead of df"
            )

    def _open(self) -> int:
        self._check_room()
        partition, attempt = self._at
        wanted = {"transaction": self._transaction, "partition": partition, "attempt": attempt}
        ledger = int(self._gateways.post("/v1/ledgers", wanted)["ledger_id"])
        self._ledger = ledger
        self._next = self._rows = self._bytes = self._crc32 = 0
        return ledger

    def _end_ledger(self, *, is_lost: bool, in_flight: Any = None) -> bool:
        """Close the ledger, or recover it if its writer is lost. Returns whether the ledger
        contains `in_flight`, the rows whose append got no answer.
        """
        ledger = self._ledger
        assert ledger is not None
        path = f"/v1/ledgers/{ledger}"
        try:
            if is_lost:
                raise errors.WriterLost
            found = self._gateways.post(f"{path}/close")
        except _WRITER_GONE:
            found = self._gateways.post(f"{path}/recover")
        end = int(found["last_entry"])
        assert end >= self._next - 1, f"ledger {ledger} ends at {end}, below acknowledged entries"
        assert is_lost or end == self._next - 1, f"{ledger} ends at {end}: another writer appended"
        has_more = end >= self._next
        if has_more and in_flight is not None:
            self._took(in_flight)
        if end >= 0:
            self._sealed.append(WrittenLedger(ledger, end, self._rows, self._bytes, self._crc32))
        self._ledger = None
        return has_more


def _requests(table: Any, options: WriteOptions) -> Iterable[Any]:
    """Split rows into parts within one request's limits of rows and bytes."""
    ends = np.cumsum(sizes(table))
    at = 0
    while at < table.num_rows:
        before = int(ends[at - 1]) if at else 0
        by_bytes = int(np.searchsorted(ends, before + options.bytes_per_request, "right"))
        end = min(max(by_bytes, at + 1), at + options.rows_per_request)
        yield table.slice(at, end - at)
        at = end


def _json(table: Any) -> list[dict[str, Any]]:
    """Rows as JSON records, for a gateway without Arrow."""
    found = []
    for row in table.to_pylist():
        entry: dict[str, Any] = {"data": base64.b64encode(row["value"]).decode()}
        if row.get("key") is not None:
            entry["key"] = base64.b64encode(row["key"]).decode()
        if row.get("headers"):
            entry["headers"] = dict(row["headers"])
        if row.get("timestamp") is not None:
            entry["timestamp"] = row["timestamp"].isoformat()
        found.append(entry)
    return found


# --- the driver ----------------------------------------------------------------------------------


def publish(
    options: WriteOptions,
    whose: Whose,
    parts: Sequence[WrittenPart],
    *,
    overwrite: bool = False,
    even_if_empty: bool = False,
) -> list[Published]:
    """Commit the tasks' ledgers, log by log, in the order of the partitions.

    A commit whose response is lost is retried until a response arrives; it takes effect once.
    `even_if_empty`: commit even without rows, so that the version counts as done.
    Raises: TooManyLedgers, WriteOver; any other error's `outcome` is that of the commit.
    """
    with options.connection.connect() as gateways:
        grouped: dict[str, list[WrittenPart]] = {}
        for part in parts:
            grouped.setdefault(part.log, []).append(part)
        if options.log is not None and (overwrite or even_if_empty):
            grouped.setdefault(options.log, [])
        for log, own in grouped.items():
            _check_count(log, own, options.ledgers_max)
        return [
            _commit(gateways, options, whose, log, own, overwrite=overwrite)
            for log, own in sorted(grouped.items())
        ]


def _commit(
    gateways: Gateways,
    options: WriteOptions,
    whose: Whose,
    log: str,
    parts: Sequence[WrittenPart],
    *,
    overwrite: bool,
) -> Published:
    live = [part for part in parts if not part.is_duplicate]
    if live:
        transaction = live[0].transaction
    else:
        transaction, is_done = (
            (parts[0].transaction, True) if parts else begin(gateways, options, log, whose)
        )
        if is_done:
            return Published(log, transaction, None, None, 0, is_duplicate=True)
    ledgers = [
        {"ledger_id": ledger.ledger_id, "last_entry": ledger.last_entry}
        for part in live
        for ledger in part.ledgers
    ]
    if len({part.transaction for part in live}) > 1:
        # The transaction ended between two tasks, and the later task has begun another transaction.
        raise WriteOver(log)
    path = f"/v1/transactions/{transaction}"
    try:
        found = gateways.post(f"{path}/commit", {"ledgers": ledgers, "overwrite": overwrite})
    except errors.QuorumLogError as error:
        # An ended transaction is forgotten after days, so an earlier attempt may have committed it.
        is_forgotten = (
            isinstance(error, errors.NoSuchTransaction) and error.outcome != errors.UNKNOWN
        )
        if is_forgotten or isinstance(error, errors.TransactionAborted):
            raise WriteOver(log) from error
        if error.outcome == errors.UNKNOWN:
            error.add_note(f"It is unknown whether the rows are in {log}: see GET {path}.")
        raise
    is_duplicate = bool(found["duplicate"])
    known = {item["ledger_id"]: item for item in found["ledgers"]}
    published = () if is_duplicate else tuple(_published(live, known))
    return Published(
        log,
        transaction,
        found["first_offset"],
        found["last_offset"],
        sum(ledger.rows for ledger in published),
        is_duplicate,
        published,
    )


def _published(
    parts: Sequence[WrittenPart], known: Mapping[int, Mapping[str, Any]]
) -> Iterator[PublishedLedger]:
    """The tasks' ledgers with the offsets that the commit assigned to them."""
    for part in parts:
        for ledger in part.ledgers:
            at = known[ledger.ledger_id]
            yield PublishedLedger(
                part.partition,
                ledger.ledger_id,
                at["first_offset"],
                at["last_offset"],
                *ledger[2:],
            )


def _check_count(log: str, parts: Sequence[WrittenPart], most: int) -> None:
    """Raise TooManyLedgers if a commit has more ledgers than the option allows."""
    count = sum(len(part.ledgers) for part in parts)
    if count > most:
        total = sum(ledger.bytes for part in parts for ledger in part.ledgers)
        wanted = min(most, max(1, -(-total // LEDGER_BYTES)))
        raise TooManyLedgers(
            f"the commit has {count} ledgers of {log} ({total} bytes), but maxLedgersPerCommit allows "
            f"{most}: write df.coalesce({wanted}) instead of df"
        )


def abort(options: WriteOptions, transactions: Iterable[str]) -> None:
    """Abort transactions, except committed ones: Spark also aborts if a commit's response is lost."""
    with options.connection.connect() as gateways:
        for transaction in transactions:
            with contextlib.suppress(errors.TransactionCommitted, errors.NoSuchTransaction):
                gateways.post(f"/v1/transactions/{transaction}/abort")


def query_of(options: WriteOptions) -> Whose:
    """The app and version of a streaming write: the query's id or `txnAppId`, and the batch number.

    The checkpoint's path can't serve as the app: after the checkpoint is deleted, the query begins
    with batch 0 again, which would count as a retry and be dropped.
    """
    context = TaskContext.get()
    assert context is not None, "this must run in a Spark task"
    query = context.getLocalProperty("sql.streaming.queryId")
    batch = context.getLocalProperty("streaming.sql.batchId")
    if query is None or batch is None:
        raise RuntimeError("Spark does not report the query and the batch of this task")
    return Whose(options.app or query, int(batch))


def batch_of(options: WriteOptions) -> Whose:
    """The transaction that the options' app and version identify, or else a new transaction.

    A transaction without an app leaves no trace after its end, but needs the log's name. Without
    the name, the transaction belongs to a new app.
    """
    if options.app is not None:
        return Whose(options.app, options.version)
    if options.log is None:
        return Whose(f"spark-{uuid.uuid4().hex}", 0)
    with options.connection.connect() as gateways:
        transaction, _ = begin(gateways, options, options.log, Whose())
    return Whose(transaction=transaction)


def receipt(part: WrittenPart) -> str:
    """A part as JSON text, for a DataFrame of receipts."""
    return json.dumps(asdict(part))


def part_of(text: str) -> WrittenPart:
    """Parse a receipt."""
    found = json.loads(text)
    ledgers = tuple(WrittenLedger(*ledger) for ledger in found.pop("ledgers"))
    return WrittenPart(ledgers=ledgers, **found)
