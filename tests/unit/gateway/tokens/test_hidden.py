"""What a caller may not see, it learns nothing of: neither by ids that are counted up, nor by the ends of lists."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from multidict import CIMultiDictProxy

from loadtest.stores import StoreServers
from quorumlog.wire.position_bodies import POSITIONS_LOG
from tests.unit.gateway.tokens.support import LOG, NAMESPACE, OTHER_LOG, Guarded, guarded
from tests.unit.logs.support import Answer

pytestmark = pytest.mark.asyncio(loop_scope="module")
HTML = {"Content-Type": "text/html"}
ACME = "metadata[customer]=ACME"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateways(servers: StoreServers) -> AsyncIterator[Guarded]:
    async with guarded(servers.fresh()) as found:
        for name in (LOG, OTHER_LOG, "a-first", "zz-last"):
            await found.log(name)
        for namespace in ("team-b", "team_a", NAMESPACE, "team-b"):
            metadata = {"namespace": namespace, "customer": "ACME"}
            await found.done("POST", "/v1/ledgers", {"metadata": metadata})
        yield found


def varying(answer: Answer) -> list[str]:
    assert isinstance(answer.headers, CIMultiDictProxy)
    return answer.headers.getall("Vary")


async def pages(gateways: Guarded, secret: str, path: str, key: str) -> list[tuple[list[Any], Any]]:
    """Each page of a list by one: what it shows, and its `next`."""
    found, after = [], ""
    while True:
        page = (await gateways.ask(secret, "GET", f"{path}&limit=1{after}")).json
        found.append(([one.get("name", one.get("ledger_id")) for one in page[key]], page["next"]))
        if page["next"] is None:
            return found
        after = f"&after={page['next']}"


async def test_a_ledger_of_others_gets_the_answer_of_one_that_never_was(gateways: Guarded) -> None:
    ledger = (await gateways.done("GET", f"/v1/logs/{OTHER_LOG}"))["ledgers"][-1]["ledger_id"]
    gone = await gateways.ledger(namespace="team-b")
    await gateways.done("POST", f"/v1/ledgers/{gone}/close")
    await gateways.done("DELETE", f"/v1/ledgers/{gone}")
    secret, _ = await gateways.token(f"admin:logs/{LOG}", f"admin:ledgers/{NAMESPACE}")

    for method, rest in (("GET", ""), ("POST", "/entries"), ("DELETE", ""), ("GET", "/ws")):
        reported = set()
        for number in (ledger, gone, 4_000_000):
            answer = await gateways.ask(secret, method, f"/v1/ledgers/{number}{rest}")
            assert answer.status == 404, answer
            reported.add(str({**answer.json, "instance": ""}).replace(str(number), "N"))
        assert len(reported) == 1, reported
        assert OTHER_LOG not in str(reported)


async def test_anothers_transaction_is_answered_as_one_that_never_was(gateways: Guarded) -> None:
    begun = (await gateways.done("POST", "/v1/transactions", {"log": OTHER_LOG}))["transaction"]
    secret, _ = await gateways.token(f"admin:logs/{LOG}", f"append:ledgers/{NAMESPACE}")

    for number in (begun, "0" * len(begun)):
        body = {"transaction": number, "partition": 0}
        for answer in (
            await gateways.ask(secret, "GET", f"/v1/transactions/{number}"),
            await gateways.ask(secret, "POST", "/v1/ledgers", body),
        ):
            assert answer.status == 404
            assert answer.json["detail"] == f"there is no transaction {number} for this token"


async def test_a_caller_with_some_grant_hears_which_one_it_lacks(gateways: Guarded) -> None:
    ledger_id = await gateways.ledger(namespace=NAMESPACE)
    secret, _ = await gateways.token(f"read:ledgers/{NAMESPACE}", "manage:logs/x")

    answer = await gateways.ask(secret, "DELETE", f"/v1/ledgers/{ledger_id}")

    assert answer.status == 403
    assert NAMESPACE in answer.json["detail"]


async def test_the_end_of_a_page_names_nothing_that_is_not_shown(gateways: Guarded) -> None:
    secret, _ = await gateways.token(f"read:logs/{LOG}", f"read:ledgers/{NAMESPACE}")
    wide, _ = await gateways.token("read:logs/*")
    nothing, _ = await gateways.token("read:cluster")

    logs = await pages(gateways, secret, "/v1/logs?", "logs")
    ledgers = await pages(gateways, secret, f"/v1/ledgers?{ACME}", "ledgers")

    assert logs == [([LOG], None)]
    assert [len(shown) for shown, _ in ledgers] == [1], "nor that there are more of others"
    assert await pages(gateways, secret, f"/v1/ledgers?log={OTHER_LOG}", "ledgers") == [([], None)]
    assert [name for [name], _ in await pages(gateways, wide, "/v1/logs?", "logs")] == sorted(
        ("a-first", LOG, OTHER_LOG, "zz-last")
    )
    assert await pages(gateways, nothing, "/v1/logs?", "logs") == [([], None)]
    assert await pages(gateways, nothing, "/v1/ledgers?", "ledgers") == [([], None)]


async def test_a_token_with_the_most_and_longest_grants_lists_filtered(gateways: Guarded) -> None:
    long = [f"read:ledgers/{'n' * 196}{number}*" for number in range(31)]
    secret, _ = await gateways.token(*long, f"read:ledgers/{NAMESPACE}")
    unlike = "&".join(f"metadata[{key}]={'v' * 250}" for key in "abcdefgh")

    shown = await gateways.ask(secret, "GET", f"/v1/ledgers?{ACME}")
    none = await gateways.ask(secret, "GET", f"/v1/ledgers?{unlike}")

    assert (shown.status, none.status) == (200, 200), none
    assert none.json["ledgers"] == []
    assert {one["metadata"]["namespace"] for one in shown.json["ledgers"]} == {NAMESPACE}


async def test_only_admin_on_everything_reaches_ledgers_of_the_own_logs(gateways: Guarded) -> None:
    await gateways.done("POST", f"/v1/logs/{LOG}/consumers/c/lease", {"holder": "w"})
    rows, _ = await gateways.world.metadata.list(log=POSITIONS_LOG)
    path = f"/v1/ledgers/{rows[-1].ledger_id}"
    for grants in (
        ("admin:logs/*", "admin:ledgers/*"),
        ("read:*", "append:*", "work:*", "manage:*"),
    ):
        secret, _ = await gateways.token(*grants)
        for method, where in (
            ("GET", path),
            ("GET", f"{path}/entries"),
            ("GET", f"{path}/entries/0"),
            ("GET", f"{path}/last-add-confirmed"),
            ("GET", f"{path}/ws"),
            ("POST", f"{path}/entries"),
            ("POST", f"{path}/close"),
            ("POST", f"{path}/recover"),
            ("POST", f"{path}/accept-loss"),
            ("DELETE", path),
        ):
            answer = await gateways.ask(secret, method, where)
            assert answer.status in ((404,) if "accept" not in where else (403, 404)), where
    assert (await gateways.done("GET", path))["state"] == "OPEN"
    assert (await gateways.done("GET", f"{path}/entries"))["entries"]


async def test_a_ticket_opens_a_stream_however_its_path_is_escaped(gateways: Guarded) -> None:
    path = "/v1/stream/chat/4%202"
    await gateways.ask(gateways.admin, "PUT", path, headers=HTML, body=b"<p>")
    for escaped in (path, "/v1/stream/%63hat/4%202"):
        ticket = (await gateways.done("POST", "/v1/tickets", {"path": escaped}))["ticket"]

        read = await gateways.ask(None, "GET", f"{path}?ticket={ticket}", at=1)
        other = await gateways.ask(None, "GET", f"/v1/stream/chat/43?ticket={ticket}")

        assert (read.status, read.body) == (200, b"<p>")
        assert read.headers["Cache-Control"].startswith("private")
        assert other.status == 401
    for bad in ("/v1/stream/", "/v1/stream/a?b", "/v1/stream/a#b"):
        assert (
            await gateways.ask(gateways.admin, "POST", "/v1/tickets", {"path": bad})
        ).status == 422


async def test_answers_are_private_and_a_stream_is_no_page_of_ours(gateways: Guarded) -> None:
    path = "/v1/stream/page"
    made = await gateways.ask(gateways.admin, "PUT", path, headers=HTML, body=b"<script>")
    read = await gateways.ask(gateways.admin, "GET", path)
    log = await gateways.ask(gateways.admin, "GET", f"/v1/logs/{LOG}")
    refused = await gateways.ask(None, "GET", path)

    for answer in (made, read, log, refused):
        assert "Authorization" in varying(answer), answer
    for answer in (made, read, refused):
        assert "sandbox" in answer.headers["Content-Security-Policy"]
