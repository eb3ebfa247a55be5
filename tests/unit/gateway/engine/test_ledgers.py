"""A ledger's life through one gateway and through another."""

import asyncio
from typing import Any

import pytest

from loadtest.stores import Stores
from quorumlog.errors import (
    NOT_DONE,
    UNKNOWN,
    InvalidRequest,
    LedgerClosed,
    LedgerExists,
    MetadataUnavailable,
    NoSuchEntry,
    NoSuchLedger,
    NotEnoughBookies,
    NotYetConfirmed,
    Overloaded,
    OwnedByLog,
    QuorumLogError,
    UnexpectedEntryId,
    WriterLost,
    WrongPassword,
)
from quorumlog.net import directory as directory_module
from quorumlog.net.budget import PEER
from quorumlog.protocol.ids import ASSIGNED_ID_END
from quorumlog.protocol.metadata import DigestKind, LedgerMetadata, State
from quorumlog.wire.bodies import BookieHeartbeat, BookieList
from services.gateway.engine import Engine
from services.gateway.engine import rows as rows_module
from services.gateway.interface import DEGRADED, EntriesAppended
from tests.support.once import once
from tests.support.waiting import until
from tests.unit.gateway.engine.support import World, ledger, payloads, world_of


async def test_acknowledged_entries_are_readable_through_any_gateway(stores: Stores) -> None:
    async with world_of(stores) as world:
        row = await ledger(world.engine)
        for number in range(5):
            await world.engine.appends.append(row.ledger_id, [b"%d" % number])
            wanted = [b"%d" % n for n in range(number + 1)]
            assert await payloads(world.engine, row.ledger_id) == wanted
            assert await payloads(world.other, row.ledger_id) == wanted


async def test_appends_through_any_gateway_get_contiguous_ids(stores: Stores) -> None:
    async with world_of(stores) as world:
        row = await ledger(world.engine)

        done = await asyncio.gather(
            *[
                (world.engine, world.other)[n % 2].appends.append(
                    row.ledger_id, [b"%d" % n] * (1 + n % 3)
                )
                for n in range(60)
            ]
        )

        ids = sorted(i for one in done for i in range(one.first, one.last + 1))
        assert ids == list(range(len(ids)))
        stored = await payloads(world.other, row.ledger_id)
        for n, one in enumerate(done):
            assert stored[one.first : one.last + 1] == [b"%d" % n] * (1 + n % 3)


async def test_a_close_ends_the_ledger_for_everybody(stores: Stores) -> None:
    async with world_of(stores) as world:
        row = await ledger(world.engine, b"one", b"two")

        closed = await world.other.close(row.ledger_id)

        assert (closed.state, closed.last_entry, closed.length) == (State.CLOSED, 1, 6)
        assert await world.engine.close(row.ledger_id) == closed
        assert await world.other.close(row.ledger_id) == closed
        for engine in (world.engine, world.other):
            with pytest.raises(LedgerClosed) as refused:
                await engine.appends.append(row.ledger_id, [b"three"])
            assert refused.value.outcome == NOT_DONE
            page = await engine.reads.read(row.ledger_id, 0)
            assert (page.closed, page.last_entry, page.next) == (True, 1, 2)
            assert page.lac_source == "metadata"
            with pytest.raises(NoSuchEntry):
                await engine.reads.entry(row.ledger_id, 2)


async def test_an_entry_beyond_the_lac_is_not_yet_confirmed(stores: Stores) -> None:
    async with world_of(stores) as world:
        row = await ledger(world.engine, b"one")

        for engine in (world.engine, world.other):
            assert bytes((await engine.reads.entry(row.ledger_id, 0)).runs[0].payload(0)) == b"one"
            with pytest.raises(NotYetConfirmed):
                await engine.reads.entry(row.ledger_id, 1)
            page = await engine.reads.read(row.ledger_id, 1)
            assert (page.runs, page.next, page.closed) == ((), 1, False)


async def test_an_append_that_expects_another_id_writes_nothing(stores: Stores) -> None:
    async with world_of(stores) as world:
        row = await ledger(world.engine)
        assert await world.other.appends.append(row.ledger_id, [b"a"], expect=0) == EntriesAppended(
            0, 0, 0
        )

        for engine in (world.engine, world.other):
            with pytest.raises(UnexpectedEntryId) as refused:
                await engine.appends.append(row.ledger_id, [b"b"], expect=7)
            assert refused.value.members["next_entry_id"] == 1

        assert await payloads(world.other, row.ledger_id) == [b"a"]


async def test_passwords_are_asked_for_everywhere_and_stored_nowhere(stores: Stores) -> None:
    async with world_of(stores) as world:
        row = await ledger(world.engine, password="pässword", digest=DigestKind.HMAC_SHA256)
        plain = repr(row).encode()
        assert b"ssword" not in plain.replace(b"password", b"")
        for engine in (world.engine, world.other):
            for wrong in (None, "other"):
                for refused in (
                    engine.appends.append(row.ledger_id, [b"x"], password=wrong),
                    engine.reads.read(row.ledger_id, 0, password=wrong),
                    engine.close(row.ledger_id, password=wrong),
                    engine.recover(row.ledger_id, password=wrong),
                    engine.delete(row.ledger_id, password=wrong),
                    engine.reads.last_add_confirmed(row.ledger_id, password=wrong),
                ):
                    with pytest.raises(WrongPassword):
                        await refused
            await engine.appends.append(row.ledger_id, [b"x"], password="pässword")

        page = await world.other.reads.read(row.ledger_id, 0, password="pässword")
        assert [run.count for run in page.runs] == [2]
        with pytest.raises(InvalidRequest):
            await ledger(world.engine, digest=DigestKind.HMAC_SHA256)


async def test_a_changed_password_is_the_only_one_at_each_gateway(stores: Stores) -> None:
    async with world_of(stores) as world:
        row = await ledger(world.engine, password="old", digest=DigestKind.HMAC_SHA256)
        await world.engine.appends.append(row.ledger_id, [b"before"], password="old")
        await world.other.appends.append(row.ledger_id, [b"too"], password="old")
        with pytest.raises(WrongPassword):
            await world.other.change_password(row.ledger_id, "new", password="wrong")

        changed = await world.other.change_password(row.ledger_id, "new", password="old")
        again = await world.engine.change_password(row.ledger_id, "new", password="old")

        assert again == changed
        assert changed.mac_key == row.mac_key
        for engine in (world.engine, world.other):

            async def is_refused(engine: Engine = engine) -> bool:
                try:
                    await engine.appends.append(row.ledger_id, [b"late"], password="old")
                except WrongPassword:
                    return True
                return False

            await until(is_refused, "the gateway refuses appends with the old password")
            with pytest.raises(WrongPassword):
                await engine.reads.read(row.ledger_id, 0, password="old")
            await engine.appends.append(row.ledger_id, [b"after"], password="new")
        closed = await world.other.close(row.ledger_id, password="new")
        page = await world.other.reads.read(row.ledger_id, 0, password="new")
        read = [bytes(run.payload(n)) for run in page.runs for n in range(run.count)]
        assert [value for value in read if value != b"late"] == [
            b"before",
            b"too",
            b"after",
            b"after",
        ]
        assert closed.access_key == changed.access_key


async def test_a_writer_hears_of_a_changed_password_whose_row_it_keeps_no_more(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "_ROWS_MAX", 1)
    async with world_of(stores) as world:
        row = await ledger(world.engine, password="old")
        await ledger(world.engine)  # its row takes the place of the other one
        await world.other.change_password(row.ledger_id, "new", password="old")

        async def is_refused() -> bool:
            try:
                await world.engine.appends.append(row.ledger_id, [b"late"], password="old")
            except WrongPassword:
                return True
            return False

        await until(is_refused, "the writer refuses appends with the old password")
        await ledger(world.engine)
        with pytest.raises(WrongPassword):
            await world.engine.appends.append(row.ledger_id, [b"late"], password="old")
        await world.engine.appends.append(row.ledger_id, [b"after"], password="new")


async def test_a_ledger_without_a_password_gets_none(stores: Stores) -> None:
    async with world_of(stores) as world:
        row = await ledger(world.engine)

        with pytest.raises(InvalidRequest):
            await world.engine.change_password(row.ledger_id, "new")


async def test_a_deleted_ledger_is_gone_and_its_id_is_not_reused(stores: Stores) -> None:
    async with world_of(stores) as world:
        row = await ledger(world.engine, ledger_id=ASSIGNED_ID_END)
        await world.engine.appends.append(ASSIGNED_ID_END, [b"x"])

        await world.other.delete(ASSIGNED_ID_END)

        for engine in (world.engine, world.other):
            with pytest.raises(NoSuchLedger):
                await engine.get(ASSIGNED_ID_END)
            with pytest.raises(NoSuchLedger):
                await engine.delete(ASSIGNED_ID_END)
            with pytest.raises(LedgerExists):
                await ledger(engine, ledger_id=ASSIGNED_ID_END)
        assert row.ledger_id == ASSIGNED_ID_END


async def test_the_ledger_api_refuses_ledgers_of_logs(stores: Stores) -> None:
    async with world_of(stores) as world:
        row = await ledger(world.engine, log="events")
        for engine in (world.engine, world.other):
            for refused in (
                engine.appends.append(row.ledger_id, [b"x"]),
                engine.close(row.ledger_id),
                engine.delete(row.ledger_id),
            ):
                with pytest.raises(OwnedByLog):
                    await refused
        submitted = world.engine.handles.get(row.ledger_id).append([b"x"])
        assert await submitted == EntriesAppended(0, 0, 0)
        assert (await world.engine.close_for_log(row.ledger_id)).last_entry == 0


async def test_a_repeated_creation_gets_the_same_ledger_and_one_handle(stores: Stores) -> None:
    async with world_of(stores) as world:
        row = await ledger(world.engine, b"x", once=once("k"))

        for engine in (world.engine, world.other):
            assert (await ledger(engine, once=once("k"))).ledger_id == row.ledger_id
            await engine.appends.append(row.ledger_id, [b"x"])

        assert await payloads(world.other, row.ledger_id) == [b"x"] * 3


async def test_a_ledger_needs_as_many_bookies_as_its_ensemble_has(stores: Stores) -> None:
    async with world_of(stores, bookies=3, gateways=1) as world:
        with pytest.raises(NotEnoughBookies):
            await ledger(world.engine, ensemble_size=4)
        await world.lives(world.bookies["bookie-3"], ttl_s=0.001)

        async def fails() -> bool:
            try:
                await ledger(world.engine)
            except NotEnoughBookies:
                return True
            return False

        await until(fails, "the third bookie is known to be lost")
        row = await ledger(world.engine, allow_degraded=True)
        assert dict(row.extra)[DEGRADED] == "true"
        with pytest.raises(QuorumLogError):
            await world.engine.ready()


async def test_a_writer_that_is_gone_is_lost_and_the_ledger_recoverable(stores: Stores) -> None:
    async with world_of(stores) as world:
        row = await ledger(world.engine, b"one", b"two")
        await world.gateways[0].kill()

        with pytest.raises(WriterLost) as lost:
            await world.other.appends.append(row.ledger_id, [b"three"])
        assert lost.value.outcome == NOT_DONE
        with pytest.raises(WriterLost):
            await world.other.close(row.ledger_id)
        recovered = await asyncio.gather(*[world.other.recover(row.ledger_id) for _ in range(5)])

        assert {(one.state, one.last_entry) for one in recovered} == {(State.CLOSED, 1)}
        assert await payloads(world.other, row.ledger_id) == [b"one", b"two"]


async def test_draining_closes_open_ledgers_and_refuses_new_work(stores: Stores) -> None:
    async with world_of(stores) as world:
        rows = [await ledger(world.engine) for _ in range(10)]
        appends = [world.engine.handles.get(row.ledger_id).append([b"x"]) for row in rows]

        await world.engine.drain()

        for row, submitted in zip(rows, appends, strict=True):
            assert await submitted == EntriesAppended(0, 0, 0)
            closed = await world.other.get(row.ledger_id)
            assert (closed.state, closed.last_entry) == (State.CLOSED, 0)
            with pytest.raises(LedgerClosed):
                await world.engine.appends.append(row.ledger_id, [b"y"])


async def test_a_create_answered_after_the_ledgers_end_makes_no_handle(stores: Stores) -> None:
    """The answer was lost, and by the time that the same attempt is asked again others have ended
    the ledger.
    """
    async with world_of(stores, gateways=1) as world:
        create = world.engine.metadata.create

        async def late(draft: LedgerMetadata, **how: Any) -> LedgerMetadata:
            row = await create(draft, **how)
            await world.metadata.cas(row.closed(last_entry=-1, length=0))
            return await create(draft, **how)

        world.engine.metadata.create = late  # type: ignore[method-assign]

        row = await ledger(world.engine)

        assert row.state is State.CLOSED
        assert not world.engine.handles.live
        with pytest.raises(LedgerClosed):
            await world.engine.appends.append(row.ledger_id, [b"x"])


async def test_one_peer_does_not_get_the_last_open_ledgers(stores: Stores) -> None:
    async with world_of(stores, gateways=1, open_ledgers_max=8, peer_open_ledgers_max=1) as world:
        PEER.set("stranger")
        opened = [await ledger(world.engine) for _ in range(7)]
        with pytest.raises(Overloaded, match="PEER_OPEN_LEDGERS_MAX"):
            await ledger(world.engine)
        PEER.set("another")
        await ledger(world.engine)
        with pytest.raises(Overloaded, match="the limit is 8"):
            await ledger(world.engine)

        await world.engine.close(opened[0].ledger_id)
        await world.engine.delete(opened[1].ledger_id)

        PEER.set("stranger")
        await ledger(world.engine)


async def test_ledgers_created_at_once_keep_to_the_limit_of_open_ones(stores: Stores) -> None:
    async with world_of(stores, gateways=1, open_ledgers_max=3) as world:
        created = await asyncio.gather(
            *(ledger(world.engine) for _ in range(6)), return_exceptions=True
        )
        refused = [error for error in created if isinstance(error, Overloaded)]
        assert (len(world.engine.handles.live), len(refused)) == (3, 3)

        await world.engine.close(next(iter(world.engine.handles.by_ledger)))
        for _ in range(2):  # a creation that fails frees its place
            with pytest.raises(InvalidRequest):
                await ledger(world.engine, digest=DigestKind.HMAC_SHA256)
        await ledger(world.engine)


async def test_an_unknown_creation_keeps_its_place_until_its_ledger_ends(stores: Stores) -> None:
    async with world_of(stores, gateways=1, open_ledgers_max=1) as world:
        create = world.engine.metadata.create

        async def without_answer(draft: LedgerMetadata, **how: Any) -> LedgerMetadata:
            world.engine.metadata.create = create  # type: ignore[method-assign]
            await create(draft, **how)
            raise MetadataUnavailable(outcome=UNKNOWN)

        world.engine.metadata.create = without_answer  # type: ignore[method-assign]
        with pytest.raises(MetadataUnavailable):
            await ledger(world.engine)

        with pytest.raises(Overloaded):
            await ledger(world.engine)
        await until(lambda: world.engine.handles.live, "the creation is settled")
        with pytest.raises(Overloaded):
            await ledger(world.engine)
        await world.engine.close(world.engine.handles.live[0].ledger_id)
        await ledger(world.engine)


async def register_anew(world: World, *names: str) -> None:
    """These bookies have new directories, and live."""
    for name in names:
        row = await world.metadata.cookie(name)
        assert row is not None
        changes = {"incarnation": row.cookie.incarnation + 1, "instance": f"{name} anew"}
        cookie = row.cookie.model_copy(update=changes)
        await world.metadata.put_cookie(name, cookie, version=row.version)
        heartbeat = BookieHeartbeat(
            incarnation=cookie.incarnation, url=world.bookies[name].url, ttl_s=3600
        )
        assert await world.metadata.send_bookie_heartbeat(name, heartbeat)


async def test_a_ledger_whose_bookies_registered_anew_meanwhile_is_placed_at_those_of_a_new_list(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 15b. Each ensemble of the old list has a bookie that is another incarnation now."""
    monkeypatch.setattr(directory_module, "REFRESH_S", 3600.0)
    async with world_of(stores, gateways=1) as world:
        await register_anew(world, "bookie-1", "bookie-2")

        row = await ledger(world.engine)

        registered = {"bookie-1@2", "bookie-2@2", "bookie-3@1", "bookie-4@1"}
        assert set(row.all_members) <= registered
        assert await world.metadata.list() == ([row], None)

        listed = await world.metadata.bookies()
        await register_anew(world, "bookie-1", "bookie-2")

        async def stale() -> BookieList:
            return listed

        monkeypatch.setattr(world.engine.directory, "_fetch", stale)
        with pytest.raises(NotEnoughBookies, match=r"registered again .*registered: bookie-"):
            await ledger(world.engine)
        assert await world.metadata.list() == ([row], None)
