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
from services.autorecovery.checker import Checker
from services.autorecovery.worker import Worker
from services.autorecovery.writers import WriterPresence, Writers
from services.bookie.collect import Collector, Disposal, MetadataRows
from services.gateway.engine import ledger_reads
from services.gateway.engine.ends import Ends
from services.gateway.engine.ledger_writes import Creations
from services.gateway.interface import LedgerView
from services.metadata.inquiry import Inquiry
from services.metadata.memory import Memory
from tests.model.explore.scope import Scope
from tests.model.sim.services.plan import (
    draw,
    draw_both_lost,
    draw_losses,
    draw_restores,
)
from tests.mutation.mutants.guards import always, answers, entries_only, forgotten_id, normal_add
from tests.mutation.mutants.hunt import Mutant, Patch, stand_in


@stand_in
def gone_if_unnamed(
    _original: Any, _self: Collector, _ledger_id: int, _held: object, _found: object
) -> Disposal:
    """A ledger that no list names is deleted."""
    return Disposal.DROP


def without_targets(_original: Any) -> Any:
    """The target of a repair is no member."""
    return property(
        lambda self: tuple(
            dict.fromkeys(member for fragment in self.fragments for member in fragment.bookies)
        )
    )


@stand_in
async def read_without_recovery(
    _original: Any, self: Ends, row: LedgerMetadata, _declare_lost: tuple[str, ...]
) -> tuple[LedgerMetadata, int]:
    """Whoever asks for a recovery gets the end as bookies tell it now, and nobody is fenced."""
    last = await ledger_reads.confirmed_by_bookies(row, self._ports.bookies)
    return row.closed(last_entry=-1 if last is None else last, length=0), 0


@stand_in
def adopted(
    original: Any, self: Creations, row: LedgerMetadata, _ledger_key: bytes, peer: str
) -> bool:
    """A gateway writes whatever ledger a create of its own gives it."""
    mine = replace(row, writer=self._handles.writer)
    return cast("bool", original(self, mine, row.ledger_key, peer))


@stand_in
def sure_negative(_original: Any, view: LedgerView, entry_id: int) -> QuorumLogError:
    """What is not found is told to be beyond the end."""
    return NoSuchEntry("not there", ledger_id=view.row.ledger_id, entry_id=entry_id)


@stand_in
def lost_first(_original: Any, self: Tally, entry_id: int) -> bool:
    """Lost members count as negatives at once."""
    return sum(self._negatives(entry_id)) >= self.quorum.negatives_needed


@stand_in
def lost_are_fenced(_original: Any, self: Recovery) -> bool:
    """Lost members count as fenced at once."""
    known = self._fenced | self._lost(self.metadata.last_fragment)
    return self.metadata.quorum.is_covered(positions(known))


@stand_in
def unsaid(original: Any, row: Any, **changes: Any) -> Any:
    """The row of a ledger that may lack entries does not say so."""
    changes.pop("may_lack_entries", None)
    return original(row, **changes)


@stand_in
async def nobody_there(_original: Any, _self: Writers, _writer: Any) -> WriterPresence:
    """Every writer counts as gone."""
    return WriterPresence.GONE


@stand_in
def believed(original: Any, self: Memory, wanted: Any, found: Any, *, holder: str) -> None:
    """A database that lacks what was answered is taken for the right one."""
    with contextlib.suppress(DatabaseWentBack):
        original(self, wanted, found, holder=holder)


def of_its_own(_original: Any) -> Any:
    """A service forgets at once what others told it that the database lacks."""
    return property(lambda self: set(self._held))


@stand_in
async def unproven(
    _original: Any, self: MetadataClient, held: Mapping[int, object], _holder: str
) -> Mapping[int, LedgerProof]:
    """No row is read together with the witnesses."""
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


@stand_in
def told_without_copies(_original: Any, self: RowSpread, down: Container[str]) -> Sequence[str]:
    """Nobody is sent a copy, and nobody waits for one."""
    del down
    self.phase, self.kept = Spreading.OVER, 3
    return ()


@stand_in
def settled_without_others(
    _original: Any, self: RowSpread, candidates: Sequence[str]
) -> Sequence[str]:
    """Where too few members keep an end, nobody else is asked."""
    del candidates
    self.phase = Spreading.OVER
    return ()


SERVICES: Final = (
    Patch(FragmentRepair, "_send", normal_add).mutant(
        "a repair copies entries with normal adds", "X16, BK#4163, I25", draw_services=draw
    ),
    Patch(Collector, "_disposal", gone_if_unnamed).mutant(
        "a bookie drops ledgers that no list of ledgers names",
        "X17, BK#870, I26, rule 18",
        draw_services=draw,
    ),
    Patch(LedgerMetadata, "all_members", without_targets).mutant(
        "a repair's target does not count as a member", "rules 18 and 20, I26", draw_services=draw
    ),
    Patch(Replica, "apply", entries_only).mutant(
        "a bookie drops a ledger's fence together with its entries",
        "rule 16, I13",
        draw_services=draw,
    ),
    Patch(Replica, "apply", forgotten_id).mutant(
        "a bookie forgets the id of a deleted ledger",
        "rule 16a, I13",
        Scope("one entry, deleted and dropped", deletes=True),
        draw_services=draw,
    ),
    Patch(Ends, "_recover", read_without_recovery).mutant(
        "a gateway answers a recovery request without recovering the ledger",
        "X19, pravega#1907",
        draw_services=draw,
    ),
    Patch(Creations, "_adopt", adopted).mutant(
        "a gateway writes a ledger that another process created", "rule 11, I29", draw_services=draw
    ),
    Patch(ledger_reads, "_absent", sure_negative).mutant(
        "a gateway denies an entry that it has only failed to find",
        "rule 5, I6",
        draw_services=draw,
    ),
    Patch(Answers, "is_lost", always(True)).mutant(
        "entries are declared lost although a bookie has them", "rule 31", draw_services=draw
    ),
    Mutant(
        "a recovery counts lost members before the other members have answered",
        "rule 14",
        (Patch(Tally, "_is_absent", lost_first), Patch(Recovery, "_is_covered", lost_are_fenced)),
        draw_services=draw_losses,
    ),
    Patch(recovery, "replace", unsaid).mutant(
        "metadata does not record that a ledger may lack entries", "rule 14", draw_services=draw
    ),
    Patch(Writers, "presence_of", nobody_there).mutant(
        "autorecovery recovers the ledger of a live writer", "rule 21", draw_services=draw
    ),
    Patch(Worker, "_may_stay", always(True)).mutant(
        "autorecovery copies entries to a member that is lost or drained",
        "rule 8",
        draw_services=draw,
    ),
    Patch(RowSpread, "begin", told_without_copies).mutant(
        "a gateway reports a ledger's end before members have the metadata",
        "rule 18b",
        draw_services=draw,
    ),
    Patch(RowSpread, "others", settled_without_others).mutant(
        "no other bookie gets the end that too few members have", "rule 18b", draw_services=draw
    ),
    Patch(checker, "spread", answers(None)).mutant(
        "autorecovery's check sends bookies no copies of metadata", "rule 18b", draw_services=draw
    ),
    Patch(Memory, "compare", believed).mutant(
        "a service trusts a database that went back", "rule 18a", draw_services=draw_restores
    ),
    Patch(Memory, "wanted", of_its_own).mutant(
        "a service forgets lost changes that other services reported",
        "rule 18a",
        draw_services=draw_restores,
    ),
    Mutant(
        "a bookie collects ledgers without presenting its witnesses",
        "rule 18a, I26",
        (Patch(MetadataClient, "proofs", unproven), Patch(MetadataRows, "confirm", answers(None))),
        draw_services=draw_restores,
    ),
    Patch(Memory, "presented", always(())).mutant(
        "the metadata service ignores the witnesses in requests",
        "rule 18a",
        draw_services=draw_restores,
    ),
    Patch(Inquiry, "ask", answers([])).mutant(
        "a starting metadata process asks no bookie for witnesses",
        "rule 18a",
        draw_services=draw_restores,
    ),
    Patch(Replica, "_kept_row", always(())).mutant(
        "a bookie acknowledges an add without a copy of the metadata",
        "rule 18b",
        draw_services=draw_restores,
    ),
    Patch(Checker, "_queue_placed", answers(None)).mutant(
        "autorecovery does not queue a repair that lacks its last step",
        "rule 20b",
        draw_services=draw_restores,
    ),
    Mutant(
        "a bookie returns as the same member after losing disk and database",
        "rule 15b, X18",
        (
            Patch(rebuild, "stand_ins", always({})),
            Patch(changes, "check_new_incarnation", always(None)),
        ),
        draw_services=draw_both_lost,
    ),
)
