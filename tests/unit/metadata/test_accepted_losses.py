"""No ledger ends by an older row than bookies hold copies of, in whatever order an operator acts (rule 18d).

The bookies run in this process.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from loadtest.ports import free_ports
from loadtest.stores import Stores
from quorumlog.errors import CopyLost, MetadataUnavailable, NoSuchLedger
from quorumlog.net.metadata_requests import new_attempt
from quorumlog.protocol import changes
from quorumlog.protocol.messages import CasStatus, Status
from quorumlog.protocol.metadata import Fragment, LedgerMetadata, State
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.rebuild import Bookies as Registered
from quorumlog.wire.bodies import document_of, witness_of
from services.metadata import attempts, inquiry, ledgers, logs, losses
from services.metadata.inquiry import Source, SourceAway
from services.metadata.ledgers import body_of
from services.metadata.rebuild import Rebuilder, _Work
from tests.mutation.mutants.guards import answers
from tests.mutation.mutants.hunt import Guard, Patch, applied, stand_in
from tests.support.database import connected
from tests.unit.metadata import test_ledgers, test_logs
from tests.unit.metadata.support import Service, played, serving, swapped
from tests.unit.metadata.test_rebuild import (
    NAMES,
    Bookies,
    create,
    forget,
    keep,
    rebuild,
    until_all_ready,
)

NARROW = {"quorum": Quorum(2, 2, 2), "fragments": (Fragment(0, ("b1@1", "b2@1")),)}
MOVED = ("b3@1", "b1@1")
LOCK = 0x71756F73


def bookies_in(folder: Path) -> Bookies:
    return Bookies(folder, list(free_ports(len(NAMES))))


async def moved(service: Service, row: LedgerMetadata) -> LedgerMetadata:
    """The row after an ensemble change."""
    return await swapped(service.client, row.with_ensemble(3, MOVED))


async def put(connection: Any, row: LedgerMetadata) -> str:
    """The database has this row; the attempt of the one that it had."""
    was: str = await connection.fetchval(
        "SELECT attempt::text FROM ledgers WHERE ledger_id = $1", row.ledger_id
    )
    await connection.execute(
        "UPDATE ledgers SET version = $2, attempt = $3, body = $4::text::jsonb WHERE ledger_id = $1",
        row.ledger_id,
        row.version,
        row.attempt,
        body_of(connection, row, row.ledger_id),
    )
    return was


async def go_back(stores: Stores, service: Service, row: LedgerMetadata) -> list[str]:
    """The database has this row, and not what came of it; a witness of what it lacks."""
    async with connected(stores) as connection:
        lost = await put(connection, row)
        await connection.execute("DELETE FROM attempts WHERE attempt = $1", lost)
    return [witness_of(await service.client.cluster_id(), lost)]


async def fork(stores: Stores, row: LedgerMetadata) -> None:
    """A service that did not know has changed the row in the database's line of history."""
    async with connected(stores) as connection:
        await put(connection, row)
        await connection.execute("INSERT INTO attempts VALUES ($1, 'ledger')", row.attempt)


async def accept(
    service: Service,
    witnesses: Sequence[str] = (),
    *,
    lost: Sequence[str] = (),
    ledgers: Sequence[int] = (),
) -> tuple[int, Any]:
    body = {"witnesses": witnesses, "lost": lost, "ledgers": ledgers}
    return await service.send("POST", "/v1/witnesses/accept", body)


async def recover(
    service: Service, row: LedgerMetadata, attempt: str | None = None
) -> tuple[int, Any]:
    """Begin a recovery by this row: one try."""
    change = {
        "row": document_of(row.in_recovery()),
        "attempt": attempt or new_attempt(),
    }
    return await service.send("PUT", f"/v1/ledgers/{row.ledger_id}", change)


async def test_a_rebuild_comes_before_the_accepted_loss(stores: Stores, folder: Path) -> None:
    """D3: the row of which bookies hold a copy is written before the loss is accepted."""
    places = bookies_in(folder)
    async with serving(stores) as service, places.running(service) as running:
        await until_all_ready(running)
        old = await create(service, **NARROW)
        newest = await moved(service, old)
        await keep(running["b3"], old, newest)
        witnesses = await go_back(stores, service, old)

        status, problem = await accept(service, witnesses)
        assert (status, problem.get("code"), problem.get("ledgers")) == (409, "copy-lost", 1)
        assert "first run `quorumlog metadata rebuild`" in problem["detail"]
        await rebuild(service)
        assert (await accept(service, witnesses))[0] == 200
        assert await service.client.get(old.ledger_id) == newest
        # All bookies are asked, and what they hold is contained.
        assert (await recover(service, newest))[0] == 200
        _, audit = await service.send("GET", "/v1/audit")
        operations = [row["operation"] for row in audit["audit"]]
        assert [name for name in operations if name != "put_cookie"] == ["rebuild", "accept_lost"]


async def test_no_loss_is_accepted_while_a_bookie_does_not_tell_its_rows(
    stores: Stores, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers other questions, so that it does not count as silent."""
    places = bookies_in(folder)
    async with serving(stores) as service, places.running(service) as running:
        await until_all_ready(running)
        old = await create(service, **NARROW)
        await keep(running["b3"], old, await moved(service, old))
        witnesses = await go_back(stores, service, old)
        reported = inquiry._page

        async def refused(session: Any, url: str, name: str, **which: int) -> Any:
            page = await reported(session, url, name, **which)
            if page.bookie == "b3@1":
                raise SourceAway("403 forbidden")
            return page

        with monkeypatch.context() as patch:
            patch.setattr(inquiry, "_page", refused)
            status, problem = await accept(service, witnesses)
            assert (status, problem.get("code")) == (503, "source-away")
            assert "b3" in problem["detail"]
        assert (await accept(service, witnesses))[1].get("code") == "copy-lost"


async def test_no_loss_is_accepted_before_tombstones_are_back(stores: Stores, folder: Path) -> None:
    """The id could be given to another ledger, which a later rebuild would take for the deleted one."""
    places = bookies_in(folder)
    async with serving(stores) as service, places.running(service) as running:
        await until_all_ready(running)
        chosen = 77  # the database assigned it in the lost history
        forget(running["b1"], chosen)
        witnesses = [witness_of(await service.client.cluster_id(), new_attempt())]

        status, problem = await accept(service, witnesses)
        assert (status, problem.get("code"), problem.get("ledgers")) == (409, "copy-lost", 1)
        await rebuild(service)
        assert (await accept(service, witnesses))[0] == 200

        with pytest.raises(NoSuchLedger) as missing:
            await service.client.get(chosen)
        assert missing.value.members["deleted"] is True


async def test_no_ledger_ends_by_a_row_older_than_a_copy(stores: Stores, folder: Path) -> None:
    """A copy comes after the acceptance: its writer had the row, and had appended nothing."""
    places = bookies_in(folder)
    async with serving(stores) as service, places.running(service) as running:
        await until_all_ready(running)
        old = await create(service, **NARROW)
        newest = await moved(service, old)
        witnesses = await go_back(stores, service, old)
        assert (await accept(service, witnesses))[0] == 200
        await keep(running["b3"], old, newest)

        status, problem = await recover(service, old)
        assert (status, problem.get("code"), problem.get("bookie")) == (409, "copy-lost", "b3")
        with pytest.raises(CopyLost):
            await service.client.cas(old.closed(last_entry=2, length=3))
        _, kept = await service.send("GET", "/v1/kept-ledgers")
        assert [ledger["holders"] for ledger in kept["ledgers"]] == [["b3"]]

        await rebuild(service)
        assert (await recover(service, newest))[0] == 200


async def test_bookies_are_fenced_before_copies_are_read(stores: Stores, folder: Path) -> None:
    """A bookie that only a lost row names would take adds by it, while its copies are being read."""
    places = bookies_in(folder)
    async with serving(stores) as service, places.running(service) as running:
        await until_all_ready(running)
        row = await create(service, **NARROW)
        witnesses = await go_back(
            stores, service, await moved(service, await create(service, **NARROW))
        )
        assert (await accept(service, witnesses))[0] == 200

        assert (await recover(service, row))[0] == 200

        for url in places.urls:
            async with service.session.get(f"{url}/v1/ledgers/{row.ledger_id}") as answer:
                assert (await answer.json()).get("fenced")


async def test_an_end_waits_for_bookies_that_may_know_more(stores: Stores, folder: Path) -> None:
    """As many as confirm an entry may hold a later row, unless an operator says that they never return."""
    places = bookies_in(folder)
    async with serving(stores) as service:
        async with places.running(service) as running:
            await until_all_ready(running)
            row = await create(service)
            other = await swapped(
                service.client, (await create(service)).with_ensemble(3, (*MOVED, "b2@1"))
            )
            witnesses = await go_back(
                stores, service, replace(other, version=1, attempt=new_attempt())
            )
            assert (await accept(service, witnesses))[0] == 200
        async with places.running(service, ("b1",)) as running:
            await until_all_ready(running)
            status, problem = await recover(service, row)
            assert (status, problem.get("code")) == (503, "not-enough-bookies")
            assert "b2, b3" in problem["detail"]
            assert (await accept(service, lost=["b3"]))[0] == 200

            assert (await recover(service, row))[0] == 200


async def test_an_operator_ends_a_ledger_of_two_histories(stores: Stores, folder: Path) -> None:
    """A rebuild writes neither line, and the loss of everything else is accepted nevertheless."""
    places = bookies_in(folder)
    async with serving(stores) as service, places.running(service) as running:
        await until_all_ready(running)
        old, another = await create(service, **NARROW), await create(service, **NARROW)
        lost = await moved(service, old)
        await keep(running["b3"], old, lost)
        witnesses = await go_back(stores, service, old)
        forked = replace(
            old, version=2, attempt=new_attempt(), fragments=(Fragment(0, ("b2@1", "b1@1")),)
        )
        await fork(stores, forked)
        report, _ = await rebuild(service)
        assert report is not None
        assert report.ledgers == {"conflict": 1}

        assert (await accept(service, witnesses))[0] == 200
        assert (await recover(service, another))[0] == 200
        assert (await recover(service, forked))[0] == 409
        assert (await accept(service, ledgers=[another.ledger_id]))[0] == 422
        assert (await accept(service, ledgers=[old.ledger_id]))[0] == 200

        row = await service.client.get(old.ledger_id)
        assert (row.version, row.state, row.may_lack_entries) == (3, State.OPEN, True)
        assert (await service.client.cas(row.in_recovery()))[0] is CasStatus.OK


async def test_a_rebuild_that_was_cut_off_accepts_nothing(stores: Stores, folder: Path) -> None:
    """A rebuild that was to take over ends before it wrote all rows."""
    places = bookies_in(folder)
    async with serving(stores) as service, places.running(service) as running:
        await until_all_ready(running)
        old = await create(service, **NARROW)
        newest = await moved(service, old)
        await keep(running["b3"], old, newest)
        witnesses = await go_back(stores, service, old)

        async def cut(_work: _Work) -> None:
            raise MetadataUnavailable

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_Work, "_decide_ledgers", lambda work, *_given: cut(work))
            assert (await rebuild(service, take_over=True))[0] is None

        async with connected(stores) as connection:
            accepted = await connection.fetchval("SELECT loss_accepted_at FROM cluster")
        assert accepted is None
        assert (await accept(service, witnesses))[0] == 409


async def test_a_change_whose_loss_was_accepted_is_made_when_repeated(stores: Stores) -> None:
    """Rule 6: whoever has not heard what came of a change asks with the same token, and is not refused for ever."""
    async with serving(stores) as service:
        row, attempt = await create(service), new_attempt()
        lost = witness_of(await service.client.cluster_id(), attempt)
        assert (await accept(service, [lost], lost=NAMES))[0] == 200

        done = await recover(service, row, attempt)
        again = await recover(service, row, attempt)

        assert (done[0], again) == (200, done)
        assert (await service.client.get(row.ledger_id)).attempt == attempt


async def test_nothing_is_accepted_beside_another_run(service: Service, stores: Stores) -> None:
    witness = witness_of(await service.client.cluster_id(), new_attempt())
    async with connected(stores) as connection:
        await connection.execute("SELECT pg_advisory_lock($1)", LOCK)

        refused = await accept(service, [witness])

    assert refused[0] == 422
    assert "another rebuild or acceptance" in refused[1]["detail"]
    assert (await accept(service, [witness]))[0] == 200
    assert (await accept(service))[0] == 422


# --- guards that are taken out one by one: a claim above must fail -------------------------------


@stand_in
async def accepts_first(original: Any, self: _Work, sources: Sequence[Source]) -> Any:
    """The loss is accepted before the rows are written."""
    cluster_id = await original(self, sources)
    await self._tables.accept_lost(cluster_id, (), ())
    return cluster_id


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
    Patch(changes, "is_made_from", by_version).guard(
        "a change of a ledger may be of another line of history",
        "rule 18d",
        test_ledgers.test_a_change_of_another_history_conflicts_by_any_version,
    ),
    Patch(changes, "is_made_from", by_version).guard(
        "a change of a log may be of another line of history",
        "rule 18d",
        test_logs.test_a_change_of_a_log_in_another_history_conflicts,
    ),
    Patch(changes, "is_row", of_version).guard(
        "a deletion of a ledger may be of another line of history",
        "rule 18d",
        test_ledgers.test_a_deletion_by_a_row_of_another_history_conflicts,
    ),
    Patch(logs, "check_deleted", checked_by_version).guard(
        "a deletion of a log may be of another line of history",
        "rule 18d",
        test_logs.test_a_deletion_by_a_row_of_another_history_is_refused,
    ),
    Patch(attempts, "ACCEPTED", lambda _original: "a target of no change").guard(
        "a change whose loss was accepted is never made",
        "rule 18d",
        test_a_change_whose_loss_was_accepted_is_made_when_repeated,
    ),
    Patch(Rebuilder, "count_behind", answers(0)).guard(
        "an acceptance looks for no later rows",
        "rule 18d",
        test_a_rebuild_comes_before_the_accepted_loss,
    ),
    Patch(ledgers, "check_end", answers(None)).guard(
        "a ledger ends without a question to the bookies",
        "rule 18d",
        test_no_ledger_ends_by_a_row_older_than_a_copy,
    ),
    Patch(losses, "_UNPROVEN", lambda _original: "SELECT 1").guard(
        "an acceptance forgets which ledgers were open",
        "rule 18d",
        test_no_ledger_ends_by_a_row_older_than_a_copy,
    ),
    Patch(inquiry, "_fence", answers(Status.OK)).guard(
        "bookies tell their copies and go on taking adds",
        "rule 18d",
        test_bookies_are_fenced_before_copies_are_read,
    ),
    Patch(Registered, "lost_of", lambda _original: lambda _bookies, _row: 0).guard(
        "a ledger ends whoever is silent",
        "rule 18d",
        test_an_end_waits_for_bookies_that_may_know_more,
    ),
    Patch(_Work, "_cluster", accepts_first).guard(
        "a rebuild accepts the loss before it writes",
        "rule 18d",
        test_a_rebuild_that_was_cut_off_accepts_nothing,
    ),
)


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
async def test_a_guard_that_is_taken_out_is_missed(
    guard: Guard, stores: Stores, folder: Path
) -> None:
    with applied(guard), pytest.raises((AssertionError, pytest.fail.Exception)):
        await played(guard.claim, stores, folder)
