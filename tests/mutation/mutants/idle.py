"""Mutants of logs that expire: the guards of ADR 40, which seeds of their simulation must miss."""

from dataclasses import replace
from typing import Any, Final

from quorumlog.protocol.idle import Kept, Reported
from quorumlog.protocol.log import LogMetadata
from quorumlog.protocol.log.handover import Handover
from quorumlog.protocol.metadata import Writer
from services.gateway.logs.accesses import Accesses
from tests.model.logs.idle import run
from tests.mutation.mutants.guards import always, answers
from tests.mutation.mutants.hunt import Histories, Patch, stand_in

IDLE: Final = Histories("logs that expire", run, range(1, 201))


@stand_in
def _without_slack(
    original: Any, self: Kept, term: str, idle_s: int, now_s: float, **more: Any
) -> Any:
    # The slack is a quarter of what is given.
    return original(self, term, 0.8 * idle_s, now_s, **more)


@stand_in
def _forgiving(original: Any, self: Kept, term: str, *args: Any, **more: Any) -> Any:
    self._expired.discard(term)
    return original(self, term, *args, **more)


@stand_in
def _of_the_term_before(
    _original: Any, self: LogMetadata, keeper: Writer, term: str
) -> LogMetadata:
    del term
    assert self.expiry is not None
    return replace(self, expiry=replace(self.expiry, keeper=keeper))


@stand_in
def _told_for_ever(_original: Any, self: Reported, term: str, idle_s: int, now_s: float) -> bool:
    del idle_s, now_s
    return term not in self._reported_s


@stand_in
async def _asleep_too(original: Any, self: Accesses, *args: Any, **more: Any) -> Any:
    self._awake_s = self._loop.time
    return await original(self, *args, **more)


@stand_in
def _of_any_term(_original: Any, self: Handover, row: LogMetadata) -> bool:
    return self.created_at in (None, row.created_at)


@stand_in
async def _only_asked(
    original: Any, self: Accesses, name: str, expiry: Any, *, is_access: bool
) -> Any:
    is_mine = expiry.keeper.id == self._me.id
    return await original(self, name, expiry, is_access=is_access and is_mine)


IDLE_MUTANTS: Final = (
    Patch(Kept, "lives", _without_slack).mutant(
        "an expiry keeper waits no longer than a log may be idle", "ADR 40"
    ),
    Patch(Kept, "lives", _forgiving).mutant(
        "an expiry keeper revives a log that it declared expired", "ADR 40"
    ),
    Patch(LogMetadata, "kept_by", _of_the_term_before).mutant(
        "a new expiry keeper gets the previous keeper's term", "ADR 40"
    ),
    Patch(Reported, "is_due", _told_for_ever).mutant(
        "a gateway reports a log's use to its expiry keeper only once", "ADR 40"
    ),
    Patch(Accesses, "here", _asleep_too).mutant(
        "an expiry keeper counts time in which it was not running", "ADR 40"
    ),
    Patch(Handover, "_is_meant", _of_any_term).mutant(
        "the deletion of an expired log ignores the keeper's term", "ADR 40"
    ),
    Patch(Accesses, "_verdict", _only_asked).mutant(
        "gateways do not report accesses to the expiry keeper", "ADR 40"
    ),
    Patch(Accesses, "_wait", always(None)).mutant("a long request counts as one access", "ADR 40"),
    Patch(Accesses, "sweep", answers(True)).mutant(
        "the sweep does not delete logs that have expired", "ADR 40"
    ),
)
