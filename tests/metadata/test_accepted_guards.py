"""Guards of an accepted loss (rule 18d), each taken out once: a claim of `test_accepted_losses` must miss it."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from loadtest.stores import Stores, scratch
from quorumlog.protocol.messages import Status
from quorumlog.protocol.rebuild import Bookies
from services.metadata import attempts, inquiry, ledgers, logs, losses
from services.metadata.rebuild import Rebuilder, _Work
from services.metadata.rebuild_sources import Source
from tests.metadata import test_accepted_losses as claims
from tests.metadata import test_ledgers, test_logs
from tests.metadata.support import serving


@dataclass(frozen=True, slots=True)
class Guard:
    """What stands in for a guard, and the claim that then fails."""

    name: str
    owner: Any
    attribute: str
    instead: Callable[[Any], Any]
    claim: Callable[[Stores, Path], Awaitable[None]]


def answers(value: Any) -> Callable[[Any], Any]:
    """Whatever it is asked."""

    def made(_original: Any) -> Any:
        async def ask(*_given: object, **_named: object) -> Any:
            return value

        return ask

    return made


def accepts_first(original: Any) -> Any:
    """The loss is accepted before the rows are written."""

    async def cluster(self: _Work, sources: Sequence[Source]) -> Any:
        cluster_id = await original(self, sources)
        await self._tables.accept_lost(cluster_id, (), ())
        return cluster_id

    return cluster


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


def checked_by_version(_original: Any) -> Any:
    """A deletion of a log compares versions only."""

    def check(current: Any, request: Any) -> None:
        if current.version != request.version:
            raise ledgers._conflict(current)

    return check


GUARDS: Final = (
    Guard(
        "a change of a ledger may be of another line of history",
        ledgers,
        "is_made_from",
        by_version,
        names_the_row,
    ),
    Guard(
        "a change of a log may be of another line of history",
        ledgers,
        "is_made_from",
        by_version,
        names_the_log,
    ),
    Guard(
        "a deletion of a ledger may be of another line of history",
        ledgers,
        "is_row",
        of_version,
        deletes_the_row,
    ),
    Guard(
        "a deletion of a log may be of another line of history",
        logs,
        "check_deleted",
        checked_by_version,
        deletes_the_log,
    ),
    Guard(
        "a change whose loss was accepted is never made",
        attempts,
        "ACCEPTED",
        lambda _original: "a target of no change",
        claims.makes_a_lost_change_once_more,
    ),
    Guard(
        "an acceptance looks for no later rows",
        Rebuilder,
        "count_behind",
        answers(0),
        claims.rebuilds_before_it_accepts,
    ),
    Guard(
        "a ledger ends without a question to the bookies",
        ledgers,
        "check_end",
        answers(None),
        claims.ends_by_no_older_row,
    ),
    Guard(
        "an acceptance forgets which ledgers were open",
        losses,
        "_UNPROVEN",
        lambda _original: "SELECT 1",
        claims.ends_by_no_older_row,
    ),
    Guard(
        "bookies tell their copies and go on taking adds",
        inquiry,
        "_fence",
        answers(Status.OK),
        claims.fences_before_it_reads,
    ),
    Guard(
        "a ledger ends whoever is silent",
        Bookies,
        "lost_of",
        lambda _original: lambda _bookies, _row: 0,
        claims.waits_for_silent_bookies,
    ),
    Guard(
        "a rebuild accepts the loss before it writes",
        _Work,
        "_cluster",
        accepts_first,
        claims.accepts_nothing_when_cut_off,
    ),
)


@pytest.fixture
def folder() -> Iterator[Path]:
    with scratch("ql-accepted-") as path:
        yield path


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
async def test_a_guard_that_is_taken_out_is_missed(
    guard: Guard, stores: Stores, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = getattr(guard.owner, guard.attribute)
    monkeypatch.setattr(guard.owner, guard.attribute, guard.instead(whole))

    with pytest.raises((AssertionError, pytest.fail.Exception)):
        await guard.claim(stores, folder)
