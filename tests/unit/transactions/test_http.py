"""Transactions over HTTP on one real cluster of two gateways: what each request is answered."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from loadtest.cluster import running
from loadtest.stores import Stores
from services.gateway.edge.models import Ledger
from services.gateway.edge.transactions import TransactionModel
from tests.support.waiting import SETTLED_S, until, within
from tests.unit.logs.support import Http
from tests.unit.transactions.support import LOG, TRANSACTIONS, begin, code, end, settled, write


@asynccontextmanager
async def a_log(stores: Stores) -> AsyncIterator[Http]:
    async with running(stores) as cluster, aiohttp.ClientSession() as session:
        http = Http(session, cluster.gateways)
        await http.done("PUT", LOG, {})
        yield http


async def test_transactions_through_any_gateway_of_a_real_cluster(stores: Stores) -> None:
    async with a_log(stores) as http:
        await _commits_and_repeats(http)
        await _keeps_order_with_appends(http)
        await _refuses_what_is_over(http)
        await _counts_versions(http)
        await _overwrites(http)
        await _says_what_is_wrong(http)
        await _takes_streams_of_no_records(http)
        await _leaves_no_ledger_behind(http)


async def _commits_and_repeats(http: Http) -> None:
    name = await begin(http)
    one = await write(http, name, [["a", "b"], ["c"]], partition=0)
    two = await write(http, name, [["d"]], partition=1, at=1)
    loser = await write(http, name, [["x"]], partition=1)
    shown = await http.done("GET", f"/v1/ledgers/{one}")
    Ledger.model_validate(shown)
    assert (shown["log"], shown["transaction"], shown["partition"]) == ("log", name, 0)
    opened = await http.done("GET", f"{TRANSACTIONS}/{name}", at=1)
    TransactionModel.model_validate(opened)
    assert [ledger["ledger_id"] for ledger in opened["ledgers"]] == sorted([one, two, loser])
    assert await http.contents("log") == []

    wanted = {"ledgers": [{"ledger_id": one, "last_entry": 1}, two]}
    done = await end(http, name, "commit", wanted, at=1)
    repeats = [await end(http, name, "commit", wanted, at=at) for at in (0, 1)]

    assert done.status == 200, done
    TransactionModel.model_validate(done.json)
    assert all(repeat.json == done.json for repeat in repeats)
    assert (done.json["first_offset"], done.json["last_offset"]) == (0, 3)
    for at in (0, 1):
        assert await http.contents("log", at=at) == ["a", "b", "c", "d"]
    assert code(await end(http, name, "abort")) == (409, "transaction-committed")
    assert await http.contents("log") == ["a", "b", "c", "d"]


async def _keeps_order_with_appends(http: Http) -> None:
    producer = {"Producer-Id": "p", "Producer-Epoch": "0", "Producer-Seq": "0"}
    entries = f"{LOG}/records"
    first = await settled(http, entries, {"text": "e"}, at=1, headers=producer)
    name = await begin(http)
    one = await write(http, name, [["f", "g"]])

    done = await end(http, name, "commit", {"ledgers": [one]})
    again = await settled(http, entries, {"text": "e"}, headers=producer)
    following = producer | {"Producer-Seq": "1"}
    after = await settled(http, entries, {"text": "h"}, at=1, headers=following)

    assert (first.json["first_offset"], done.json["first_offset"]) == (4, 5)
    assert again.headers["Producer-Duplicate"] == "true"
    assert again.json["first_offset"] == 4
    assert after.json["first_offset"] == 7
    assert await http.contents("log") == list("abcdefgh")


async def _refuses_what_is_over(http: Http) -> None:
    name = await begin(http)
    one = await write(http, name, [["x"]], seal=False)

    aborted = [await end(http, name, "abort", at=at) for at in (1, 0)]

    assert [answer.json["state"] for answer in aborted] == ["ABORTED", "ABORTED"]
    for at in (0, 1):
        # Or its deletion was faster.
        refusals = [(409, "transaction-aborted"), (404, "no-such-ledger")]
        path, late = f"/v1/ledgers/{one}/entries", {"entries": [{"text": "y"}]}
        assert code(await settled(http, path, late, at=at)) in refusals
        more = await settled(http, "/v1/ledgers", {"transaction": name}, at=at)
        assert code(more) == (409, "transaction-aborted")
        refused = await end(http, name, "commit", {"ledgers": [one]}, at=at)
        assert code(refused) == (409, "transaction-aborted")
    assert await http.contents("log") == list("abcdefgh")


async def _counts_versions(http: Http) -> None:
    once: dict[str, Any] = {"app": "nightly", "version": 7}
    name = await begin(http, **once)
    assert await begin(http, at=1, **once) == name
    mine, theirs = [await write(http, name, [[value]]) for value in ("i", "I")]

    both = await asyncio.gather(
        end(http, name, "commit", {"ledgers": [mine]}),
        end(http, name, "commit", {"ledgers": [theirs]}, at=1),
    )
    later = await settled(http, TRANSACTIONS, {"log": "log", **once})
    earlier = await settled(http, TRANSACTIONS, {"log": "log", "app": "nightly", "version": 6})

    assert [answer.status for answer in both] == [200, 200], both
    assert sorted(answer.json["duplicate"] for answer in both) == [False, True]
    found = await http.contents("log")
    assert (found[:-1], found[-1].lower()) == (list("abcdefgh"), "i")
    assert (later.status, later.json["state"]) == (200, "COMMITTED")
    assert (earlier.status, earlier.json["duplicate"]) == (200, True)


async def _overwrites(http: Http) -> None:
    name = await begin(http)
    one = await write(http, name, [["new"]])
    over = {"ledgers": [one], "overwrite": True}

    await http.done("PATCH", LOG, {"deletion_protection": True})
    assert code(await end(http, name, "commit", over, at=1)) == (409, "log-protected")
    await http.done("PATCH", LOG, {"deletion_protection": False})
    done = await end(http, name, "commit", over, at=1)

    assert done.json["first_offset"] == 9
    assert await http.contents("log") == ["new"]
    gone = await settled(http, f"{LOG}/records?from=3", method="GET")
    assert code(gone) == (410, "offset-truncated")
    assert (await http.done("GET", LOG))["first_offset"] == 9


async def _says_what_is_wrong(http: Http) -> None:
    name, other = await begin(http), await begin(http)
    still_open = await write(http, name, [["x"]], seal=False)
    foreign = await write(http, other, [["x"]])
    mine = await write(http, name, [["x"]])

    for wrong in (
        {},
        {"ledgers": [still_open]},
        {"ledgers": [foreign]},
        {"ledgers": [mine, mine]},
        {"ledgers": [{"ledger_id": mine, "last_entry": 1}]},
        {"ledgers": [mine], "more": 1},
    ):
        assert code(await end(http, name, "commit", wrong)) == (422, "invalid"), wrong
    for body in ({}, {"log": "log", "app": "a"}, {"log": "-"}, {"log": "log", "expires_in_s": 0}):
        assert code(await settled(http, TRANSACTIONS, body)) == (422, "invalid"), body
    for ledger in ({"partition": 1}, {"transaction": name, "ensemble_size": 3}):
        assert code(await settled(http, "/v1/ledgers", ledger)) == (422, "invalid"), ledger
    absent = [
        await settled(http, f"{TRANSACTIONS}/nothing", method="GET"),
        await end(http, "nothing", "abort"),
        await end(http, "nothing", "commit", {"ledgers": []}),
        await settled(http, "/v1/ledgers", {"transaction": "nothing"}),
    ]
    assert [code(answer) for answer in absent] == [(404, "no-such-transaction")] * 4
    assert code(await settled(http, TRANSACTIONS, {"log": "none"})) == (404, "no-such-log")
    deleted = await settled(http, f"/v1/ledgers/{mine}", method="DELETE")
    assert code(deleted) == (409, "owned-by-log")
    assert (await end(http, name, "commit", {"ledgers": []})).json["state"] == "COMMITTED"
    assert (await end(http, other, "abort")).status == 200


async def _takes_streams_of_no_records(http: Http) -> None:
    """Entries that are no record batch, once published, would stop all readers of the log."""
    name = await begin(http)
    mine = await write(http, name, [["x"]])
    path = f"/v1/ledgers/{mine}"
    for at in (0, 1):
        lines = await http.ask(
            "POST",
            f"{path}/entries",
            at=at,
            body=b'{"text":"y"}\n',
            headers={"Content-Type": "application/x-ndjson"},
        )
        assert code(lines) == (409, "owned-by-log")
        async with (
            within("the socket answers"),
            http.session.ws_connect(f"{http.urls[at]}{path}/ws") as socket,
        ):
            await socket.send_json({"text": "y"})
            assert (await socket.receive_json())["code"] == "owned-by-log"
    assert (await end(http, name, "abort")).status == 200


async def _leaves_no_ledger_behind(http: Http) -> None:
    async def written() -> str | None:
        """One that expires soon; on a slow machine maybe before its ledger is made."""
        name = await begin(http, expires_in_s=1)
        made = await settled(http, "/v1/ledgers", {"transaction": name})
        return name if made.status == 201 else None

    left = await until(written, "a ledger is made in time")

    async def is_clean() -> bool:
        ledgers = (await http.done("GET", "/v1/ledgers?log=log&limit=1000"))["ledgers"]
        mine = {ledger["ledger_id"] for ledger in ledgers if "transaction" in ledger}
        log = await http.done("GET", LOG)
        # Those of an overwritten generation stay for a while, for who reads them.
        on_log = {ledger["ledger_id"] for ledger in log["ledgers"]}
        fresh = {ledger for ledger in mine - on_log if not await _was_published(http, ledger)}
        return not fresh

    await until(is_clean, "what was not published is gone", SETTLED_S)
    assert (await http.done("GET", f"{TRANSACTIONS}/{left}"))["state"] == "ABORTED"
    assert await http.contents("log") == ["new"]


async def _was_published(http: Http, ledger_id: int) -> bool:
    ledger = await settled(http, f"/v1/ledgers/{ledger_id}", method="GET")
    if ledger.status == 404:
        return True
    found = await http.done("GET", f"{TRANSACTIONS}/{ledger.json['transaction']}")
    if found["state"] != "COMMITTED":
        return False
    return ledger_id in [published["ledger_id"] for published in found["ledgers"]]
