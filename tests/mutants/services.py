"""The mutants of whole services: guards outside the machines, and what only several parts show."""

import contextlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

from quorumlog.errors import DatabaseWentBack, NoSuchEntry, QuorumLogError
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.protocol import changes, rebuild, recovery
from quorumlog.protocol.ends import RowSpread, Spreading
from quorumlog.protocol.loss import Answers
from quorumlog.protocol.messages import CasStatus
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.recovery import Recovery
from quorumlog.protocol.repair import FragmentRepair
from quorumlog.protocol.replica import Replica
from quorumlog.protocol.tally import Tally
from quorumlog.protocol.window import positions
from quorumlog.wire.bodies import LedgerProof
from services.autorecovery import checker
from services.autorecovery.auditor import Auditor
from services.autorecovery.checker import Checker
from services.autorecovery.worker import Worker
from services.autorecovery.writers import WriterPresence
from services.bookie.collect import Collector, Disposal, MetadataRows
from services.gateway.engine import ledger_reads
from services.gateway.engine.creations import Creations
from services.gateway.engine.ends import Ends
from services.gateway.interface import LedgerView
from services.metadata.inquiry import Inquiry
from services.metadata.memory import Memory
from tests.explore.scope import Scope
from tests.mutants.guards import always, entries_only, forgotten_id, normal_add
from tests.mutants.hunt import Mutant, Patch
from tests.sim.services.plan import draw_both_lost, draw_losses, draw_restores


def gone_if_unnamed(_original: Any) -> Any:
    """A ledger that no list names is deleted."""

    def disposal(_self: Collector, _ledger_id: int, _held: object, _found: object) -> Disposal:
        return Disposal.DROP

    return disposal


def without_targets(_original: Any) -> Any:
    """The target of a repair is no member."""
    return property(
        lambda self: tuple(
            dict.fromkeys(member for fragment in self.fragments for member in fragment.bookies)
        )
    )


def read_without_recovery(_original: Any) -> Any:
    """Whoever asks for a recovery gets the end as bookies tell it now, and nobody is fenced."""

    async def recover(
        self: Ends, row: LedgerMetadata, _declare_lost: tuple[str, ...]
    ) -> tuple[LedgerMetadata, int]:
        last = await ledger_reads.confirmed_by_bookies(row, self._ports.bookies)
        return row.closed(last_entry=-1 if last is None else last, length=0), 0

    return recover


def adopted(original: Any) -> Any:
    """A gateway writes whatever ledger a create of its own gives it."""

    def adopt(self: Creations, row: LedgerMetadata, _ledger_key: bytes, peer: str) -> bool:
        mine = replace(row, writer=self._handles.writer)
        return cast("bool", original(self, mine, row.ledger_key, peer))

    return adopt


def sure_negative(_original: Any) -> Any:
    """What is not found is told to be beyond the end."""

    def absent(view: LedgerView, entry_id: int) -> QuorumLogError:
        return NoSuchEntry("not there", ledger_id=view.row.ledger_id, entry_id=entry_id)

    return absent


def lost_first(_original: Any) -> Any:
    """Lost members count as negatives at once."""

    def is_absent(self: Tally, entry_id: int) -> bool:
        return sum(self._negatives(entry_id)) >= self.quorum.negatives_needed

    return is_absent


def lost_are_fenced(_original: Any) -> Any:
    """Lost members count as fenced at once."""

    def is_covered(self: Recovery) -> bool:
        known = self._fenced | self._lost(self.metadata.last_fragment)
        return self.metadata.quorum.is_covered(positions(known))

    return is_covered


def unsaid(original: Any) -> Any:
    """The row of a ledger that may lack entries does not say so."""

    def replaced(row: Any, **changes: Any) -> Any:
        changes.pop("may_lack_entries", None)
        return original(row, **changes)

    return replaced


def nobody_there(_original: Any) -> Any:
    """Every writer counts as gone."""

    async def presence_of(_self: Auditor, _writer: Any) -> WriterPresence:
        return WriterPresence.GONE

    return presence_of


def believed(original: Any) -> Any:
    """A database that lacks what was answered is taken for the right one."""

    def compare(self: Memory, wanted: Any, found: Any, *, holder: str) -> None:
        with contextlib.suppress(DatabaseWentBack):
            original(self, wanted, found, holder=holder)

    return compare


def of_its_own(_original: Any) -> Any:
    """A service forgets at once what others told it that the database lacks."""
    return property(lambda self: set(self._held))


def unproven(_original: Any) -> Any:
    """No row is read together with the witnesses."""

    async def proofs(
        self: MetadataClient, held: Mapping[int, object], _holder: str
    ) -> Mapping[int, LedgerProof]:
        found = {}
        for ledger_id in held:
            status, row = await self.read(ledger_id)
            if status is not CasStatus.UNKNOWN:
                found[ledger_id] = LedgerProof(
                    ledger_id=ledger_id,
                    row=None if row is None else row,
                    deleted=row is None,
                    lost=(),
                )
        return found

    return proofs


def nobody_asked(_original: Any) -> Any:
    """A metadata process begins without a question to the bookies."""

    async def ask(_self: Inquiry) -> list[str]:
        return []

    return ask


def not_queued(_original: Any) -> Any:
    """A repair without an item of the queue stays as it is."""

    async def queue(_self: Checker, _row: LedgerMetadata) -> None:
        return

    return queue


def told_without_copies(_original: Any) -> Any:
    """Nobody is sent a copy, and nobody waits for one."""

    def begin(self: RowSpread, down: Container[str]) -> Sequence[str]:
        del down
        self.phase, self.kept = Spreading.OVER, 3
        return ()

    return begin


def settled_without_others(_original: Any) -> Any:
    """Where too few members keep an end, nobody else is asked."""

    def others(self: RowSpread, candidates: Sequence[str]) -> Sequence[str]:
        del candidates
        self.phase = Spreading.OVER
        return ()

    return others


def not_sent(_original: Any) -> Any:
    """What a member lacks it never gets."""

    async def sent(_row: LedgerMetadata, _ports: Any) -> None:
        return

    return sent


def not_asked(_original: Any) -> Any:
    """The collector does not exchange witnesses either."""

    async def confirm(_self: MetadataRows) -> None:
        return

    return confirm


SERVICES: Final = (
    Mutant(
        "copies are made without the recovery flag",
        "X16, BK#4163, I25",
        (Patch(FragmentRepair, "_send", normal_add),),
        is_of_services=True,
    ),
    Mutant(
        "what no list names is collected",
        "X17, BK#870, I26, rule 18",
        (Patch(Collector, "_disposal", gone_if_unnamed),),
        is_of_services=True,
    ),
    Mutant(
        "a repair's target counts as nobody",
        "rules 18 and 20, I26",
        (Patch(LedgerMetadata, "all_members", without_targets),),
        is_of_services=True,
    ),
    Mutant(
        "the fence goes with the copy",
        "rule 16, I13",
        (Patch(Replica, "apply", entries_only),),
        is_of_services=True,
    ),
    Mutant(
        "a deleted ledger's id is forgotten",
        "rule 16a, I13",
        (Patch(Replica, "apply", forgotten_id),),
        Scope("one entry, deleted and dropped", deletes=True),
        is_of_services=True,
    ),
    Mutant(
        "an unrecovered ledger is read as complete",
        "X19, pravega#1907",
        (Patch(Ends, "_recover", read_without_recovery),),
        is_of_services=True,
    ),
    Mutant(
        "a second process writes a ledger",
        "rule 11, I29",
        (Patch(Creations, "_adopt", adopted),),
        is_of_services=True,
    ),
    Mutant(
        "what is not found is denied",
        "rule 5, I6",
        (Patch(ledger_reads, "_absent", sure_negative),),
        is_of_services=True,
    ),
    Mutant(
        "what somebody has is given up",
        "rule 31",
        (Patch(Answers, "is_lost", always(True)),),
        is_of_services=True,
    ),
    Mutant(
        "lost members decide before the others have spoken",
        "rule 14",
        (Patch(Tally, "_is_absent", lost_first), Patch(Recovery, "_is_covered", lost_are_fenced)),
        is_of_services=True,
        draw_services=draw_losses,
    ),
    Mutant(
        "a ledger does not say that it may lack entries",
        "rule 14",
        (Patch(recovery, "replace", unsaid),),
        is_of_services=True,
    ),
    Mutant(
        "a live writer's ledger is recovered",
        "rule 21",
        (Patch(Auditor, "_presence_of", nobody_there),),
        is_of_services=True,
    ),
    Mutant(
        "a member that is away is filled up all the same",
        "rule 8",
        (Patch(Worker, "_may_stay", always(True)),),
        is_of_services=True,
    ),
    Mutant(
        "an end is told before members keep its row",
        "rule 18b",
        (Patch(RowSpread, "begin", told_without_copies),),
        is_of_services=True,
    ),
    Mutant(
        "nobody else keeps an end that too few members keep",
        "rule 18b",
        (Patch(RowSpread, "others", settled_without_others),),
        is_of_services=True,
    ),
    Mutant(
        "the check sends no copies of rows",
        "rule 18b",
        (Patch(checker, "spread", not_sent),),
        is_of_services=True,
    ),
    Mutant(
        "a database that went back is believed",
        "rule 18a",
        (Patch(Memory, "compare", believed),),
        is_of_services=True,
        draw_services=draw_restores,
    ),
    Mutant(
        "a service forgets what others told of the database",
        "rule 18a",
        (Patch(Memory, "wanted", of_its_own),),
        is_of_services=True,
        draw_services=draw_restores,
    ),
    Mutant(
        "the collector presents no witnesses",
        "rule 18a, I26",
        (Patch(MetadataClient, "proofs", unproven), Patch(MetadataRows, "confirm", not_asked)),
        is_of_services=True,
        draw_services=draw_restores,
    ),
    Mutant(
        "what requests present is not looked for",
        "rule 18a",
        (Patch(Memory, "presented", always(())),),
        is_of_services=True,
        draw_services=draw_restores,
    ),
    Mutant(
        "a metadata process that starts asks nobody",
        "rule 18a",
        (Patch(Inquiry, "ask", nobody_asked),),
        is_of_services=True,
        draw_services=draw_restores,
    ),
    Mutant(
        "an add is acknowledged without a copy of its row",
        "rule 18b",
        (Patch(Replica, "_kept_row", always(())),),
        is_of_services=True,
        draw_services=draw_restores,
    ),
    Mutant(
        "nobody queues a repair that lacks its last step",
        "rule 20b",
        (Patch(Checker, "_queue_placed", not_queued),),
        is_of_services=True,
        draw_services=draw_restores,
    ),
    Mutant(
        "a disk that is lost with the database comes back as the same member",
        "rule 15b, X18",
        (
            Patch(rebuild, "stand_ins", always({})),
            Patch(changes, "check_new_incarnation", always(None)),
        ),
        is_of_services=True,
        draw_services=draw_both_lost,
    ),
)
