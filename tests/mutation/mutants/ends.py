"""Mutants of what others than the writer may say of a ledger (`protocol/ends.py`), which a search must see."""

from collections.abc import Container, Sequence
from typing import Any, Final

from quorumlog.protocol import ends
from quorumlog.protocol.ends import End, LacByCoverage, RowSpread
from quorumlog.protocol.messages import Status
from quorumlog.protocol.metadata import LedgerMetadata
from tests.model.explore.scopes import END_COPIES, END_STRIPED, LAC
from tests.mutation.mutants.hunt import Patch, stand_in


@stand_in
def _whoever_answers(original: Any, self: RowSpread, member: str, _status: Status) -> None:
    original(self, member, Status.OK)


@stand_in
def _one_copy_less(original: Any, self: RowSpread) -> None:
    original(self)
    self._lacking -= 1


@stand_in
def _stripes_forgotten(original: Any, self: RowSpread) -> None:
    original(self)
    self._lacking = self.row.quorum.ack_quorum


@stand_in
def _nobody_else(original: Any, self: RowSpread, _candidates: Sequence[str]) -> Sequence[str]:
    nobody: Sequence[str] = original(self, ())
    return nobody


@stand_in
def _only_who_is_awaited(original: Any, self: RowSpread, down: Container[str]) -> Sequence[str]:
    return [member for member in original(self, down) if member not in down]


@stand_in
def _however_few(
    original: Any, reported: LedgerMetadata, copies: int, found: LedgerMetadata
) -> End:
    kept: End = original(reported, max(copies, found.quorum.ack_quorum), found)
    return kept


@stand_in
def _as_it_was(original: Any, reported: LedgerMetadata, copies: int, _found: LedgerMetadata) -> End:
    same: End = original(reported, copies, reported)
    return same


@stand_in
def _whatever_it_tells(
    original: Any, self: LacByCoverage, position: int, _status: Status, lac: int
) -> None:
    original(self, position, Status.OK, lac)


END_MUTANTS: Final = (
    Patch(RowSpread, "answered", _whoever_answers).mutant(
        "a bookie that refuses a copy of metadata counts as having one", "rule 18b", END_COPIES
    ),
    Patch(RowSpread, "__post_init__", _one_copy_less).mutant(
        "one copy of the metadata fewer is enough for an end", "rule 18b", END_COPIES
    ),
    Patch(RowSpread, "__post_init__", _stripes_forgotten).mutant(
        "Qa copies of the metadata are enough for a striped ledger", "rule 18b", END_STRIPED
    ),
    Patch(RowSpread, "others", _nobody_else).mutant(
        "no other bookie gets an end when members are down", "rule 18b", END_COPIES
    ),
    Patch(RowSpread, "begin", _only_who_is_awaited).mutant(
        "members that seem down are sent no copy of the metadata", "rule 18b", END_COPIES
    ),
    Patch(ends, "end_after", _however_few).mutant(
        "an end counts as kept with too few copies", "rule 18b", END_COPIES
    ),
    Patch(ends, "end_after", _as_it_was).mutant(
        "a gateway reports an end that the database no longer has", "rule 18b", END_COPIES
    ),
    Patch(LacByCoverage, "answered", _whatever_it_tells).mutant(
        "bookies that report no LAC count towards its coverage", "rules 5 and 13", LAC
    ),
)
