"""Cookies decide who a bookie is; liveness is advice, and Redis may vanish."""

from collections.abc import AsyncIterator
from dataclasses import replace
from uuid import uuid4

import pytest
from redis.asyncio import Redis

from loadtest.stores import Stores
from quorumlog.errors import InvalidRequest, NoSuchBookie, QuorumLogError, VersionConflict
from quorumlog.net.metadata_client import RepairClient
from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.row_copy import RowName
from quorumlog.wire.bodies import (
    BookieHeartbeat,
    BookieInfo,
    BookieUses,
    Cookie,
    CookieRow,
    LogEnd,
    ServiceHeartbeat,
)
from quorumlog.wire.repair_bodies import RepairAdd
from services.metadata import liveness
from tests.support.database import connected, sql
from tests.support.proxy import Proxy, proxy_to
from tests.support.waiting import until
from tests.unit.metadata.support import DRAFT, Service, serving, swapped

LONG_S = 3600.0


async def cookie(service: Service, incarnation: int = 1, **fields: object) -> Cookie:
    return Cookie(
        incarnation=incarnation,
        cluster_id=await service.client.cluster_id(),
        instance=f"data-{incarnation}",
        **fields,  # type: ignore[arg-type]
    )


def beat(incarnation: int = 1, ttl_s: float = LONG_S, **fields: object) -> BookieHeartbeat:
    return BookieHeartbeat(
        incarnation=incarnation,
        url="http://b1",
        zone="a",
        free_bytes=7,
        ttl_s=ttl_s,
        **fields,  # type: ignore[arg-type]
    )


async def test_a_cookie_is_created_once_and_changed_by_its_version(service: Service) -> None:
    client = service.client
    first = await client.put_cookie("b1", await cookie(service, directories=("/d",)), version=None)

    with pytest.raises(VersionConflict):
        await client.put_cookie("b1", await cookie(service, 2), version=None)
    second = await client.put_cookie("b1", await cookie(service, 2), version=first.version)
    with pytest.raises(VersionConflict):
        await client.put_cookie("b1", await cookie(service, 3), version=first.version)

    assert (first.version, second.version) == (1, 2)
    assert await client.cookie("b1") == second
    assert await client.cookie("b2") is None


async def test_a_cookie_never_goes_back(service: Service) -> None:
    client = service.client
    now = await client.put_cookie("b1", await cookie(service, 2, boots=5), version=None)

    for wrong in (
        await cookie(service, 1, boots=5),
        await cookie(service, 2, boots=4),
        (await cookie(service, 2, boots=5)).model_copy(update={"instance": "other"}),
        (await cookie(service, 2, boots=5)).model_copy(update={"cluster_id": "other"}),
    ):
        with pytest.raises(InvalidRequest):
            await client.put_cookie("b1", wrong, version=now.version)

    assert await client.cookie("b1") == now


async def test_a_registered_bookie_is_lost_without_a_heartbeat(service: Service) -> None:
    client = service.client
    await client.put_cookie("b1", await cookie(service), version=None)
    lost = BookieInfo(id="b1@1", state="lost", url="")
    assert (await client.bookies()).bookies == (lost,)

    await client.send_bookie_heartbeat("b1", beat(state="read-only"))
    await client.send_bookie_heartbeat("stranger", beat())

    live = BookieInfo(id="b1@1", state="read-only", url="http://b1", zone="a", free_bytes=7)
    assert (await client.bookies()).bookies == (live,)
    await client.send_bookie_heartbeat("b1", beat(ttl_s=0.05))

    async def is_lost() -> bool:
        return (await client.bookies()).bookies == (lost,)

    await until(is_lost, "the heartbeat runs out")


async def test_a_heartbeat_of_another_incarnation_is_ignored(service: Service) -> None:
    client = service.client
    await client.put_cookie("b1", await cookie(service, 2), version=None)

    await client.send_bookie_heartbeat("b1", beat(incarnation=1))

    found = (await client.bookies()).bookies
    assert [(bookie.id, bookie.state) for bookie in found] == [("b1@2", "lost")]


async def test_a_heartbeat_of_an_unregistered_process_is_ignored(service: Service) -> None:
    """Rule 15a: of two processes with one name each writes its own, and one is listened to."""
    client = service.client
    await client.put_cookie("b1", await cookie(service, process="mine"), version=None)
    await client.send_bookie_heartbeat("b1", beat(process="other"))
    await client.send_bookie_heartbeat("b1", beat())
    assert [bookie.state for bookie in (await client.bookies()).bookies] == ["lost"]

    await client.send_bookie_heartbeat("b1", beat(process="mine", state="draining"))
    await client.send_bookie_heartbeat("b1", beat(process="other"))

    assert [bookie.state for bookie in (await client.bookies()).bookies] == ["draining"]


async def test_only_the_registered_process_reports_a_growing_log_end(service: Service) -> None:
    client = service.client
    with pytest.raises(NoSuchBookie):
        await client.log_ends("b1", LogEnd(process="mine", log_end=1))
    row = await client.put_cookie("b1", await cookie(service, process="mine"), version=None)
    assert row.log_end == 0

    for reported, known in ((7, 7), (5, 7), (8, 8)):
        told_row = await client.log_ends("b1", LogEnd(process="mine", log_end=reported))
        assert (told_row.log_end, told_row.version) == (known, row.version)
    with pytest.raises(VersionConflict) as refused:
        await client.log_ends("b1", LogEnd(process="other", log_end=9))
    assert refused.value.members["current"]["cookie"]["process"] == "mine"

    # The next process of the same data goes on from there, other data from the beginning.
    again = await cookie(service, process="next", boots=1)
    assert (await client.put_cookie("b1", again, version=row.version)).log_end == 8
    other = await cookie(service, 2, process="next")
    assert (await client.put_cookie("b1", other, version=row.version + 1)).log_end == 0


async def test_an_unreadable_cookie_ends_no_background_task(
    stores: Stores, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("services.metadata.metrics._UPDATE_S", 0.01)
    async with serving(stores) as service:
        await service.client.put_cookie("b1", await cookie(service), version=None)
        await sql(stores, "UPDATE cookies SET cookie = '{}'")

        def failed() -> list[str]:
            return [record.message for record in caplog.records if record.exc_info]

        await until(lambda: len(failed()) > 1, "it looks again and again")

    assert set(failed()) == {"background-work-failed"}


async def test_rubbish_in_redis_is_neither_life_nor_error(service: Service, stores: Stores) -> None:
    client = service.client
    await client.put_cookie("b1", await cookie(service), version=None)
    await client.send_service_heartbeat(
        "gateway", "g1", ServiceHeartbeat(url="http://g1", ttl_s=LONG_S)
    )

    async with Redis.from_url(stores.redis_url) as redis:
        for rubbish in (b"", b"\xff", b"{", b"[]", b'{"incarnation":"1"}'):
            await redis.set("quorumlog:bookie:b1", rubbish)
            await redis.set("quorumlog:service:gateway:g1", rubbish)

            assert [bookie.state for bookie in (await client.bookies()).bookies] == ["lost"]
            assert (await client.services()).services == ()
        await redis.set("quorumlog:since", "rubbish")
        await redis.delete("quorumlog:services")
        await redis.set("quorumlog:services", "no set")

        assert not (await client.bookies()).stale
        assert (await client.services()).stale


async def test_services_are_listed_by_kind_until_their_heartbeats_expire(service: Service) -> None:
    client = service.client
    await client.send_service_heartbeat(
        "gateway", "g2", ServiceHeartbeat(url="http://g2", ttl_s=LONG_S)
    )
    await client.send_service_heartbeat(
        "gateway", "g1", ServiceHeartbeat(url="http://g1", ttl_s=LONG_S)
    )
    await client.send_service_heartbeat(
        "autorecovery", "a", ServiceHeartbeat(url="http://a", ttl_s=0.05)
    )

    async def remaining() -> list[str]:
        return [found.id for found in (await client.services()).services]

    async def are_two() -> bool:
        return await remaining() == ["g1", "g2"]

    await until(are_two, "the third one's time is over")


@pytest.fixture
async def redis_proxy(stores: Stores) -> AsyncIterator[Proxy]:
    async with proxy_to(stores.redis_url) as proxy:
        yield proxy


@pytest.mark.parametrize("how", ["refuses", "hangs"])
async def test_without_redis_heartbeats_succeed_and_the_last_list_stays(
    stores: Stores, redis_proxy: Proxy, how: str
) -> None:
    through = replace(stores, redis_url=redis_proxy.url(stores.redis_url))
    async with serving(through, redis_deadline_s=0.5) as service:
        client = service.client
        for name in ("b1", "b2"):
            await client.put_cookie(name, await cookie(service), version=None)
        await until(lambda: client.send_bookie_heartbeat("b1", beat()), "the heartbeat is recorded")
        await client.send_service_heartbeat(
            "gateway", "g", ServiceHeartbeat(url="http://g", ttl_s=LONG_S)
        )
        redis_proxy.is_down = how == "refuses"
        redis_proxy.is_silent = how == "hangs"
        redis_proxy.cut_all()

        assert await client.send_bookie_heartbeat("b2", beat()) is False
        listed = await client.bookies()
        assert listed.stale
        assert listed.liveness_age_s is None
        assert [bookie.state for bookie in listed.bookies] == ["writable", "writable"]
        services = await client.services()
        assert services.stale
        assert [found.id for found in services.services] == ["g"]

        redis_proxy.is_down = redis_proxy.is_silent = False
        redis_proxy.cut_all()
        await until(lambda: client.send_bookie_heartbeat("b2", beat()), "Redis is used again")

        async def is_fresh() -> bool:
            return not (await client.bookies()).stale

        await until(is_fresh, "the list is fresh again")


async def test_without_redis_who_is_beyond_those_remembered_is_lost_on_a_stale_list(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "_REMEMBERED_MAX", 1)
    alone = liveness.Liveness("redis://127.0.0.1:1", prefix="x", deadline_s=5.0)
    cookies = [
        CookieRow(name=name, version=1, cookie=await cookie(service)) for name in ("b1", "b2")
    ]
    for found in cookies:
        assert not (await alone.bookie_lives(found.name, beat())).recorded

    listed = await alone.bookies(cookies)
    await alone.close()

    assert [bookie.state for bookie in listed.bookies] == ["lost", "writable"]
    assert listed.stale


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/bookies/b1/heartbeat", {"incarnation": "1", "url": "x"}),
        ("/v1/bookies/b1/heartbeat", {"incarnation": 1, "url": "x", "ttl_s": 0}),
        ("/v1/bookies/b1/heartbeat", {"incarnation": 1, "url": "x", "state": "lost"}),
        ("/v1/bookies/-/heartbeat", {"incarnation": 1, "url": "x"}),
        ("/v1/services/gateway/a b/heartbeat", {"url": "x"}),
        ("/v1/bookies/b1/cookie", {"cookie": {}, "attempt": "x"}),
    ],
)
async def test_bad_input_is_refused(service: Service, path: str, body: object) -> None:
    status, problem = await service.send("PUT", path, body)

    assert (status, problem["code"]) == (422, "invalid")


async def test_a_dead_bookie_that_nothing_names_is_decommissioned(service: Service) -> None:
    client = service.client
    first = await client.put_cookie("b1", await cookie(service), version=None)
    await client.send_bookie_heartbeat("b1", beat())
    row = await client.create(DRAFT)
    repairs = RepairClient(client, "worker")
    await repairs.add([RepairAdd(ledger_id=row.ledger_id, member="b1@1", ranges=((0, 9),))])

    status, refused = await service.send("DELETE", "/v1/bookies/b1/cookie")
    assert (status, refused["bookie"]) == (409, "b1")  # it lives

    await client.send_bookie_heartbeat("b1", beat(ttl_s=0.05))

    async def is_lost() -> bool:
        return (await client.bookies()).bookies[0].state == "lost"

    await until(is_lost, "the heartbeat runs out")
    status, refused = await service.send("DELETE", "/v1/bookies/b1/cookie")
    assert (status, refused["ledgers"], refused["repairs"]) == (409, 1, 1)
    assert refused["first"] == [row.ledger_id]
    uses = await client.uses("b1")
    assert [(use.ledger_id, use.member) for use in uses.first] == [(row.ledger_id, "b1@1")]

    closed = await swapped(client, row.closed(last_entry=NO_ENTRY, length=0))
    await client.delete(closed.ledger_id, version=closed.version)
    assert await client.uses("b1") == BookieUses(bookie="b1", ledgers=0, repairs=0)
    for _ in range(2):  # again is as good as once
        await client.retire("b1")

    assert (await client.bookies()).bookies == ()
    with pytest.raises(NoSuchBookie):
        await client.retire("b2")
    # It may come back, and never as the incarnation that it was with other data (rule 15).
    other = (await cookie(service)).model_copy(update={"instance": "other"})
    with pytest.raises(InvalidRequest):
        await client.put_cookie("b1", other, version=first.version + 1)
    # An empty directory may: nothing was placed at it.
    left = await client.cookie("b1")
    assert left is not None
    assert left.cookie.may_fix
    await client.put_cookie("b1", await cookie(service, 2), version=first.version + 1)
    assert [bookie.id for bookie in (await client.bookies()).bookies] == ["b1@2"]


async def test_a_bookies_state_goes_with_its_cookie(stores: Stores, service: Service) -> None:
    client = service.client
    async with connected(stores) as connection:
        redis = Redis.from_url(stores.redis_url)
        await connection.execute("UPDATE cluster SET loss_accepted_at = now()")
        rows = [await client.create(DRAFT) for _ in range(2)]

        async def kept() -> tuple[int, list[tuple[str, ...]]]:
            _, found = await service.send("GET", "/v1/kept-ledgers?limit=1")
            return found["count"], [tuple(ledger["holders"]) for ledger in found["ledgers"]]

        async def keep(holder: str) -> None:
            for row in rows:
                lacking = [RowName(9, uuid4().bytes)]
                proofs = await client.proofs({row.ledger_id: lacking}, holder)
                assert proofs[row.ledger_id].lost

        for name in ("b8", "b9"):
            await client.put_cookie(name, await cookie(service), version=None)
            await client.send_bookie_heartbeat(name, beat(ttl_s=0.05))
            await keep(name)
        before = await kept()

        await client.put_cookie("b8", await cookie(service, 2), version=1)
        at_a_new_incarnation = await kept()

        async def is_retired() -> bool:
            await client.retire("b9")
            return True

        await until(is_retired, "the heartbeat runs out", passing=(QuorumLogError,))
        urls = set(await redis.hkeys("quorumlog:bookie-urls"))
        await redis.aclose()

    assert before == (2, [("b8", "b9")]), "the first page"
    assert at_a_new_incarnation == (2, [("b9",)])
    assert await kept() == (0, [])
    assert urls == {b"b8"}
