"""A gateway stands still with a request that its client repeats elsewhere, and goes on when others have changed the log
since (rule 6a). On real processes.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from loadtest.cluster import Cluster, running
from loadtest.stores import Stores
from tests.unit.logs.support import Answer, Http

ASLEEP = 1
"""The number of the gateway that stands still, from 0."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Requests that are with a gateway which stands still, and are repeated at another one."""

    http: Http
    late: list[asyncio.Task[Answer]]

    async def ask(self, method: str, path: str, body: Any = None) -> Answer:
        """A request whose first copy comes late, and the answer to its second one."""
        key = {"Idempotency-Key": f"{method}-{len(self.late)}"}
        first = self.http.ask(method, path, body, at=ASLEEP, headers=key)
        self.late.append(asyncio.create_task(first))
        await asyncio.sleep(0)
        return await self.http.ask(method, path, body, headers=key)

    async def done(self, method: str, path: str, body: Any = None) -> Any:
        """The same, which must succeed."""
        answer = await self.ask(method, path, body)
        assert answer.status in (200, 201), answer
        return answer.json


async def filled(http: Http, path: str, value: str, count: int) -> None:
    """A log of ledgers with a record each."""
    await http.done("PUT", path, {})
    for number in range(count):
        await http.done("POST", f"{path}/records", {"text": f"{value}{number}"})
        await http.done("POST", f"{path}/roll")


async def made_again(http: Http, path: str) -> None:
    """The log is deleted, and another one of its name made."""
    await http.done("DELETE", path)
    await filled(http, path, "new", 2)


async def limits(copies: Copies, path: str) -> None:
    await filled(copies.http, path, "old", 2)
    await copies.done("PATCH", path, {"roll_entries": 7})
    await copies.http.done("PATCH", path, {"roll_entries": 0})


async def protection(copies: Copies, path: str) -> None:
    await copies.http.done("PUT", path, {"deletion_protection": True})
    await copies.done("PATCH", path, {"deletion_protection": False})
    await copies.http.done("PATCH", path, {"deletion_protection": True})


async def nothing_new(copies: Copies, path: str) -> None:
    """The first answer changed nothing: the limit was what was asked for."""
    await copies.http.done("PUT", path, {"roll_entries": 7})
    await copies.done("PATCH", path, {"roll_entries": 7})
    await copies.http.done("PATCH", path, {"roll_entries": 0})


async def truncation(copies: Copies, path: str) -> None:
    await filled(copies.http, path, "old", 2)
    assert (await copies.done("POST", f"{path}/truncate", {"before": 2}))["first_offset"] == 2
    await made_again(copies.http, path)


async def end(copies: Copies, path: str) -> None:
    await filled(copies.http, path, "old", 1)
    for _ in range(2):  # the second one finds it closed
        assert (await copies.done("POST", f"{path}/close"))["state"] == "CLOSED"
    await made_again(copies.http, path)


async def archive(copies: Copies, path: str) -> None:
    await filled(copies.http, path, "old", 2)
    await copies.done("POST", f"{path}/archived", {"through": 2, "expect": None})
    await made_again(copies.http, path)


async def creation(copies: Copies, path: str) -> None:
    for status in (201, 200):  # the second one finds it there
        assert (await copies.ask("PUT", path, {})).status == status
    await copies.http.done("DELETE", path)


SHOWN = ("state", "first_offset", "next_offset", "archived_through", "deletion_protection")


async def shown(http: Http, path: str) -> Any:
    """What clients can see of a log and change; None without a log."""
    answer = await http.ask("GET", path)
    if answer.status == 404:
        return None
    log = answer.json
    return [log["settings"], *(log[field] for field in SHOWN)]


@pytest.fixture
async def cluster(stores: Stores) -> AsyncIterator[Cluster]:
    async with running(stores, bookies=3) as cluster:
        yield cluster


async def test_a_request_that_was_repeated_is_not_carried_out_by_a_gateway_that_wakes(
    cluster: Cluster,
) -> None:
    changes: tuple[Callable[[Copies, str], Awaitable[None]], ...] = (
        limits, protection, nothing_new, truncation, end, archive, creation
    )  # fmt: skip
    paths = [f"/v1/logs/{change.__name__}" for change in changes]
    async with aiohttp.ClientSession() as session:
        copies = Copies(Http(session, cluster.gateways), [])
        cluster.pause(f"gateway-{ASLEEP + 1}")
        try:
            for change, path in zip(changes, paths, strict=True):
                await change(copies, path)
            before = [await shown(copies.http, path) for path in paths]
        finally:
            cluster.resume(f"gateway-{ASLEEP + 1}")

        late = await asyncio.gather(*copies.late)
        after = [await shown(copies.http, path) for path in paths]

        assert after == before
        assert {answer.status for answer in late} <= {200, 404}, late
        assert await copies.http.contents("truncation") == ["new0", "new1"]


async def test_a_key_with_another_request_is_refused(cluster: Cluster) -> None:
    async with aiohttp.ClientSession() as session:
        http, key = Http(session, cluster.gateways), {"Idempotency-Key": "mine"}

        async def ask(seconds: int, **more: str) -> Answer:
            body = {"retention_seconds": seconds}
            return await http.ask("PATCH", "/v1/logs/log", body, headers={**key, **more})

        await http.done("PUT", "/v1/logs/log", {})
        first, repeat, other = await ask(1), await ask(1), await ask(2)
        with_condition = await ask(1, **{"If-Match": '"1"'})

        assert (first.status, repeat.status) == (200, 200)
        for refused in (other, with_condition):
            assert (refused.status, refused.json["code"]) == (422, "invalid")
            assert refused.json["errors"][0]["pointer"] == "/header/Idempotency-Key"


async def test_a_repeat_of_a_conditional_change_is_told_that_it_is_done(cluster: Cluster) -> None:
    async with aiohttp.ClientSession() as session:
        http = Http(session, cluster.gateways)
        version = (await http.done("PUT", "/v1/logs/log", {}))["version"]
        headers = {"Idempotency-Key": "mine", "If-Match": f'"{version}"'}

        for at in (0, 1):
            answer = await http.ask(
                "PATCH", "/v1/logs/log", {"retention_seconds": 1}, at=at, headers=headers
            )
            assert answer.status == 200, answer
