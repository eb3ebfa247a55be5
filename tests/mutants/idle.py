"""Mutants of logs that expire: the guards of ADR 40, which seeds of their simulation must miss."""

from dataclasses import replace
from typing import Any, Final

from quorumlog.protocol.idle import Kept, Told
from quorumlog.protocol.log import LogMetadata
from quorumlog.protocol.log.handover import Handover
from quorumlog.protocol.metadata import Writer
from services.gateway.logs.accesses import Accesses
from tests.logs.idle import Violation, run
from tests.mutants.hunt import Find, Mutant, Patch, applied

IDLE_SEEDS: Final = range(1, 201)
"""Tried against a mutant."""


def by_idle(mutant: Mutant, seeds: range = IDLE_SEEDS) -> Find | None:
    """Seeds of the simulation against a mutant until one shows it."""
    with applied(mutant):
        for count, seed in enumerate(seeds, 1):
            try:
                run(seed)
            except Violation as found:
                return Find("logs that expire", str(found), f"seed {seed}, {count} tried")
    return None


def _without_slack(original: Any) -> Any:
    def lives(self: Kept, term: str, idle_s: int, now_s: float, **more: Any) -> Any:
        # The slack is a quarter of what is given.
        return original(self, term, 0.8 * idle_s, now_s, **more)

    return lives


def _forgiving(original: Any) -> Any:
    def lives(self: Kept, term: str, *args: Any, **more: Any) -> Any:
        self._expired.discard(term)
        return original(self, term, *args, **more)

    return lives


def _of_the_term_before(_original: Any) -> Any:
    def kept_by(self: LogMetadata, keeper: Writer, term: str) -> LogMetadata:
        del term
        assert self.expiry is not None
        return replace(self, expiry=replace(self.expiry, keeper=keeper))

    return kept_by


def _told_for_ever(_original: Any) -> Any:
    def is_due(self: Told, term: str, idle_s: int, now_s: float) -> bool:
        del idle_s, now_s
        return term not in self._told_s

    return is_due


def _asleep_too(original: Any) -> Any:
    async def here(self: Accesses, *args: Any, **more: Any) -> Any:
        self._awake_s = self._loop.time
        return await original(self, *args, **more)

    return here


def _of_any_term(_original: Any) -> Any:
    def is_meant(self: Handover, row: LogMetadata) -> bool:
        return self.created_at in (None, row.created_at)

    return is_meant


def _only_asked(original: Any) -> Any:
    async def verdict(self: Accesses, name: str, expiry: Any, *, is_access: bool) -> Any:
        is_mine = expiry.keeper.id == self._me.id
        return await original(self, name, expiry, is_access=is_access and is_mine)

    return verdict


def _kept_for_ever(_original: Any) -> Any:
    async def sweep(self: Accesses, *args: Any) -> bool:
        del self, args
        return True

    return sweep


def _counted_once(_original: Any) -> Any:
    def wait(self: Accesses, *args: Any) -> None:
        del self, args

    return wait


IDLE_MUTANTS: Final = (
    Patch(Kept, "lives", _without_slack).mutant(
        "a keeper waits no longer than the log may be idle", "ADR 40"
    ),
    Patch(Kept, "lives", _forgiving).mutant(
        "a log that has expired lives again for its keeper", "ADR 40"
    ),
    Patch(LogMetadata, "kept_by", _of_the_term_before).mutant(
        "an appointment has no term of its own", "ADR 40"
    ),
    Patch(Told, "is_due", _told_for_ever).mutant("a keeper is told once", "ADR 40"),
    Patch(Accesses, "here", _asleep_too).mutant(
        "a keeper counts the time in which it stood still", "ADR 40"
    ),
    Patch(Handover, "_is_meant", _of_any_term).mutant(
        "a deletion does not name the keeper's term", "ADR 40"
    ),
    Patch(Accesses, "_verdict", _only_asked).mutant(
        "accesses at other gateways are not told", "ADR 40"
    ),
    Patch(Accesses, "_wait", _counted_once).mutant("a request that lasts is one access", "ADR 40"),
    Patch(Accesses, "sweep", _kept_for_ever).mutant(
        "nobody looks at a log that nobody uses", "ADR 40"
    ),
)
