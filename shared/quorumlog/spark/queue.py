"""Streaming reads of work queues: a batch has the records that a query claims, and the batch's
commit acknowledges these records.

An offset is `{"mails":{"0":number,"created_at":…,"claims":[[token,[…]],…]}}`: the batch's number,
and its claimed records in the form of `Offsets.packed`. Spark stores an offset before it runs the
batch. So a restarted query repeats the batch that was not committed, without the records that
another worker may have got meanwhile.

Invariants:
- a batch is acknowledged only after Spark has committed it, and before the next batch is claimed;
- a record whose claim was refused when its batch was planned is not in the batch.
"""

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from quorumlog.errors import QuorumLogError
from quorumlog.protocol.offset_set import NONE, Offsets
from quorumlog.spark.http import Gateways
from quorumlog.spark.options import ClusterAccess, ReadOptions
from quorumlog.spark.plan import CREATED, DataLoss, Offset, TaskRange
from quorumlog.spark.rows import read_range
from quorumlog.spark.streaming import LAG
from quorumlog.spark.versions import ReadLimit, SupportsTriggerAvailableNow

log = logging.getLogger(__name__)

ENDED: Final = "ended"
"""Key in a query's progress, next to "0": how many records another worker may also have got."""
CLAIMS: Final = "claims"
"""Key in an offset, next to "0": the tokens of a batch's claims, each with its records."""

_ROWS: Final = 1000
"""Maximum records of one claim, and of a batch without `maxOffsetsPerTrigger`."""
_CLAIMS_MAX: Final = 100
"""Maximum claims of one batch, each of up to 8 MiB. Chosen by judgement."""
_CLAIM_BYTES: Final = 8 << 20
_WAIT_MS: Final = 500
"""How long one request waits for records. Also delays the query's other sources."""
_GAP_MAX: Final = 1000
"""Maximum records that a task skips between two of its own records. Chosen by judgement."""
_DEADLINE_S: Final = 10.0
"""Deadline of an extension with its retries; chosen by judgement."""

Claims = Mapping[int, Offsets]
"""The records of claims, by token."""


def _settle(gateways: Gateways, path: str, how: str, claims: Claims) -> dict[int, Offsets]:
    """Acknowledge or extend claims; `how` is `ack` or `extend`. Returns the refused records by
    token: records whose claims ended and, for extensions, records that were acknowledged.
    """
    given = [{"claim": token, "offsets": list(each)} for token, each in claims.items() if each]
    if not given:
        return {}
    refused: dict[int, Offsets] = {}
    for one in gateways.post(f"{path}/{how}", {"claims": given})["refused"]:
        # If the request was retried, its first copy may have acknowledged these records.
        if how != "ack" or one["reason"] != "acknowledged":
            token = int(one["claim"])
            refused[token] = refused.get(token, NONE) | Offsets.of(map(int, one["offsets"]))
    return refused


class _HeldClaims:
    """The claims of a running batch. A thread extends these claims while Spark runs the batch."""

    def __init__(self, access: ClusterAccess, path: str) -> None:
        """`path`: the queue's path in the API."""
        self._access, self._path = access, path
        self._lock = threading.Lock()
        self._held: Claims = {}
        self._every_s = 0.0
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None
        self.ended = 0
        """How many records another worker may have got while this run held them."""

    def hold(self, claims: Claims, lease_ms: int) -> None:
        """From now on, extend these claims and no other claims."""
        with self._lock:
            self._held = claims
        self._every_s = lease_ms / 3000
        self._changed.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
            self._thread.start()

    def release(self) -> Claims:
        """Stop extending claims. Returns the claims that had not ended."""
        with self._lock:
            held, self._held = self._held, {}
        return held

    def close(self) -> None:
        """End the thread. The claims end when their leases expire."""
        self._every_s = 0.0
        self._changed.set()

    def _run(self) -> None:
        with self._access.connect(deadline_s=_DEADLINE_S) as gateways:
            while self._every_s:
                if self._changed.wait(self._every_s):
                    self._changed.clear()
                    continue
                try:
                    refused = _settle(gateways, self._path, "extend", self._held)
                except QuorumLogError as error:  # the next round retries
                    log.warning("quorumlog: claims were not extended: %s", error)
                    continue
                self._drop(refused)

    def _drop(self, refused: Claims) -> None:
        with self._lock:
            lost = [each & refused.get(token, NONE) for token, each in self._held.items()]
            self._held = {
                token: each - refused.get(token, NONE) for token, each in self._held.items()
            }
        self.report(Offsets.union(lost), "the running batch has them, and another worker may too")

    def report(self, offsets: Offsets, what: str) -> None:
        """Count and log records whose claims ended."""
        self.ended += len(offsets)
        if offsets:
            log.warning(
                "quorumlog: the claims of %s records of %s ended (the first is %s): %s",
                len(offsets),
                self._path,
                offsets.first,
                what,
            )


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch that this run has claimed or repeated."""

    offset: Offset
    number: int
    records: Offsets
    """The records that the batch's tasks read."""


class QueueReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming read of a queue. Lives in the driver during the query; `read` runs in tasks."""

    def __init__(self, options: Mapping[str, str]) -> None:
        """Parse the options. Raises: BadOption."""
        parsed = ReadOptions.of(options)
        self._options = parsed
        (self._log,) = parsed.subject.names
        self._path = f"/v1/logs/{self._log}/queues/{parsed.queue}"
        self._claims = _HeldClaims(parsed.connection, self._path)
        self._batch: _Batch | None = None
        """The newest batch that this run has claimed or repeated."""
        self._acknowledged = 0
        """The number of the batch that was acknowledged last."""
        self._left: int | None = None
        """How many records this run may still claim (`Trigger.AvailableNow`); None: any number."""

    @cached_property
    def _gateways(self) -> Gateways:
        return self._options.connection.connect()

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's
        """The offset at which a query without a checkpoint begins, before its first batch."""
        return self._offset(0, self._gateways.get(self._path)["log_created_at"], {})

    def _offset(self, number: int, created_at: str, claims: Claims) -> Offset:
        packed = [[token, each.packed()] for token, each in claims.items()]
        return {self._log: {"0": number, CREATED: created_at, CLAIMS: packed}}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's
        """Limit this run to the number of records that the queue has now."""
        self._left = int(self._gateways.get(self._path)["depth"])

    def latestOffset(  # noqa: N802 - Spark's
        self,
        start: Offset,
        limit: ReadLimit,  # noqa: ARG002 - the options have it
    ) -> Offset:
        """Acknowledge the batch that ends at `start`, which Spark has committed, and claim another
        batch. Returns `start` if there are no records. Raises: DataLoss.
        """
        batch, place = self._batch, start[self._log]
        if batch is not None and batch.number > place["0"]:
            return batch.offset  # Spark has not begun the batch yet
        if place["0"] > self._acknowledged:
            self._acknowledge(place)
        return self._claim(place) or start

    def _acknowledge(self, place: Mapping[str, Any]) -> None:
        held = self._claims.release()
        is_own = self._batch is not None and self._batch.number == place["0"]
        ended = _settle(self._gateways, self._path, "ack", held if is_own else _claims_of(place))
        what = "the query has processed these records, and another worker gets them too"
        self._claims.report(Offsets.union(ended.values()), what)
        self._acknowledged = place["0"]

    def _claim(self, place: Mapping[str, Any]) -> Offset | None:
        """Claim the batch after the batch at `place`."""
        created_at = self._gateways.get(self._path)["log_created_at"]
        if created_at != place[CREATED] and self._options.fails_on_loss:
            raise DataLoss(
                f"the log {self._log} was deleted and created again, and so was its queue: "
                "set failOnDataLoss=false to read the new queue"
            )
        claims, lease_ms = self._take()
        if not claims:
            return None
        number = place["0"] + 1
        return self._begin(self._offset(number, created_at, claims), claims, lease_ms)

    def _take(self) -> tuple[Claims, int]:
        """Claim the records of one batch. Returns the claims, and the lease in milliseconds."""
        missing = self._options.rows_per_trigger_max or _ROWS
        missing = missing if self._left is None else min(missing, self._left)
        claims: dict[int, Offsets] = {}
        lease_ms, begun_s = 0, time.monotonic()
        while missing > 0 and len(claims) < _CLAIMS_MAX:
            if claims and time.monotonic() - begun_s > lease_ms / 3000:
                break  # the first claim needs an extension soon
            wait_ms = 0 if claims or self._left is not None else _WAIT_MS
            wanted = {"max": min(missing, _ROWS), "wait_ms": wait_ms}
            path = f"{self._path}/claim"
            found = self._gateways.post(path, wanted, {"max_bytes": _CLAIM_BYTES})
            if not found["records"]:
                break
            token, lease_ms = int(found["records"][0]["claim"]), int(found["lease_ms"])
            claims[token] = Offsets.of(int(one["offset"]) for one in found["records"])
            missing -= len(claims[token])
        if self._left is not None:
            self._left -= sum(map(len, claims.values()))
        return claims, lease_ms

    def _begin(self, offset: Offset, claims: Claims, lease_ms: int) -> Offset:
        """Keep the claims of a batch extended, and return the batch's offset."""
        number = offset[self._log]["0"]
        self._batch = _Batch(offset, number, Offsets.union(claims.values()))
        self._claims.hold(claims, lease_ms)
        return offset

    def _repeat(self, offset: Offset) -> None:
        """Begin a batch that an earlier run of the query has claimed."""
        claims = _claims_of(offset[self._log])
        ended = _settle(self._gateways, self._path, "extend", claims)
        kept = {token: each - ended.get(token, NONE) for token, each in claims.items()}
        self._begin(offset, kept, int(self._gateways.get(self._path)["lease_ms"]))
        what = "the repeated batch does not have these records, but another worker may"
        self._claims.report(Offsets.union(ended.values()), what)

    def partitions(self, start: Offset, end: Offset) -> list[TaskRange]:
        """The ranges of one batch's tasks. A restarted query extends the batch's claims first."""
        place = end[self._log]
        if place["0"] == start[self._log]["0"]:
            return []
        if self._batch is None or self._batch.number != place["0"]:
            self._repeat(end)
        records = NONE if self._batch is None else self._batch.records
        most = -(-len(records) // self._options.partitions_min)
        most = min(max(most, 1), self._options.rows_per_partition_max)
        return [
            TaskRange(self._log, -1, part[0], part[-1] + 1, True, place[CREATED], Offsets.of(part))
            for part in _parts(records, most)
        ]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Read the rows of a range as Arrow batches. Spark calls this method in a task."""
        return read_range(self._options, partition)

    def reportLatestOffset(self) -> dict[str, dict[str, Any]]:  # noqa: N802 - Spark's
        """For Spark's progress report: how many records of the queue are not done, and how many
        records of this run another worker may have got.
        """
        number = 0 if self._batch is None else self._batch.number
        depth = self._gateways.get(self._path)["depth"]
        return {self._log: {"0": number, LAG: depth, ENDED: self._claims.ended}}

    def stop(self) -> None:
        """End the extensions. A batch that was not acknowledged is repeated by the next run."""
        self._claims.close()
        if "_gateways" in self.__dict__:
            self._gateways.close()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle only the options, because tasks need nothing else."""
        return {"_options": self._options}


def _claims_of(place: Mapping[str, Any]) -> dict[int, Offsets]:
    return {int(token): Offsets.unpacked(packed) for token, packed in place[CLAIMS]}


def _parts(records: Offsets, most: int) -> Iterator[list[int]]:
    """Cut records into parts of at most `most` records, without large gaps between them."""
    part: list[int] = []
    for offset in records:
        if part and (len(part) == most or offset - part[-1] > _GAP_MAX):
            yield part
            part = []
        part.append(offset)
    if part:
        yield part
