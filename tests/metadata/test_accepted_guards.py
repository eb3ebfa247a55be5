"""Guards of an accepted loss (rule 18d), each taken out once: a claim of `test_accepted_losses` must miss it."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from loadtest.stores import Stores, scratch
from quorumlog.protocol.messages import Status
from quorumlog.protocol.rebuild import Bookies
from services.metadata import attempts, copies, ledgers, logs, losses
from services.metadata.rebuild import Rebuilder, _Work
from services.metadata.rebuild_sources import Source
from tests.metadata import test_accepted_losses as claims
from tests.metadata import test_ledgers, test_logs
from tests.metadata.support import serving
from tests.mutants.hunt import Guard, Patch, applied, stand_in


def answers(value: Any) -> Callable[[Any], Any]:
    """Whatever it is asked."""

    def made(_original: Any) -> Any:
        async def ask(*_given: object, **_named: object) -> Any:
            return value

        return ask

    return made


@stand_in
async def accepts_first(original: Any, self: _Work, sources: Sequence[Source]) -> Any:
    """The loss is accepted before the rows are written."""
    cluster_id = await original(self, sources)
    await self._tables.accept_lost(cluster_id, (), ())
    return cluster_id


async def names_the_row(stores: Stores, _folder: Path) -> None:
    async with serving(stores) as service:
        claim = test_ledgers.test_a_change_of_another_line_of_history_conflicts_whatever_its_version
        await claim(service)


async def names_the_log(stores: Stores, _folder: Path) -> None:
    async with serving(stores) as service:
        await test_logs.test_a_change_of_a_log_in_another_line_of_history_conflicts_whatever_its_version(
            service
        )


async def deletes_the_row(stores: Stores, _folder: Path) -> None:
    async with serving(stores) as service:
        claim = test_ledgers.test_a_deletion_by_a_row_of_another_line_of_history_conflicts_whatever_its_version
        await claim(service)


async def deletes_the_log(stores: Stores, _folder: Path) -> None:
    async with serving(stores) as service:
        claim = test_logs.test_a_deletion_by_a_row_of_another_line_of_history_leaves_the_log_that_there_is
        await claim(service)


def by_version(_original: Any) -> Any:
    """A compare-and-swap compares versions only."""
    return lambda old, new: old.version == new.version


def of_version(_original: Any) -> Any:
    """A deletion compares versions only."""
    return lambda row, *, version, attempt: row.version == version  # noqa: ARG005


GUARDS: Final = (
    Patch(ledgers, "is_made_from", by_version).guard(
        "a change of a ledger may be of another line of history", "rule 18d", names_the_row
    ),
    Patch(ledgers, "is_made_from", by_version).guard(
        "a change of a log may be of another line of history", "rule 18d", names_the_log
    ),
    Patch(ledgers, "is_row", of_version).guard(
        "a deletion of a ledger may be of another line of history", "rule 18d", deletes_the_row
    ),
    Patch(logs, "is_row", of_version).guard(
        "a deletion of a log may be of another line of history", "rule 18d", deletes_the_log
    ),
    Patch(attempts, "ACCEPTED", lambda _original: "a target of no change").guard(
        "a change whose loss was accepted is never made",
        "rule 18d",
        claims.makes_a_lost_change_once_more,
    ),
    Patch(Rebuilder, "count_behind", answers(0)).guard(
        "an acceptance looks for no later rows", "rule 18d", claims.rebuilds_before_it_accepts
    ),
    Patch(ledgers, "check_end", answers(None)).guard(
        "a ledger ends without a question to the bookies", "rule 18d", claims.ends_by_no_older_row
    ),
    Patch(losses, "_UNPROVEN", lambda _original: "SELECT 1").guard(
        "an acceptance forgets which ledgers were open", "rule 18d", claims.ends_by_no_older_row
    ),
    Patch(copies, "_fence", answers(Status.OK)).guard(
        "bookies tell their copies and go on taking adds", "rule 18d", claims.fences_before_it_reads
    ),
    Patch(Bookies, "lost_of", lambda _original: lambda _bookies, _row: 0).guard(
        "a ledger ends whoever is silent", "rule 18d", claims.waits_for_silent_bookies
    ),
    Patch(_Work, "_cluster", accepts_first).guard(
        "a rebuild accepts the loss before it writes",
        "rule 18d",
        claims.accepts_nothing_when_cut_off,
    ),
)


@pytest.fixture
def folder() -> Iterator[Path]:
    with scratch("ql-accepted-") as path:
        yield path


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
async def test_a_guard_that_is_taken_out_is_missed(
    guard: Guard, stores: Stores, folder: Path
) -> None:
    with applied(guard), pytest.raises((AssertionError, pytest.fail.Exception)):
        await guard.claim(stores, folder)
