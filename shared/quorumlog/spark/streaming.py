"""Streaming reads of logs: offsets in Kafka's form, and the size of batches.

An offset is `{"log":{"0":next,"created_at":…}}`: `next` is exclusive, `created_at` distinguishes
logs of one name. Retention and compaction never change offsets, so a checkpoint stays valid. As in
batch reads, only records up to the LAC are read.
"""

import json
import time
from collections.abc import Container, Iterator, Mapping
from functools import cached_property
from typing import Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from quorumlog.spark import plan
from quorumlog.spark.http import Gateways
from quorumlog.spark.options import BadOption, ReadOptions
from quorumlog.spark.publishing import PUBLISHED, ProgressPublisher
from quorumlog.spark.rows import page_sizes, read_range
from quorumlog.spark.versions import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

LAG: Final = "lag"
"""Key in a query's progress, next to "0": how many records the query is behind."""


def lag(progress: Mapping[str, Any]) -> dict[str, int]:
    """How many records a query is behind in each log, according to the progress from Spark."""
    found: dict[str, int] = {}
    for name, behind in _reported(progress, LAG):
        found[name] = found.get(name, 0) + behind
    return found


def published(progress: Mapping[str, Any]) -> dict[str, int]:
    """The offset that a query had published in each log when the batch began."""
    return dict(_reported(progress, PUBLISHED))


def _reported(progress: Mapping[str, Any], what: str) -> Iterator[tuple[str, int]]:
    """Yield the name of each log, and the number under the key `what` next to the log's offset."""
    for source in progress["sources"]:
        latest = source.get("latestOffset")
        latest = json.loads(latest) if isinstance(latest, str) else latest
        for name, places in (latest or {}).items():
            if isinstance(places, dict) and what in places:
                yield name, int(places[what])


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming read, which lives on the driver during the query; only `read` runs in tasks."""

    def __init__(self, options: Mapping[str, str]) -> None:
        parsed = ReadOptions.of(options)
        if parsed.subject.ledgers:
            raise BadOption("a stream can't read ledgers: read them in a batch")
        if "endingOffsets" in options or "endingTimestamp" in options:
            raise BadOption(
                "a stream has no end: endingOffsets and endingTimestamp are for batches"
            )
        self._options = parsed
        self._target: dict[str, int] | None = None
        self._triggered_at = float("-inf")
        self._end: dict[str, int] = {}
        self._initial: plan.Offset | None = None
        self._latest: plan.Offset | None = None
        name = parsed.published_as
        self._publisher = None if name is None else ProgressPublisher(parsed.connection, name)

    @cached_property
    def _gateways(self) -> Gateways:
        return self._options.connection.connect()

    def initialOffset(self) -> plan.Offset:  # noqa: N802 - Spark's
        """The offset at which a query without a checkpoint begins."""
        options, found, made = self._options, {}, {}
        for name, whole in plan.next_offsets(options, self._gateways, {}).items():
            known, start = plan.beginning(options, self._gateways, whole, "latest")
            if start > known.end:
                if options.fails_on_loss:
                    raise plan.DataLoss(
                        f"the log {name} ends at {known.end}, below the start {start}: set failOnDataLoss=false to begin at the end"
                    )
                start = known.end
            found[name], made[name] = start, known.created_at
        self._initial = _offset(found, made)
        if self._publisher is not None:
            self._publisher.begun = found
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's
        """`maxOffsetsPerTrigger` or `maxBytesPerTrigger`; with both, the batch obeys both."""
        if self._options.rows_per_trigger_max is not None:
            return ReadMaxRows(self._options.rows_per_trigger_max)
        if self._options.bytes_per_trigger_max is not None:
            return ReadMaxBytes(self._options.bytes_per_trigger_max)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's
        """Limit this run to the records that are confirmed now."""
        found = plan.next_offsets(self._options, self._gateways, {})
        self._target = {name: whole.end for name, whole in found.items()}

    def latestOffset(  # noqa: N802 - Spark's
        self, start: plan.Offset | None = None, limit: ReadLimit | None = None
    ) -> plan.Offset:
        """The end of the next batch. PySpark before 4.2 passes no arguments, and so no limit."""
        if start is None:
            start = self._latest or self._initial or {}
        self._latest = self._next(start, limit)
        self._end = _plain(self._latest)
        return self._latest

    def _next(self, start: plan.Offset, limit: ReadLimit | None) -> plan.Offset:
        known = _plain(start)
        found = plan.next_offsets(self._options, self._gateways, known)
        made = {name: place[plan.CREATED] for name, place in start.items()}
        made |= {name: whole.created_at for name, whole in found.items()}
        others = {
            name: whole.first
            for name, whole in found.items()
            if name in start and plan.is_other(whole, start[name])
        }
        self._publish(start, others)
        for name in others if self._options.fails_on_loss else ():
            raise plan.DataLoss(plan.replaced(found[name], start[name]))
        if others:
            # This batch is empty; the next batch starts at the beginning of the new logs.
            return _offset({**known, **others}, made)
        ends = {name: self._end_of(whole) for name, whole in found.items()}
        # A log that is new to the query is read from its beginning.
        starts = {name: known.get(name, whole.first) for name, whole in found.items()}
        left = {name: max(0, ends[name] - starts[name]) for name in found}
        if self._waits(sum(left.values())):
            return start
        readable = {name: max(starts[name], found[name].first) for name in found}
        taken = _share(left, self._rows_of(limit, readable, left))
        moved = {
            name: starts[name] + taken[name]
            for name in found
            if name in known or taken[name] or not left[name]
        }
        return _offset({**known, **moved}, made)

    def _publish(self, start: plan.Offset, others: Container[str]) -> None:
        """Publish the start of the next batch, because Spark has committed everything before it. (Spark
        calls `commit` with the batch after the next, so never for a query that has caught up.)

        The query's first offset is not published. `others`: names that now belong to other logs,
        from which the query has read nothing.
        """
        if self._publisher is not None and start != self._initial:
            offsets = _plain(start).items()
            self._publisher.publish({name: at for name, at in offsets if name not in others})

    def _end_of(self, whole: plan.LogExtent) -> int:
        """The offset at which this run stops reading a log."""
        target = whole.end if self._target is None else self._target.get(whole.name, 0)
        return min(whole.end, target)

    def _waits(self, rows: int) -> bool:
        """Whether to wait for more rows (minOffsetsPerTrigger), within maxTriggerDelay."""
        least, now = self._options.rows_per_trigger_min, time.monotonic()
        is_early = now - self._triggered_at < self._options.trigger_delay_s
        if least is not None and self._target is None and rows < least and is_early:
            return True
        if rows:
            self._triggered_at = now
        return False

    def _rows_of(
        self, limit: ReadLimit | None, starts: Mapping[str, int], left: Mapping[str, int]
    ) -> int | None:
        """The maximum number of rows in a batch; None means no limit."""
        rows_max = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        bytes_max = self._options.bytes_per_trigger_max
        if isinstance(limit, ReadMaxBytes):
            bytes_max = limit.max_bytes
        if limit is None or bytes_max is None or isinstance(limit, ReadAllAvailable):
            return rows_max
        rows = total = 0
        for name, count in left.items():
            if count:
                page = page_sizes(self._gateways, name, starts[name], bytes_max)
                rows, total = rows + page[0], total + page[1]
        if not rows:
            return rows_max
        fitting = max(1, bytes_max * rows // max(total, 1))
        return fitting if rows_max is None else min(fitting, rows_max)

    def reportLatestOffset(self) -> dict[str, dict[str, Any]]:  # noqa: N802 - Spark's
        """The ends of the logs, and how far the query is behind, for Spark's progress report."""
        found = plan.next_offsets(self._options, self._gateways, {})
        publisher = self._publisher
        return {
            name: {
                "0": whole.end,
                LAG: max(0, whole.end - self._end.get(name, whole.first)),
                **({} if publisher is None else publisher.shown(name)),
            }
            for name, whole in sorted(found.items())
        }

    def partitions(self, start: plan.Offset, end: plan.Offset) -> list[plan.TaskRange]:
        """The ranges of one batch's tasks; a retried batch gets the same ranges."""
        return plan.stream_plan(self._options, self._gateways, start, end)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Called in a task: the rows of a range as Arrow batches."""
        return read_range(self._options, partition)

    def stop(self) -> None:
        """Close the connection: the query has ended."""
        if "_gateways" in self.__dict__:
            self._gateways.close()
        if self._publisher is not None:
            self._publisher.close()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the options only: the connection stays on the driver."""
        return {name: value for name, value in self.__dict__.items() if name != "_gateways"}


def _plain(offset: plan.Offset) -> dict[str, int]:
    return {name: int(place["0"]) for name, place in offset.items()}


def _offset(plain: Mapping[str, int], made: Mapping[str, str]) -> plan.Offset:
    """An offset, sorted because Spark compares offsets as text. `made`: the creation times."""
    return {name: {"0": at, plan.CREATED: made[name]} for name, at in sorted(plain.items())}


def _share(left: Mapping[str, int], rows: int | None) -> dict[str, int]:
    """How many rows a batch takes from each log: all that is left, or its share of `rows`."""
    total = sum(left.values())
    if rows is None or rows >= total:
        return dict(left)
    taken = {}
    for name, count in left.items():
        # Rounded up, so that a log with few records gets at least one row.
        taken[name] = -(-count * rows // max(total, 1))
        rows, total = rows - taken[name], total - count
    return taken
