"""Tokens while they live: made, used through every door, revoked, expired, and while metadata is away."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from loadtest.stores import StoreServers
from quorumlog.wire.token_bodies import TokenQuotas
from tests.support.waiting import until, within
from tests.unit.gateway.tokens.support import LOG, NAMESPACE, OTHER_LOG, Guarded, guarded
from tests.unit.logs.support import Answer

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateways(servers: StoreServers) -> AsyncIterator[Guarded]:
    async with guarded(servers.fresh(), follow=(0,)) as found:
        await found.log(LOG)
        await found.log(OTHER_LOG)
        yield found


def code(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.json["code"]


FORBIDDEN = (403, "forbidden")


async def test_a_token_of_one_gateway_is_known_at_once_at_another(gateways: Guarded) -> None:
    made = await gateways.done("POST", "/v1/tokens", {"name": "new", "grants": ["read:*"]})

    answer = await gateways.ask(made["token"], "GET", "/v1/logs", at=1)

    assert answer.status == 200
    listed = (await gateways.done("GET", "/v1/tokens"))["tokens"]
    shown = {key: value for key, value in made.items() if key != "token"}
    assert shown in listed
    assert made["token"] not in str(listed)


async def test_a_revoked_token_is_refused_and_its_tail_is_cut(gateways: Guarded) -> None:
    secret, token_id = await gateways.token(f"read:logs/{LOG}")
    headers = {"Authorization": f"Bearer {secret}", "Accept": "text/event-stream"}
    url = f"{gateways.http.urls[0]}/v1/logs/{LOG}/records"
    async with gateways.http.session.get(url, headers=headers) as tail:
        assert tail.status == 200
        await tail.content.readline()

        await gateways.done("DELETE", f"/v1/tokens/{token_id}")

        async with within("the tail is cut"):
            with pytest.raises(aiohttp.ClientPayloadError):
                await tail.content.read()

    async def is_refused() -> bool:
        return (await gateways.ask(secret, "GET", f"/v1/logs/{LOG}")).status == 401

    await until(is_refused, "the revoked token is refused")


async def test_an_expired_token_is_refused_and_its_tail_is_cut(gateways: Guarded) -> None:
    secret, _ = await gateways.token("read:*", expires_in_s=600)
    url = f"{gateways.http.urls[0]}/v1/logs/{LOG}/ws"
    async with gateways.http.session.ws_connect(
        url, headers={"Authorization": f"Bearer {secret}"}
    ) as socket:
        await socket.send_str('{"tail":{"from":0}}')
        await socket.receive()

        gateways.skews["s"] = 601.0
        try:
            async with within("the tail is cut"):
                message = await socket.receive()
            answer = await gateways.ask(secret, "GET", f"/v1/logs/{LOG}")
        finally:
            gateways.skews["s"] = 0.0

    assert message.type in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)
    assert code(answer) == (401, "unauthenticated")
    assert "expired at" in answer.json["detail"]


async def test_while_metadata_is_away_known_tokens_go_on(gateways: Guarded) -> None:
    known, _ = await gateways.token(f"append:logs/{LOG}")
    records = f"/v1/logs/{LOG}/records"
    assert (await gateways.ask(known, "POST", records, {"text": "a"})).status == 201
    new, _ = await gateways.token("read:*")

    async with gateways.world.outage():
        unknown = await gateways.ask(new, "GET", records)
        goes_on = await gateways.ask(known, "POST", records, {"text": "b"})
        refused = await gateways.ask(known, "GET", records)

    assert code(unknown) == (503, "metadata-unavailable")
    assert unknown.json["retryable"]
    assert goes_on.status == 201
    assert code(refused) == FORBIDDEN

    async def is_known() -> bool:
        return (await gateways.ask(new, "GET", records)).status == 200

    await until(is_known, "the new token is known")


async def test_a_request_is_refused_before_its_body_is_sent(gateways: Guarded) -> None:
    reader_only, _ = await gateways.token("read:*")
    port = int(gateways.http.urls[0].rpartition(":")[2])
    for secret, status in (("qlt_nothing", b"401"), (reader_only, b"403")):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            f"POST /v1/logs/{LOG}/records HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000\r\n"
            f"Content-Type: application/json\r\nAuthorization: Bearer {secret}\r\n\r\n".encode()
        )

        async with within("the answer comes without a body"):
            head = await reader.readline()

        assert status in head
        writer.close()


async def test_a_caller_is_told_what_its_token_allows(gateways: Guarded) -> None:
    quotas = TokenQuotas(requests_per_s=100)
    secret, token_id = await gateways.token(
        f"append:logs/{LOG}", "read:cluster", expires_in_s=600, quotas=quotas
    )

    limited = (await gateways.ask(secret, "GET", "/v1/caller")).json
    admin = (await gateways.ask(gateways.admin, "GET", "/v1/caller")).json

    assert limited.pop("expires_at").endswith("Z")
    assert limited == {
        "who": f"the token a test ({token_id})",
        "requires_tokens": True,
        "grants": [f"append:logs/{LOG}", "read:cluster"],
        "quotas": quotas.model_dump(mode="json"),
    }
    assert (admin["grants"], admin["expires_at"], "quotas" in admin) == (["admin:*"], None, False)
    assert (await gateways.ask(None, "GET", "/v1/caller")).status == 401


async def test_lists_show_what_the_token_may_read(gateways: Guarded) -> None:
    await gateways.ledger()
    mine = await gateways.ledger(namespace=f"{NAMESPACE}-1")
    of_log = (await gateways.done("GET", f"/v1/logs/{LOG}"))["ledgers"]
    secret, _ = await gateways.token(f"read:logs/{LOG}", f"read:ledgers/{NAMESPACE}*")

    logs = await gateways.ask(secret, "GET", "/v1/logs")
    ledgers = await gateways.ask(secret, "GET", "/v1/ledgers")
    appends, _ = await gateways.token(f"append:logs/{LOG}")
    assert code(await gateways.ask(appends, "GET", "/v1/logs")) == FORBIDDEN

    assert [log["name"] for log in logs.json["logs"]] == [LOG]
    found = {ledger["ledger_id"] for ledger in ledgers.json["ledgers"]}
    assert found >= {mine, *(item["ledger_id"] for item in of_log)}
    assert all(
        ledger["log"] == LOG or ledger["metadata"].get("namespace", "").startswith(NAMESPACE)
        for ledger in ledgers.json["ledgers"]
    )


async def test_the_list_of_consumers_shows_those_of_visible_logs(gateways: Guarded) -> None:
    for log in (LOG, OTHER_LOG):
        await gateways.done("POST", f"/v1/logs/{log}/consumers/listed/lease", {"holder": "w"})
    for grant in ("read", "append", "manage"):
        secret, _ = await gateways.token(f"{grant}:logs/{LOG}")
        for query in ("?prefix=listed", f"?log={LOG}", f"?log={OTHER_LOG}"):
            answer = await gateways.ask(secret, "GET", f"/v1/consumers{query}")
            shown = [(one["log"], one["consumer"]) for one in answer.json["consumers"]]
            assert shown == ([] if OTHER_LOG in query else [(LOG, "listed")])
            assert answer.json["next"] is None
    elsewhere, _ = await gateways.token(f"read:ledgers/{NAMESPACE}*")
    assert (await gateways.ask(elsewhere, "GET", "/v1/consumers")).json["consumers"] == []


async def test_a_queues_worker_claims_and_settles_and_nothing_else(gateways: Guarded) -> None:
    queue, dead = f"/v1/logs/{LOG}/queues/mail", {"max_attempts": 1, "dead_letter_log": OTHER_LOG}
    manager, _ = await gateways.token(f"manage:logs/{LOG}")
    assert code(await gateways.ask(manager, "PUT", queue, dead)) == FORBIDDEN
    manages, appends = f"manage:logs/{LOG}", f"append:logs/{OTHER_LOG}"
    manager, _ = await gateways.token(manages, appends)  # would get copies of what it can't read
    assert code(await gateways.ask(manager, "PUT", queue, dead)) == FORBIDDEN
    manager, _ = await gateways.token(manages, appends, f"read:logs/{LOG}")
    assert (await gateways.ask(manager, "PUT", queue, dead)).status == 200
    assert code(await gateways.ask(manager, "POST", f"{queue}/redrive", {})) == FORBIDDEN
    sender, _ = await gateways.token(manages, f"append:logs/{LOG}")
    assert (await gateways.ask(sender, "POST", f"{queue}/redrive", {})).json == {"redriven": 0}
    assert code(await gateways.ask(manager, "POST", f"{queue}/claim", {})) == FORBIDDEN

    worker, _ = await gateways.token(f"work:logs/{LOG}")
    claimed = await gateways.ask(worker, "POST", f"{queue}/claim", {"max": 1})
    (record,) = claimed.json["records"]
    settled = await gateways.ask(
        worker, "POST", f"{queue}/ack", {"claims": [{"claim": record["claim"]}]}
    )
    assert settled.json == {"done": 1, "refused": []}
    assert (await gateways.ask(worker, "GET", queue)).status == 200
    for method, path, body in (
        ("GET", f"/v1/logs/{LOG}/records", None),
        ("DELETE", queue, None),
        ("PUT", queue, {}),
        ("POST", f"{queue}/redrive", {}),
        ("POST", f"/v1/logs/{OTHER_LOG}/queues/mail/claim", {}),
    ):
        assert code(await gateways.ask(worker, method, path, body)) == FORBIDDEN, path


async def test_a_subscription_needs_manage_on_all_that_its_pattern_may_match(
    gateways: Guarded,
) -> None:
    sub, logs = "/v1/stream/__ds/subscriptions/sub", "logs/durable-stream."
    pull = {"type": "pull-wake", "pattern": "events/*", "wake_stream": "pool"}
    wake = f"append:{logs}pool"
    for grants in (
        (f"read:{logs}*", wake),
        (f"manage:{logs}events_2Fa", wake),
        (f"manage:{logs}events_2F", wake),
        (f"manage:{logs}events_2F*",),
    ):
        secret, _ = await gateways.token(*grants)
        assert code(await gateways.ask(secret, "PUT", sub, pull)) == FORBIDDEN, grants
    manager, _ = await gateways.token(f"manage:{logs}events_2F*", wake)
    assert (await gateways.ask(manager, "PUT", sub, pull)).status == 201
    other = {"streams": ["elsewhere"]}
    assert code(await gateways.ask(manager, "POST", f"{sub}/streams", other)) == FORBIDDEN
    worker, _ = await gateways.token(f"work:{logs}events_2F*")
    for method, path, body in (("GET", sub, None), ("DELETE", sub, None), ("PUT", sub, pull)):
        assert code(await gateways.ask(worker, method, path, body)) == FORBIDDEN
    claim = {"worker": "one"}
    assert code(await gateways.ask(manager, "POST", f"{sub}/claim", claim)) == FORBIDDEN
    pending = await gateways.ask(worker, "POST", f"{sub}/claim", claim)
    assert pending.json["code"] == "no-pending-work"
    elsewhere, _ = await gateways.token(f"manage:{logs}other*")
    listed = "/v1/stream/__ds/subscriptions"
    assert (await gateways.ask(elsewhere, "GET", listed)).json["subscriptions"] == []
    absent = await gateways.ask(elsewhere, "GET", sub)
    assert code(absent) == (404, "no-such-subscription")
    assert b"events" not in absent.body
    assert len((await gateways.ask(manager, "GET", listed)).json["subscriptions"]) == 1
    # Callbacks have the token of their wake, and no other.
    answer = await gateways.ask(manager, "POST", f"{sub}/ack", {})
    assert (answer.status, answer.json["code"]) == (401, "wake-token-invalid")
    assert (await gateways.ask(manager, "DELETE", sub)).status == 204


async def test_a_subscription_stays_its_creators_though_its_streams_are_gone(
    gateways: Guarded,
) -> None:
    sub, logs = "/v1/stream/__ds/subscriptions/sub", "logs/durable-stream."
    pull = {"type": "pull-wake", "streams": ["a/x"], "wake_stream": "a/pool"}
    a, _ = await gateways.token(f"manage:{logs}a*", f"append:{logs}a*")
    b, _ = await gateways.token(*(f"{scope}:{logs}b*" for scope in ("manage", "append", "work")))
    assert (await gateways.ask(a, "PUT", sub, pull)).status == 201
    assert (await gateways.ask(a, "DELETE", f"{sub}/streams/a/x")).status == 204
    assert (await gateways.ask(a, "GET", sub)).json["streams"] == []

    for method, path, body in (
        ("GET", sub, None),
        ("POST", f"{sub}/streams", {"streams": ["b/y"]}),
        ("DELETE", f"{sub}/streams/a/x", None),
        ("POST", f"{sub}/claim", {"worker": "b"}),
    ):
        answer = await gateways.ask(b, method, path, body)
        assert code(answer) == (404, "no-such-subscription"), (method, path)
    assert (await gateways.ask(b, "DELETE", sub)).status == 204, "as of one that does not exist"
    listed = await gateways.ask(b, "GET", "/v1/stream/__ds/subscriptions")
    assert listed.json["subscriptions"] == []
    both, _ = await gateways.token(f"manage:{logs}a*", f"manage:{logs}b*")
    answer = await gateways.ask(both, "POST", f"{sub}/streams", {"streams": ["b/y"]})
    assert code(answer) == FORBIDDEN, "it may not append to the wake stream"
    shared, _ = await gateways.token(f"manage:{logs}*", f"append:{logs}a*")
    added = await gateways.ask(shared, "POST", f"{sub}/streams", {"streams": ["b/y"]})
    assert added.status == 204
    confirmed = await gateways.ask(a, "PUT", sub, pull)
    assert code(confirmed) == (409, "subscription-exists"), "others' streams are not shown"


async def test_a_log_is_not_reached_by_the_ids_of_its_ledgers(gateways: Guarded) -> None:
    log = await gateways.done("GET", f"/v1/logs/{OTHER_LOG}")
    ledger = f"/v1/ledgers/{log['ledgers'][-1]['ledger_id']}"
    secret, _ = await gateways.token("admin:ledgers/*", f"admin:logs/{LOG}")

    for method, path in (
        ("GET", ledger),
        ("GET", f"{ledger}/entries"),
        ("GET", f"{ledger}/entries/0"),
        ("GET", f"{ledger}/last-add-confirmed"),
        ("GET", f"{ledger}/ws"),
        ("POST", f"{ledger}/entries"),
        ("POST", f"{ledger}/close"),
        ("POST", f"{ledger}/recover"),
        ("DELETE", ledger),
    ):
        assert code(await gateways.ask(secret, method, path)) == (404, "no-such-ledger"), (
            method,
            path,
        )


async def test_a_log_is_not_reached_through_a_transaction(gateways: Guarded) -> None:
    secret, _ = await gateways.token("append:ledgers/*", f"append:logs/{LOG}")
    path = "/v1/transactions"
    begun = (await gateways.done("POST", path, {"log": OTHER_LOG}))["transaction"]

    for method, where, body in (
        ("POST", path, {"log": OTHER_LOG}),
        ("GET", f"{path}/{begun}", None),
        ("POST", f"{path}/{begun}/abort", None),
        ("POST", f"{path}/{begun}/commit", {"ledgers": []}),
        ("POST", "/v1/ledgers", {"transaction": begun, "partition": 0}),
    ):
        expected = FORBIDDEN if where == path else (404, "no-such-transaction")
        assert code(await gateways.ask(secret, method, where, body)) == expected, where

    assert (await gateways.done("GET", f"{path}/{begun}"))["state"] == "OPEN"
    own = (await gateways.ask(secret, "POST", path, {"log": LOG})).json["transaction"]
    made = await gateways.ask(secret, "POST", "/v1/ledgers", {"transaction": own, "partition": 0})
    assert made.json["log"] == LOG


async def test_to_overwrite_a_log_needs_more_than_to_append(gateways: Guarded) -> None:
    appends, _ = await gateways.token(f"append:logs/{LOG}")
    begun = (await gateways.ask(appends, "POST", "/v1/transactions", {"log": LOG})).json
    path = f"/v1/transactions/{begun['transaction']}/commit"

    refused = await gateways.ask(appends, "POST", path, {"ledgers": [], "overwrite": True})

    assert code(refused) == FORBIDDEN
    manages, _ = await gateways.token(f"append:logs/{LOG}", f"manage:logs/{LOG}")
    body = {"ledgers": [-1], "overwrite": True}
    assert (await gateways.ask(manages, "POST", path, body)).status == 422


async def test_a_ticket_opens_one_path_for_half_a_minute_at_any_gateway(gateways: Guarded) -> None:
    secret, token_id = await gateways.token(f"read:logs/{LOG}")
    path = f"/v1/logs/{LOG}/records"
    made = await gateways.ask(secret, "POST", "/v1/tickets", {"path": path})
    ticket = made.json["ticket"]
    query = f"?ticket={ticket}"

    assert (made.status, made.json["expires_in_s"]) == (201, 30)
    assert secret.removeprefix("qlt_") not in ticket
    for at in (0, 1):
        assert (await gateways.ask(None, "GET", path + query, at=at)).status == 200
    other_path = f"/v1/logs/{LOG}/ws"
    changed = query[:-1] + ("0" if query[-1] != "0" else "1")
    later = query.replace(ticket.split(".")[1], "9999999999")
    for method, asked in (
        ("GET", other_path + query),
        ("GET", f"/v1/logs/{OTHER_LOG}/records{query}"),
        ("GET", path + changed),
        ("GET", path + later),
        ("GET", f"{path}?ticket=anonymous"),
        ("POST", path + query),
        ("GET", f"/v1/logs{query}"),
    ):
        answer = await gateways.ask(None, method, asked, {} if method == "POST" else None)
        assert code(answer) == (401, "unauthenticated"), (method, asked)
    gateways.skews["s"] = 31.0
    try:
        expired = await gateways.ask(None, "GET", path + query)
    finally:
        gateways.skews["s"] = 0.0
    assert code(expired) == (401, "unauthenticated")

    await gateways.tokens.revoke(token_id)

    async def is_refused() -> bool:
        return (await gateways.ask(None, "GET", path + query)).status == 401

    await until(is_refused, "a revoked token's ticket is refused")


async def test_a_ticket_allows_streams_and_sockets_within_its_token(gateways: Guarded) -> None:
    secret, _ = await gateways.token(f"read:logs/{LOG}")

    for path in ("/v1/tokens", f"/v1/logs/{LOG}", "/v1/logs/a/../b/records", "entries"):
        answer = await gateways.ask(secret, "POST", "/v1/tickets", {"path": path})
        assert answer.status == 422, path
    there = f"/v1/logs/{OTHER_LOG}/records"
    made = (await gateways.ask(secret, "POST", "/v1/tickets", {"path": there})).json
    used = await gateways.ask(None, "GET", f"{there}?ticket={made['ticket']}")
    assert code(used) == FORBIDDEN

    path = f"/v1/logs/{LOG}/ws"
    made = (await gateways.ask(secret, "POST", "/v1/tickets", {"path": path})).json
    url = f"{gateways.http.urls[1]}{path}?ticket={made['ticket']}"
    async with gateways.http.session.ws_connect(url) as socket:
        await socket.send_str('{"tail":{"from":0}}')
        async with within("the tail begins"):
            assert "records" in await socket.receive_json()


async def test_a_token_that_is_too_long_is_none(gateways: Guarded) -> None:
    answer = await gateways.ask("q" * 4097, "GET", "/v1/logs")

    assert code(answer) == (401, "unauthenticated")
    assert "longer than 4096 characters" in answer.json["detail"]
    longest = await gateways.ask("q" * 4096, "GET", "/v1/logs")
    assert "the token was revoked, or never created" in longest.json["detail"]


async def test_open_routes_and_missing_ones_are_answered_to_everyone(gateways: Guarded) -> None:
    assert (await gateways.ask(None, "GET", "/health/live")).status == 200
    assert code(await gateways.ask(None, "GET", "/v1/nothing")) == (404, "not-found")
    assert code(await gateways.ask(None, "PUT", "/v1/logs")) == (405, "method-not-allowed")


async def test_a_ledger_is_made_in_a_namespace_of_the_token_only(gateways: Guarded) -> None:
    secret, _ = await gateways.token(f"append:ledgers/{NAMESPACE}*")
    made = "/v1/ledgers"

    async def make(metadata: dict[str, str], **headers: str) -> Answer:
        body = {"metadata": metadata}
        return await gateways.ask(secret, "POST", made, body, headers=headers)

    assert (await make({"namespace": f"{NAMESPACE}-2"})).status == 201
    assert code(await make({"namespace": "team-b"})) == FORBIDDEN
    assert code(await make({})) == FORBIDDEN


async def test_two_callers_with_one_idempotency_key_make_two_ledgers(gateways: Guarded) -> None:
    secret, _ = await gateways.token(f"append:ledgers/{NAMESPACE}*")
    body = {"metadata": {"namespace": NAMESPACE}}

    async def made(caller: str) -> int:
        key = {"Idempotency-Key": "theirs"}
        answer = await gateways.ask(caller, "POST", "/v1/ledgers", body, headers=key)
        assert answer.status == 201
        return int(answer.json["ledger_id"])

    theirs, mine = await made(gateways.admin), await made(secret)

    assert mine != theirs
    assert (await made(gateways.admin), await made(secret)) == (theirs, mine)


async def test_to_give_up_a_bookie_needs_more_than_to_recover(gateways: Guarded) -> None:
    ledger_id = await gateways.ledger(namespace=NAMESPACE)
    path = f"/v1/ledgers/{ledger_id}/recover"
    body = {"declare_lost": ["bookie-9@1"]}
    manages, _ = await gateways.token(f"manage:ledgers/{NAMESPACE}")
    administers, _ = await gateways.token(f"admin:ledgers/{NAMESPACE}")

    refused = await gateways.ask(manages, "POST", path, body)
    given = await gateways.ask(administers, "POST", path, body)

    assert code(refused) == FORBIDDEN
    assert given.status != 403


@pytest.mark.parametrize(
    ("scope", "message"), [("append", '{"tail":{"from":0}}'), ("read", '{"text":"a record"}')]
)
async def test_a_message_on_a_socket_needs_its_own_scope(
    gateways: Guarded, scope: str, message: str
) -> None:
    ledger_id = await gateways.ledger(namespace=NAMESPACE)
    secret, _ = await gateways.token(f"{scope}:logs/{LOG}", f"{scope}:ledgers/{NAMESPACE}")
    before = (await gateways.done("GET", f"/v1/logs/{LOG}"))["next_offset"]

    for path in (f"/v1/logs/{LOG}/ws", f"/v1/ledgers/{ledger_id}/ws"):
        async with gateways.http.session.ws_connect(
            gateways.http.urls[0] + path, headers={"Authorization": f"Bearer {secret}"}
        ) as socket:
            await socket.send_str(message)
            async with within("the socket ends with a problem"):
                found: Any = await socket.receive_json()

        assert (found["status"], found["code"]) == FORBIDDEN, path

    assert (await gateways.done("GET", f"/v1/logs/{LOG}"))["next_offset"] == before
