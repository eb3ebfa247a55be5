"""Publishes a query's progress as committed offsets of a consumer (docs/guides/consumers.md).

The query itself relies only on its checkpoint. Committed offsets are for processes that monitor the
consumer or continue in the query's place. So a failure to publish fails no batch: it is reported on
standard error and in the query's progress, and retried.

Invariants:
- a committed offset only rises, by compare-and-swap, to offsets that Spark has committed;
- if another process changes a committed offset after this query moved it, the query leaves the offset alone until the query restarts. Otherwise the query could overtake a worker that took over.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from quorumlog import errors
from quorumlog.spark.http import Gateways
from quorumlog.spark.options import ClusterAccess

log = logging.getLogger(__name__)

PUBLISHED: Final = "published"
"""Key in the offset that a query's progress shows: the offset that this run has published."""
REFUSED: Final = "unpublished"
"""Key in the offset that a query's progress shows: the error code of the last failed publication."""

_DEADLINE_S: Final = 10.0
"""Deadline of a request with its retries, for which a batch waits; chosen by judgement."""
_RETRY_S: Final = 5.0
"""Pause before a failed publication is retried; chosen by judgement."""


@dataclass(slots=True)
class _LogProgress:
    """This run's view of the consumer's committed offset in one log."""

    wanted: int
    done: int | None = None
    """A lower bound of the committed offset when this run last saw it."""
    version: int | None = None
    """The committed offset's version after this run moved it; None if this run has not moved it yet."""
    unsure: int | None = None
    """An offset that this run sent without receiving the response."""
    refusal: str | None = None
    is_over: bool = False
    retry_at_s: float = float("-inf")

    def is_due(self, now_s: float) -> bool:
        """Whether this run should move the committed offset now."""
        is_behind = self.done is None or self.done < self.wanted
        return is_behind and not self.is_over and now_s >= self.retry_at_s


class ProgressPublisher:
    """Moves a consumer's committed offsets in the logs that a query reads. Runs on the driver."""

    def __init__(self, access: ClusterAccess, consumer: str) -> None:
        """`consumer`: the consumer's name, which is the same in each log."""
        self._access, self._consumer = access, consumer
        self._logs: dict[str, _LogProgress] = {}
        self.begun: Mapping[str, int] = {}
        """The offsets at which a query without a checkpoint begins."""
        self._away_until_s = float("-inf")

    @cached_property
    def _gateways(self) -> Gateways:
        return self._access.connect(deadline_s=_DEADLINE_S)

    def publish(self, committed: Mapping[str, int]) -> None:
        """Publish the offsets that Spark has committed, and retry failed publications."""
        for name, offset in committed.items():
            known = self._logs.setdefault(name, _LogProgress(offset))
            if offset < known.wanted:
                # Another log has this name now, and the query reads it (failOnDataLoss=false).
                known.done = known.version = known.unsure = None
            known.wanted = offset
        for name, known in self._logs.items():
            now_s = time.monotonic()
            if now_s < self._away_until_s:
                return
            if known.is_due(now_s):
                self._try(name, known)

    def shown(self, name: str) -> dict[str, Any]:
        """The members that the query's progress shows for a log."""
        known = self._logs.get(name)
        if known is None:
            return {}
        found: dict[str, Any] = {} if known.done is None else {PUBLISHED: known.done}
        return found if known.refusal is None else {**found, REFUSED: known.refusal}

    def close(self) -> None:
        """Close the connection."""
        if "_gateways" in self.__dict__:
            self._gateways.close()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle everything but the connection, which stays on the driver."""
        return {name: value for name, value in self.__dict__.items() if name != "_gateways"}

    # --- one log -----------------------------------------------------------------------------------

    def _try(self, name: str, known: _LogProgress) -> None:
        try:
            self._move(name, known)
        except errors.QuorumLogError as error:
            known.retry_at_s = time.monotonic() + _RETRY_S
            if error.retryable:  # a fault of the gateways: other logs would wait as long
                self._away_until_s = known.retry_at_s
            self._refused(name, known, error.code, error.detail)
        else:
            if not known.is_over:
                known.refusal = None

    def _move(self, name: str, known: _LogProgress) -> None:
        path = f"/v1/logs/{name}/consumers/{self._consumer}"
        version = known.version
        if version is None:
            try:
                shown = self._gateways.get(path)
            except errors.NoSuchConsumer:
                self._put(path, known, {"If-None-Match": "*"})
                return
            if shown["state"] == "log-replaced":
                raise errors.LogReplaced("the consumer's offset is of a deleted log: reset it")
            if int(shown["offset"]) >= known.wanted:
                known.done = int(shown["offset"])
                return
            version = int(shown["version"])
            if int(shown["offset"]) < self.begun.get(name, 0) and known.refusal is None:
                log.warning(
                    "quorumlog: consumer %s was at %s of %s, but the query began at %s: the records in between count as processed",
                    self._consumer,
                    shown["offset"],
                    name,
                    self.begun[name],
                )
        try:
            self._put(path, known, {"If-Match": f'"{version}"'})
        except errors.VersionConflict as error:
            current = error.members.get("current") or {}
            at = current.get("offset")
            if at is not None and at == known.unsure:  # this run's own change with a lost response
                known.version, known.done, known.unsure = int(current["version"]), int(at), None
                if known.done < known.wanted:
                    self._move(name, known)
                return
            if known.version is None:
                raise
            known.is_over = True
            detail = (
                f"another process changed the committed offset of {self._consumer} (to {at}; this query had set"
                f" {known.done}): this query publishes no more offsets for this log until it restarts"
            )
            self._refused(name, known, "taken-over", detail)

    def _put(self, path: str, known: _LogProgress, condition: Mapping[str, str]) -> None:
        wanted = known.wanted
        try:
            answer = self._gateways.request(
                "PUT", path, value={"offset": wanted}, headers=condition, is_repeatable=False
            )
        except errors.QuorumLogError as error:
            if error.outcome == errors.UNKNOWN:
                known.unsure = wanted
            raise
        known.version, known.done, known.unsure = int(answer.json()["version"]), wanted, None

    def _refused(self, name: str, known: _LogProgress, code: str, detail: str) -> None:
        if known.refusal != code:
            log.warning(
                "quorumlog: the progress in log %s is not published as consumer %s: %s: %s",
                name,
                self._consumer,
                code,
                detail,
            )
        known.refusal = code
