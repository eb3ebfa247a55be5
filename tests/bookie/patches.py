"""What the storage's mutants put in place of a shipped method: each takes the original."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from quorumlog.protocol.ranges import ranges_of
from quorumlog.protocol.record import Run
from quorumlog.protocol.replica import ReadAsked, Replica, RowTold, Verdict
from services.bookie import cookie
from services.bookie.collect import Collector, Disposal, Found
from services.bookie.ledger import StoredLedger
from services.bookie.registration import Presence, Registration
from services.bookie.space import Space
from services.bookie.store import ReadAnswer, Store
from tests.support.waiting import turns


def nothing(_original: Any) -> Any:
    """Do nothing."""
    return lambda *_args: None


def nothing_later(_original: Any) -> Any:
    """Do nothing, as a coroutine."""

    async def done(*_args: object) -> None:
        await turns()

    return done


def idle_in_checkpoints(_original: Any) -> Any:
    """What a checkpoint is writing counts as known to the index."""

    def is_idle(self: StoredLedger) -> bool:
        return not (self.recent or self.is_dirty or self._waiting)

    return property(is_idle)


def taken_at_once(_original: Any) -> Any:
    """What took the place of a copy counts as on disk."""

    def prune(self: StoredLedger) -> None:
        self._replaced = []

    return prune


def gone_at_once(_original: Any) -> Any:
    """What is deleted is so for the index, whatever the disk has."""
    return property(lambda self: self.replica.is_deleted)


def forgetful(_original: Any) -> Any:
    """Remove the file, and leave no word of it."""
    return lambda self, segment: self.path(segment).unlink()


def denying(original: Any) -> Any:
    """What can't be read is not there."""

    def read(
        self: Store,
        ledger_id: int,
        asked: ReadAsked,
        bytes_max: int,
        done: Callable[[ReadAnswer], None],
    ) -> None:
        def answered(given: ReadAnswer) -> None:
            found = set(Run(given.run).ids) if given.run is not None else set()
            lacking = [e for e in range(asked.first, asked.last + 1) if e not in found]
            done(replace(given, absent=ranges_of(lacking)))

        original(self, ledger_id, asked, bytes_max, answered)

    return read


def trusting_absence(original: Any) -> Any:
    """No row is as good as a tombstone."""

    def disposal(self: Collector, ledger_id: int, held: Any, found: Found) -> Disposal:
        decided: Disposal = original(self, ledger_id, held, found)
        return Disposal.DROP if found[1] is None else decided

    return disposal


def no_copies(_original: Any) -> Any:
    """No copy of a row is held."""
    return lambda _self, _ledger_id: ()


def forgetting_first(original: Any) -> Any:
    """Copies go whatever the database contains."""

    def disposal(self: Collector, ledger_id: int, held: Any, found: Found) -> Disposal:
        self._store.moves.forget_copies(ledger_id)
        decided: Disposal = original(self, ledger_id, held, found)
        return decided

    return disposal


def no_reason(_original: Any) -> Any:
    """A directory is always right."""
    return lambda _found: ""


def never(_original: Any) -> Any:
    """No."""
    return lambda *_args: False


def forgiving(original: Any) -> Any:
    """How far the log was counts for nothing."""
    return lambda found: original(replace(found, log_end_reported=0))


def counting_only(original: Any) -> Any:
    """Starts are counted, and not told apart."""

    def reason(found: cookie.Situation) -> Any:
        remote = found.remote
        nameless = None if remote is None else remote.model_copy(update={"process": ""})
        return original(replace(found, remote=nameless))

    return reason


def never_heard(_original: Any) -> Any:
    """Heartbeats count for nothing."""

    async def is_heard(_self: Registration, _name: str) -> bool:
        return False

    return is_heard


def nobody_there(_original: Any) -> Any:
    """Whoever is registered counts as gone, unasked."""

    async def probe(*_: object) -> Presence:
        return Presence.GONE

    return probe


def one_for_all(_original: Any) -> Any:
    """All processes of a name write one heartbeat."""
    return lambda self, name, _process: self._key("bookie", name)


class Blind(set[int]):
    """Ledgers that leave, and nobody sees it."""

    def __contains__(self, _item: object) -> bool:
        return False


def unseen_while_added(original: Any) -> Any:
    """An add does not look whether its ledger is leaving."""

    def taken(self: Store, *args: Any) -> None:
        leaving, self._withheld = self._withheld, Blind()
        try:
            original(self, *args)
        finally:
            self._withheld = leaving

    return taken


def unseen_while_compared(original: Any) -> Any:
    """Nor does one that was compared meanwhile."""

    async def taken(self: Store, *args: Any) -> None:
        self._withheld = Blind()
        await original(self, *args)

    return taken


def graceless(original: Any) -> Any:
    """The second look may follow the first at once."""

    def made(self: Collector, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs | {"grace_s": 0.0})

    return made


def unnamed(_original: Any) -> Any:
    """What was moved counts as all that there was."""

    async def named(_self: Space, _numbers: list[int]) -> set[int]:
        return set()

    return named


def idle_in_queues(_original: Any) -> Any:
    """Records that nobody waits for may be forgotten before they are on disk."""

    def is_idle(self: StoredLedger) -> bool:
        is_busy = self.recent or self.is_dirty or self._is_in_checkpoint or self._waiting
        return not is_busy

    return property(is_idle)


def for_any_incarnation(original: Any) -> Any:
    """A copy for an older incarnation is one for the present one."""

    def told(self: Replica, asked: RowTold) -> Verdict:
        verdict: Verdict = original(self, replace(asked, member=self.me))
        return verdict

    return told
