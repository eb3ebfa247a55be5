"""Work queues on real processes: owners that are killed or stand still."""

import asyncio
from typing import Any

import aiohttp

from loadtest.stores import Stores
from tests.support.waiting import SETTLED_S, until
from tests.unit.logs.support import Http
from tests.unit.positions.test_cluster import LOG, a_log

MAIL = f"{LOG}/queues/mail"


async def posted(http: Http, path: str, body: Any, *, at: int) -> Any:
    """Send a request until it is done: a copy of a settlement or of a claim does no harm."""

    async def ask() -> Any:
        async with asyncio.timeout(10):  # a gateway that stands still must not hold it for ever
            answer = await http.ask("POST", f"{MAIL}/{path}", body, at=at)
        if answer.status < 300:
            return answer
        problem = answer.json
        assert problem["retryable"] or problem["outcome"] == "unknown", answer
        return None

    passing = (aiohttp.ClientError, TimeoutError)
    answer = await until(ask, f"{path} is done", SETTLED_S, passing=passing)
    return answer.json


async def acked(http: Http, records: list[Any], *, at: int) -> list[int]:
    """Acknowledge records; those that are done by then. The first copy may be done without an answer."""
    if not records:
        return []
    parts = [{"claim": one["claim"], "offsets": [one["offset"]]} for one in records]
    answer = await posted(http, "ack", {"claims": parts}, at=at)
    ended = {
        at for one in answer["refused"] if one["reason"] != "acknowledged" for at in one["offsets"]
    }
    return [one["offset"] for one in records if one["offset"] not in ended]


async def worked(http: Http, done: list[int], *, at: int, count: int) -> None:
    """Claim and acknowledge until all records of the log are done."""
    while len(set(done)) < count:
        claimed = await posted(http, "claim?encoding=text", {"max": 7, "wait_ms": 500}, at=at)
        again = {one["offset"] for one in claimed["records"]} & set(done)
        assert not again, "given again after an acknowledgement"
        done += await acked(http, claimed["records"], at=at)


async def test_records_are_given_once_where_the_owner_of_queues_is_killed(stores: Stores) -> None:
    async with a_log(stores) as (cluster, http):
        await http.done("PUT", MAIL, {"lease_ms": 2000})
        held = await posted(http, "claim", {"max": 10}, at=0)
        done = await acked(http, held["records"][:4], at=0)
        await cluster.kill("gateway-1")
        # The claim of the gateway that is gone still counts at the other one.
        done += await acked(http, held["records"][4:6], at=1)
        await worked(http, done, at=1, count=100)
        assert set(done) == set(range(100))
        shown = await http.done("GET", MAIL, at=1)
        assert (shown["floor"], shown["depth"], shown["redelivered"] >= 4) == (100, 0, True)
        late = await posted(http, "ack", {"claims": [{"claim": held["records"][0]["claim"]}]}, at=1)
        assert late["done"] == 0


async def test_an_owner_that_stood_still_gives_nothing_again_that_is_done(stores: Stores) -> None:
    async with a_log(stores) as (cluster, http):
        await http.done("PUT", MAIL, {"lease_ms": 1000})
        await posted(http, "claim", {"max": 5}, at=0)
        done: list[int] = []
        cluster.pause("gateway-1")
        try:
            await worked(http, done, at=1, count=60)
        finally:
            cluster.resume("gateway-1")
        await asyncio.gather(*(worked(http, done, at=at, count=100) for at in (0, 1)))
        assert set(done) == set(range(100))


async def test_dead_letters_are_there_once_where_gateways_are_killed(stores: Stores) -> None:
    async with a_log(stores) as (cluster, http):
        await http.done("PUT", "/v1/logs/dead", {})
        settings = {"max_attempts": 1, "dead_letter_log": "dead", "lease_ms": 1000}
        await http.done("PUT", MAIL, settings)
        for number in range(5):
            claimed = await posted(http, "claim", {"max": 20}, at=number % 2)
            parts = [{"claim": one["claim"]} for one in claimed["records"][:1]]
            nak = {"claims": parts, "reason": "no"}
            killed = f"gateway-{number % 2 + 1}"
            await posted(http, "nak", nak, at=number % 2)
            if number < 3:
                await cluster.kill(killed)
                await cluster.restart(killed)

        async def dead() -> bool:
            await posted(http, "claim", {}, at=0)  # somebody must take the queues over
            shown = await http.done("GET", MAIL, at=0)
            return bool(shown["depth"] == 0 and shown["dying"] == 0)

        await until(dead, "all records are dead letters", SETTLED_S)
        letters: list[Any] = []
        while page := (await http.done("GET", f"/v1/logs/dead/records?from={len(letters)}"))[
            "records"
        ]:
            letters += page
        found = sorted(int(one["headers"]["Dead-Letter-Offset"]) for one in letters)
        assert found == list(range(100))
