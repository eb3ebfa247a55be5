"""Guards of a gateway's forks, each with the test that finds its absence (rule 27a)."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import pytest

from quorumlog.protocol.log import LogMetadata
from services.gateway.logs import values
from services.gateway.logs.offsets import read_head
from services.gateway.logs.reading import LogReader
from services.gateway.logs.store import LogRows
from tests.gateway.streams import test_forks as claims
from tests.gateway.streams.test_streams import Served, served


def all_of_them(_original: Any) -> Any:
    return lambda _self, count: count


def whoever_wrote_it(_original: Any) -> Any:
    """A takeover learns from the last ledger, though it was made for the source."""
    return property(
        lambda log: next((i for i in reversed(log.items) if i.first_offset is not None), None)
    )


def with_the_sources_end(original: Any) -> Any:
    """A reader takes each ledger for the log's own."""

    async def fill_from(self: LogReader, item: Any, page: Any) -> bool:
        page.row = replace(page.row, forked_at=None)
        return bool(await original(self, item, page))

    return fill_from


def by_anybody(_original: Any) -> Any:
    """The last batch of a closed log is that of its last ledger, whoever wrote it."""

    async def last_batch(self: LogReader, row: LogMetadata) -> Any:
        item = row.last_item
        assert item is not None
        last = (await self._engine.get(item.ledger_id)).last_entry
        return await read_head(self._engine, item.ledger_id, last or 0)

    return last_batch


def sealed_anyhow(_original: Any) -> Any:
    """A fork within an open ledger takes what is sealed, and no roll comes first."""
    return lambda _self, _offset: True


@dataclass(frozen=True, slots=True)
class Guard:
    """What is taken out, and the test that then fails."""

    name: str
    owner: Any
    attribute: str
    patch: Callable[[Any], Any]
    claim: Callable[[Served], Awaitable[None]]
    rule: str = "rule 27a"


GUARDS: Final = (
    Guard(
        "a read of a fork goes on where the fork ends in a ledger",
        values.Page,
        "own",
        all_of_them,
        claims.test_a_fork_of_a_batch_ends_within_it_whatever_follows_there,
    ),
    Guard(
        "a takeover of a fork learns from the source's ledger",
        LogMetadata,
        "base",
        whoever_wrote_it,
        claims.test_how_the_source_ended_says_nothing_of_a_fork,
    ),
    Guard(
        "a takeover of a fork learns the source's sequence",
        LogMetadata,
        "base",
        whoever_wrote_it,
        claims.test_a_sequence_of_the_source_is_none_of_the_forks,
    ),
    Guard(
        "a reader of a fork takes the source's end for the fork's",
        LogReader,
        "_fill_from",
        with_the_sources_end,
        claims.test_how_the_source_ended_says_nothing_of_a_fork,
    ),
    Guard(
        "a closed fork knows the source's last producer",
        LogReader,
        "last_batch",
        by_anybody,
        claims.test_a_fork_that_is_closed_with_nothing_of_its_own_knows_no_producer_of_the_source,
    ),
    Guard(
        "a stream is read by a row from before",
        LogRows,
        "known",
        lambda _original: lambda self, name: self._rows.get(name, (None,))[0],
        claims.test_a_reader_of_the_old_row_finds_nothing_of_it_under_a_new_stream,
    ),
    Guard(
        "a fork within an open ledger needs no roll",
        LogMetadata,
        "is_sealed_below",
        sealed_anyhow,
        claims.test_a_fork_within_an_open_ledger_has_what_was_there_and_the_source_goes_on,
    ),
)


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
async def test_a_guard_that_is_taken_out_is_missed(
    guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched = guard.patch(guard.owner.__dict__[guard.attribute])
    monkeypatch.setattr(guard.owner, guard.attribute, patched)

    with pytest.raises(AssertionError):
        async with served() as http:
            await guard.claim(http)
