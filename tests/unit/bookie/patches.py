"""What the storage's mutants put in place of a shipped method: each takes the original."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from quorumlog.protocol.messages import CasStatus
from quorumlog.protocol.ranges import ranges_of
from quorumlog.protocol.record import Run
from quorumlog.protocol.replica import ReadAsked, Replica, RowReported, Verdict
from services.bookie import cookie
from services.bookie.collect import Collector, Disposal, Found
from services.bookie.ledger import StoredLedger
from services.bookie.store import ReadAnswer, Store
from tests.mutation.mutants.hunt import stand_in


def idle_in_checkpoints(_original: Any) -> Any:
    """What a checkpoint is writing counts as known to the index."""

    def is_idle(self: StoredLedger) -> bool:
        return not (self.recent or self.is_dirty or self._waiting)

    return property(is_idle)


@stand_in
def taken_at_once(_original: Any, self: StoredLedger) -> None:
    """What took the place of a copy counts as on disk."""
    self._replaced = []


def gone_at_once(_original: Any) -> Any:
    """What is deleted is so for the index, whatever the disk has."""
    return property(lambda self: self.replica.is_deleted)


def forgetful(_original: Any) -> Any:
    """Remove the file, and leave no word of it."""
    return lambda self, segment: self.path(segment).unlink()


@stand_in
def denying(
    original: Any,
    self: Store,
    ledger_id: int,
    asked: ReadAsked,
    bytes_max: int,
    done: Callable[[ReadAnswer], None],
) -> None:
    """What can't be read is not there."""

    def answered(given: ReadAnswer) -> None:
        found = set(Run(given.run).ids) if given.run is not None else set()
        lacking = [e for e in range(asked.first, asked.last + 1) if e not in found]
        done(replace(given, absent=ranges_of(lacking)))

    original(self, ledger_id, asked, bytes_max, answered)


@stand_in
def trusting_absence(
    original: Any, self: Collector, ledger_id: int, held: Any, found: Found
) -> Disposal:
    """No row is as good as a tombstone."""
    decided: Disposal = original(self, ledger_id, held, found)
    return Disposal.DROP if found[1] is None else decided


@stand_in
def forgetting_first(
    original: Any, self: Collector, ledger_id: int, held: Any, found: Found
) -> Disposal:
    """Copies go whatever the database contains."""
    self._store.forget_copies(ledger_id)
    decided: Disposal = original(self, ledger_id, held, found)
    return decided


def forgiving(original: Any) -> Any:
    """How far the log was counts for nothing."""
    return lambda found: original(replace(found, log_end_reported=0))


@stand_in
def counting_only(original: Any, found: cookie.Situation) -> Any:
    """Starts are counted, and not told apart."""
    remote = found.remote
    nameless = None if remote is None else remote.model_copy(update={"process": ""})
    return original(replace(found, remote=nameless))


def one_for_all(_original: Any) -> Any:
    """All processes of a name write one heartbeat."""
    return lambda self, name, _process: self._key("bookie", name)


class Blind(set[int]):
    """Ledgers that leave, and nobody sees it."""

    def __contains__(self, _item: object) -> bool:
        return False


@stand_in
def unseen_while_added(original: Any, self: Store, *args: Any) -> None:
    """An add does not look whether its ledger is leaving."""
    leaving, self.withheld = self.withheld, Blind()
    try:
        original(self, *args)
    finally:
        self.withheld = leaving


@stand_in
async def unseen_while_compared(original: Any, self: Store, *args: Any) -> None:
    """Nor does one that was compared meanwhile."""
    self.withheld = Blind()
    await original(self, *args)


@stand_in
def graceless(original: Any, self: Collector, *args: Any, **kwargs: Any) -> None:
    """The second look may follow the first at once."""
    original(self, *args, **kwargs | {"grace_s": 0.0})


def idle_in_queues(_original: Any) -> Any:
    """Records that nobody waits for may be forgotten before they are on disk."""

    def is_idle(self: StoredLedger) -> bool:
        is_busy = self.recent or self.is_dirty or self._is_in_checkpoint or self._waiting
        return not is_busy

    return property(is_idle)


@stand_in
def for_any_incarnation(original: Any, self: Replica, asked: RowReported) -> Verdict:
    """A copy for an older incarnation is one for the present one."""
    verdict: Verdict = original(self, replace(asked, member=self.me))
    return verdict


@stand_in
async def naming_no_copies(
    _original: Any, self: Collector, ledger_ids: Iterable[int]
) -> Mapping[int, Disposal]:
    """The metadata service is asked about ledgers, and not about the copies that are held of their metadata."""
    held = {ledger_id: self._store.ledger(ledger_id).row_names for ledger_id in ledger_ids}
    found = await self._rows.read(dict.fromkeys(held, ()))
    unknown = (CasStatus.UNKNOWN, None)
    return {
        ledger_id: self._disposal(ledger_id, names, found.get(ledger_id, unknown))
        for ledger_id, names in held.items()
    }
