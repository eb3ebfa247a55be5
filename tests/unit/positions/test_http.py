"""Consumers over HTTP: codes, preconditions, what is told. The ledgers behind are the model's."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import aiohttp
import pytest

from loadtest.ports import free_ports
from quorumlog.errors import EntryUnavailable
from quorumlog.net.listen import listening
from quorumlog.protocol import positions as protocol_positions
from quorumlog.protocol.log import LogMetadata
from quorumlog.wire.position_bodies import POSITIONS_LOG
from services.gateway.app import build_app
from services.gateway.edge.consumer_models import (
    ConsumerList,
    ConsumerModel,
    PositionList,
    PositionModel,
)
from services.gateway.edge.http.limits import Limits
from services.gateway.edge.transactions import TransactionBegin
from services.gateway.logs import consumers
from services.gateway.logs.reading import LogReader
from tests.model.logs.model import Cluster
from tests.unit.gateway.fake_engine import FakeEngine
from tests.unit.logs.support import Answer, Http

LOG = "/v1/logs/log"
ME = f"{LOG}/consumers/me"
LEASE = f"{ME}/lease"


@functools.cache
def ports() -> list[int]:
    return free_ports(2)


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[Http, Cluster]]:
    """Two gateways with logs in memory, and a log of ten records."""
    cluster = Cluster(1)
    gateways = [cluster.gateway(), cluster.gateway()]
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        urls = []
        for gateway, port in zip(gateways, ports(), strict=True):
            stack.push_async_callback(gateway.end)
            app = build_app(FakeEngine(), Limits(), logs=gateway.logs)
            listener = await stack.enter_async_context(listening(app, host="127.0.0.1", port=port))
            urls.append(f"http://127.0.0.1:{listener.port}")
        http = Http(session, urls)
        assert (await http.ask("PUT", LOG, {})).status == 201
        await append(http, 10)
        yield http, cluster


@pytest.fixture
async def http() -> AsyncIterator[Http]:
    async with served() as (found, _):
        yield found


async def append(http: Http, count: int, *, at: int = 0) -> None:
    entries = [{"text": str(number)} for number in range(count)]
    answer = await http.ask("POST", f"{LOG}/records", {"records": entries}, at=at)
    assert answer.status == 201


def code(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.json["code"]


async def commit(http: Http, offset: int, *, at: int = 0, **headers: str) -> Answer:
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return await http.ask("PUT", ME, {"offset": offset}, at=at, headers=named)


async def pages_of(http: Http, query: str, *, at: int = 0) -> list[Any]:
    """All pages of a list."""
    pages: list[Any] = [(await http.ask("GET", query, at=at)).json]
    while (after := pages[-1]["next"]) is not None:
        pages.append((await http.ask("GET", f"{query}&after={after}", at=at)).json)
    return pages


async def acquire(http: Http, holder: str, *, at: int = 0, start: Any = "earliest") -> Answer:
    return await http.ask("POST", LEASE, {"holder": holder, "from": start}, at=at)


async def test_a_position_is_made_moved_shown_listed_and_deleted(http: Http) -> None:
    made = await commit(http, 2, If_None_Match="*")
    again = await commit(http, 2, If_None_Match="*")
    moved = await commit(http, 7, If_Match=made.headers["ETag"], at=1)
    stale = await commit(http, 8, If_Match=made.headers["ETag"])
    shown = await http.ask("GET", ME, at=1)
    listed = await http.ask("GET", f"{LOG}/consumers")
    deleted = await http.ask("DELETE", ME)
    assert made.status == moved.status == 200
    PositionModel.model_validate(made.json)
    assert code(again) == code(stale) == (412, "version-conflict")
    assert stale.json["current"] == {"offset": 7, "version": moved.json["version"]}
    ConsumerModel.model_validate(shown.json)
    assert (shown.json["offset"], shown.json["state"]) == (7, "ok")
    assert shown.json["lag"]["records"] == 3
    assert shown.headers["ETag"] == moved.headers["ETag"] == f'"{moved.json["version"]}"'
    ConsumerList.model_validate(listed.json)
    assert listed.json["consumers"][0]["consumer"] == "me"
    assert deleted.status == 204
    assert code(await http.ask("GET", ME)) == (404, "no-such-consumer")


async def test_a_commit_without_a_precondition_changes_nothing(http: Http) -> None:
    assert code(await commit(http, 2)) == (428, "precondition-required")
    assert code(await http.ask("PUT", LEASE)) == (428, "precondition-required")
    assert code(await http.ask("GET", ME)) == (404, "no-such-consumer")


async def test_a_position_goes_back_by_a_reset_only_which_fences_the_holder(http: Http) -> None:
    lease = (await acquire(http, "w1")).json["lease"]
    token = str(lease["fencing_token"])
    assert (await commit(http, 8, Fencing_Token=token)).status == 200
    assert code(await commit(http, 7, Fencing_Token=token)) == (409, "position-behind")
    reset = await http.ask("POST", f"{ME}/reset", {"to": 3}, at=1)
    assert (reset.status, reset.json["offset"], reset.json["lease"]) == (200, 3, None)
    assert code(await commit(http, 9, Fencing_Token=token)) == (409, "lease-lost")
    again = (await acquire(http, "w1")).json["lease"]
    assert again["fencing_token"] > lease["fencing_token"]


async def test_a_held_lease_is_told_and_a_released_one_is_free_at_once(http: Http) -> None:
    first = await acquire(http, "w1", start="latest")
    other = await acquire(http, "w2", at=1)
    plain = await commit(http, 10, If_Match=first.headers["ETag"])
    token = {"Fencing-Token": str(first.json["lease"]["fencing_token"])}
    renewed = await http.ask("PUT", LEASE, headers=token, at=1)
    released = await http.ask("DELETE", LEASE, headers=token)
    taken = await acquire(http, "w2", at=1)
    assert first.json["offset"] == 10
    assert code(other) == code(plain) == (409, "lease-held")
    assert (other.json["holder"], 0 < other.json["expires_in_ms"] <= 30_000) == ("w1", True)
    assert (renewed.status, released.status, taken.status) == (200, 204, 200)
    assert code(await http.ask("PUT", LEASE, headers=token)) == (409, "lease-lost")


async def test_a_log_made_again_under_its_name_is_another_one(http: Http) -> None:
    token = str((await acquire(http, "w1")).json["lease"]["fencing_token"])
    assert (await http.ask("DELETE", LOG)).status == 204
    assert code(await http.ask("GET", ME)) == (404, "no-such-log")
    assert (await http.ask("PUT", LOG, {})).status == 201
    shown = (await http.ask("GET", ME)).json
    assert (shown["state"], shown["lag"]) == ("log-replaced", None)
    assert code(await acquire(http, "w2")) == (409, "log-replaced")
    assert code(await acquire(http, "w1")) == (409, "log-replaced")
    reset = await http.ask("POST", f"{ME}/reset", {"to": "earliest"})
    assert (reset.json["state"], reset.json["offset"]) == ("ok", 0)
    assert code(await commit(http, 0, Fencing_Token=token)) == (409, "lease-lost")


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("is_commit", [False, True])
async def test_a_consumer_that_was_reset_into_the_new_log_is_refused_nowhere(
    http: Http, at: int, is_commit: bool
) -> None:
    """Also by a gateway that has read the old log's row just now."""
    token = {"Fencing-Token": str((await acquire(http, "w1")).json["lease"]["fencing_token"])}
    assert (await http.ask("PUT", LEASE, headers=token, at=at)).status == 200
    assert (await http.ask("DELETE", LOG)).status == 204
    assert (await http.ask("PUT", LOG, {})).status == 201
    await append(http, 3)
    assert (await http.ask("POST", f"{ME}/reset", {"to": "earliest"})).status == 200
    token = {"Fencing-Token": str((await acquire(http, "w1")).json["lease"]["fencing_token"])}
    if is_commit:
        assert (await commit(http, 3, at=at, Fencing_Token=token["Fencing-Token"])).status == 200
    else:
        assert (await http.ask("PUT", LEASE, headers=token, at=at)).status == 200


async def test_no_commit_is_checked_against_the_end_of_a_deleted_log(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a gateway waits for the new log's end, it must not use the end that it knows of the
    deleted log of the same name.
    """
    first = str((await acquire(http, "w1")).json["lease"]["fencing_token"])
    assert (await commit(http, 10, Fencing_Token=first)).status == 200
    assert (await http.ask("DELETE", LOG, at=1)).status == 204
    created = (await http.ask("PUT", LOG, {}, at=1)).json["created_at"]
    assert (await http.ask("POST", f"{ME}/reset", {"to": "earliest"}, at=1)).status == 200
    lease = (await acquire(http, "w1", at=1)).json["lease"]
    token, waits, go_on = str(lease["fencing_token"]), asyncio.Event(), asyncio.Event()
    end_of = consumers.Consumers.end

    async def end(service: consumers.Consumers, row: LogMetadata) -> int:
        if row.created_at == created and not waits.is_set():
            waits.set()
            await go_on.wait()
        return await end_of(service, row)

    monkeypatch.setattr(consumers.Consumers, "end", end)
    beyond = asyncio.ensure_future(commit(http, 50, Fencing_Token=token))
    await waits.wait()
    meanwhile = await commit(http, 5, Fencing_Token=token)
    go_on.set()

    assert code(meanwhile) == code(await beyond) == (422, "invalid")
    assert (await http.ask("GET", ME)).json["offset"] == 0


async def test_a_displaced_owner_limits_no_offset_of_a_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A recovery has closed the ledger above the end that the owner knows (rule 27b). Another
    gateway returned records up to the higher end, so commits, resets and queues accept it.
    """
    async with served() as (http, cluster):
        (ledger,) = cluster.ledgers
        await next(iter(cluster.gateways.values())).recover(ledger)
        end_of, tail_of = consumers.Consumers.end, LogReader.tail

        async def end(service: consumers.Consumers, row: LogMetadata) -> int:
            return await end_of(service, row) - 1

        async def tail(reader: LogReader, *given: Any, **named: Any) -> tuple[int, bool]:
            found, is_closed = await tail_of(reader, *given, **named)
            return found - 1, is_closed

        monkeypatch.setattr(consumers.Consumers, "end", end)
        monkeypatch.setattr(LogReader, "tail", tail)

        assert (await commit(http, 10, at=1, If_None_Match="*")).status == 200
        assert (await http.ask("POST", f"{ME}/reset", {"to": 10}, at=1)).json["offset"] == 10
        queue = await http.ask("PUT", f"{LOG}/queues/work", {"from": 10}, at=1)
        assert queue.json["next"] == 10
        archived = await http.ask("POST", f"{LOG}/archived", {"through": 10, "expect": None}, at=1)
        assert archived.json["archived_through"] == 10
        assert code(await commit(http, 11, at=1, If_None_Match="*")) == (422, "invalid")


async def test_a_consumer_below_the_logs_beginning_is_told(http: Http) -> None:
    await commit(http, 2, If_None_Match="*")
    assert (await http.ask("POST", f"{LOG}/roll")).status == 200
    await append(http, 5)
    assert (await http.ask("POST", f"{LOG}/truncate", {"before": 10})).status == 200
    shown = (await http.ask("GET", ME)).json
    refused = await acquire(http, "w1")
    assert (shown["state"], shown["lag"]["records"]) == ("offset-truncated", 5)
    assert code(refused) == (410, "offset-truncated")
    assert refused.json["first_offset"] == 10
    below = await http.ask("POST", f"{ME}/reset", {"to": 9})
    assert code(below) == (422, "invalid")
    assert (await http.ask("POST", f"{ME}/reset", {"to": "earliest"})).json["offset"] == 10
    assert (await acquire(http, "w1")).status == 200


async def test_a_consumer_is_put_to_a_time_or_before_the_end_and_begins_there() -> None:
    async with served() as (http, cluster):
        cluster.ahead_ms += 3600 * 1000
        between = datetime.fromtimestamp(cluster.database_ms() / 1000 - 60, UTC).isoformat()
        await append(http, 5)
        expected = (
            (between, 10),
            ("1999-01-01T00:00:00+02:00", 0),
            ("2999-01-01T00:00:00Z", 15),
            (-3, 12),
            (-100, 0),
        )

        for number, (start, offset) in enumerate(expected):
            path = f"{LOG}/consumers/c{number}"
            begun = await http.ask("POST", f"{path}/lease", {"holder": "w", "from": start})
            assert (begun.status, begun.json["offset"]) == (200, offset), start
            assert (await http.ask("POST", f"{path}/reset", {"to": "latest"})).status == 200
            reset = await http.ask("POST", f"{path}/reset", {"to": start}, at=1)
            assert (reset.status, reset.json["offset"]) == (200, offset), start
        for wrong in ("2026-01-02T03:04:05", "2026-01-02T03:04:05 02:00", "-3", -(2**63)):
            refused = await http.ask("POST", f"{LOG}/consumers/c0/reset", {"to": wrong})
            assert code(refused) == (422, "invalid"), wrong


async def test_the_list_has_the_lag_in_records_bytes_and_time() -> None:
    async with served() as (http, cluster):
        row = (await http.ask("GET", LOG)).json
        assert row["next_offset"] == 10
        await commit(http, 10, If_None_Match="*")
        await append(http, 3)
        await append(http, 4)
        cluster.ahead_ms += 3600 * 1000

        (shown,) = (await http.ask("GET", f"{LOG}/consumers", at=1)).json["consumers"]

        ledgers = [cluster.ledgers[item.ledger_id] for item in cluster.logs["log"].items]
        entries = [entry for ledger in ledgers for entry in ledger.entries]
        assert shown["lag"]["records"] == 7
        assert shown["lag"]["bytes"] == sum(map(len, entries[1:]))
        assert 3_600_000 <= shown["lag"]["ms"] < 7_200_000


async def test_a_position_beyond_the_end_is_refused(http: Http) -> None:
    assert code(await commit(http, 11, If_None_Match="*")) == (422, "invalid")
    assert (await commit(http, 10, If_None_Match="*")).status == 200
    await append(http, 1)
    token = str((await acquire(http, "w1")).json["lease"]["fencing_token"])
    assert (await commit(http, 11, Fencing_Token=token, at=1)).status == 200
    assert code(await commit(http, 12, Fencing_Token=token)) == (422, "invalid")


async def test_reads_make_no_log_of_positions_and_it_is_hidden_from_clients() -> None:
    async with served() as (http, cluster):
        own = f"/v1/logs/{POSITIONS_LOG}"
        assert (await http.ask("GET", f"{LOG}/consumers")).json == {"consumers": [], "next": None}
        assert code(await http.ask("GET", ME)) == (404, "no-such-consumer")
        assert code(await http.ask("POST", f"{ME}/reset", {"to": 1})) == (404, "no-such-consumer")
        assert list(cluster.logs) == ["log"]
        await commit(http, 1, If_None_Match="*")
        assert sorted(cluster.logs) == ["log", POSITIONS_LOG]
        assert (await http.ask("PUT", "/v1/logs/z", {})).status == 201
        pages = await pages_of(http, "/v1/logs?limit=1")
        assert [log["name"] for page in pages for log in page["logs"]] == ["log", "z"]
        assert POSITIONS_LOG not in [page["next"] for page in pages]
        for method, path in (
            ("GET", own),
            ("DELETE", own),
            ("PUT", own),
            ("GET", f"{own}/records"),
            ("POST", f"{own}/truncate"),
            ("GET", f"{own}/consumers"),
        ):
            body: Any = {} if method in ("PUT", "POST") else None
            assert code(await http.ask(method, path, body)) == (422, "invalid"), (method, path)


def test_no_transaction_begins_on_the_log_of_positions() -> None:
    TransactionBegin.model_validate({"log": "log"})
    with pytest.raises(ValueError, match="reserved for the cluster"):
        TransactionBegin.model_validate({"log": POSITIONS_LOG})


async def test_many_consumers_are_listed_in_pages_and_commit_in_few_appends() -> None:
    async with served() as (http, cluster):
        names = [f"c{at:03}" for at in range(120)]

        async def make(at: int, name: str) -> int:
            path = f"{LOG}/consumers/{name}"
            headers = {"If-None-Match": "*"}
            made = await http.ask("PUT", path, {"offset": 1}, at=at % 2, headers=headers)
            return made.status

        await make(0, "c-first")
        assert set(await asyncio.gather(*(make(at, name) for at, name in enumerate(names)))) == {
            200
        }
        row = cluster.logs[POSITIONS_LOG]
        batches = sum(len(cluster.ledgers[item.ledger_id].entries) for item in row.items)
        assert batches < len(names)
        pages = await pages_of(http, f"{LOG}/consumers?limit=50", at=1)
        listed = [consumer["consumer"] for page in pages for consumer in page["consumers"]]
        assert listed == ["c-first", *names]


async def test_consumers_are_listed_by_the_beginning_of_their_names(http: Http) -> None:
    names = ("a", "a-", "a-1", "a-2", "a-2.x", "a.", "aa", "b", "A-1")
    for name in names:
        path, new = f"{LOG}/consumers/{name}", {"If-None-Match": "*"}
        assert (await http.ask("PUT", path, {"offset": 1}, headers=new)).status == 200

    async def listed(prefix: str, limit: int) -> list[str]:
        pages = await pages_of(http, f"{LOG}/consumers?prefix={prefix}&limit={limit}", at=1)
        return [consumer["consumer"] for page in pages for consumer in page["consumers"]]

    for prefix in ("a", "a-", "a-1", "a-2", "a.", "aa", "A", "b", "c", "0", "z" * 200):
        wanted = sorted(name for name in names if name.startswith(prefix))
        for limit in (1, 2, 100):
            assert await listed(prefix, limit) == wanted
    for wrong in ("", "-", "%2F", "a b", "a" * 201):
        refused = await http.ask("GET", f"{LOG}/consumers?prefix={wrong}")
        assert code(refused) == (422, "invalid")


async def test_a_log_beyond_those_that_are_remembered_is_looked_at_again(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers, "_ROWS_MAX", 1)
    assert (await http.ask("PUT", "/v1/logs/other", {})).status == 201
    headers = {"If-None-Match": "*"}
    for name, log in (("a", LOG), ("b", "/v1/logs/other"), ("c", LOG)):
        path = f"{log}/consumers/{name}"
        assert (await http.ask("PUT", path, {"offset": 0}, headers=headers)).status == 200


@pytest.mark.parametrize(
    ("method", "path", "json", "headers"),
    [
        ("PUT", ME, {"offset": -1}, {"If-None-Match": "*"}),
        ("PUT", ME, {"offset": 1}, {"If-None-Match": '"1"'}),
        ("PUT", ME, {"offset": 1}, {"If-Match": "1"}),
        ("PUT", f"{LOG}/consumers/.me", {"offset": 1}, {"If-None-Match": "*"}),
        ("POST", LEASE, {"holder": ""}, {}),
        ("POST", LEASE, {"holder": "w" * 201}, {}),
        ("POST", LEASE, {"holder": "w", "lease_ms": 600_001}, {}),
        ("POST", LEASE, {"holder": "w", "lease_ms": 999}, {}),
        ("POST", f"{ME}/reset", {"to": "now"}, {}),
        ("GET", f"{LOG}/consumers?limit=1001", None, {}),
    ],
)
async def test_bad_requests_are_refused(
    http: Http, method: str, path: str, json: Any, headers: dict[str, str]
) -> None:
    assert code(await http.ask(method, path, json, headers=headers)) == (422, "invalid")
    assert (await http.ask("GET", f"{LOG}/consumers")).json["consumers"] == []


async def test_one_consumer_more_than_the_most_is_a_conflict_which_changes_nothing(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await commit(http, 1, If_None_Match="*")).status == 200
    monkeypatch.setattr(protocol_positions, "CONSUMERS_MAX", 1)
    other = f"{LOG}/consumers/other"
    leased = await http.ask("POST", f"{other}/lease", {"holder": "w"})
    made = await http.ask("PUT", other, {"offset": 1}, headers={"If-None-Match": "*"})

    assert code(leased) == code(made) == (409, "too-many-consumers")
    listed = (await http.ask("GET", f"{LOG}/consumers")).json["consumers"]
    assert [consumer["consumer"] for consumer in listed] == ["me"]
    assert (await http.ask("DELETE", ME)).status == 204
    assert (await http.ask("POST", f"{other}/lease", {"holder": "w"})).status == 200


async def test_the_consumers_of_all_logs_are_listed_page_by_page(http: Http) -> None:
    assert (await http.ask("PUT", "/v1/logs/events", {})).status == 201
    for path in (ME, f"{LOG}/consumers/mails", "/v1/logs/events/consumers/me"):
        made = await http.ask("PUT", path, {"offset": 0}, headers={"If-None-Match": "*"})
        assert made.status == 200

    async def listed(query: str = "", at: int = 0) -> tuple[list[str], str | None]:
        answer = await http.ask("GET", f"/v1/consumers{query}", at=at)
        shown = PositionList.model_validate(answer.json)
        return [f"{one.log}/{one.consumer}" for one in shown.consumers], shown.next

    assert await listed() == (["events/me", "log/mails", "log/me"], None)
    assert await listed("?limit=2", at=1) == (["events/me", "log/mails"], "log/mails")
    assert await listed("?after=log/mails") == (["log/me"], None)
    assert await listed("?log=log&limit=1") == (["log/mails"], "log/mails")
    assert await listed("?log=log&after=log/mails") == (["log/me"], None)
    assert await listed("?prefix=me") == (["events/me", "log/me"], None)
    assert (await http.ask("DELETE", LOG)).status == 204
    assert code(await http.ask("GET", f"{LOG}/consumers"))[0] in (404, 410)
    assert await listed("?log=log") == (["log/mails", "log/me"], None)
    assert (await http.ask("DELETE", ME)).status == 204
    assert await listed("?log=log") == (["log/mails"], None)


async def test_a_change_that_is_repeated_with_its_key_gets_its_first_answer(http: Http) -> None:
    known = (await acquire(http, "w1")).headers["Consumers-Version"]
    key = {"Idempotency-Key": "k1", "Consumers-Version": known}
    first = await http.ask("POST", f"{ME}/reset", {"to": 3}, headers=key)
    second = await http.ask("POST", f"{ME}/reset", {"to": 7})
    late = await http.ask("POST", f"{ME}/reset", {"to": 3}, headers=key, at=1)
    other = await http.ask("POST", f"{ME}/reset", {"to": 4}, headers=key)
    key = {"Idempotency-Key": "k2", "Consumers-Version": "0"}
    unknown = await http.ask("POST", f"{ME}/reset", {"to": 4}, headers=key)
    absent = await http.ask("POST", f"{ME}/reset", {"to": 4}, headers={"Idempotency-Key": "k3"})
    assert (first.status, second.status, late.status) == (200, 200, 200)
    assert late.headers["ETag"] == first.headers["ETag"]
    assert code(other) == (422, "invalid")
    for refused in (unknown, absent):
        assert code(refused) == (409, "request-outdated")
        assert refused.json["outcome"] == "not-done"
    assert (await http.ask("GET", ME)).json["offset"] == 7
    key["Consumers-Version"] = str(unknown.json["version"])
    assert (await http.ask("POST", f"{ME}/reset", {"to": 4}, headers=key)).status == 200


async def test_all_copies_of_a_commit_get_one_answer_over_different_rows(http: Http) -> None:
    """A gateway that has read the old log's row just now, and one that has read the new one's."""
    token = str((await acquire(http, "w1")).json["lease"]["fencing_token"])
    assert (await commit(http, 5, Fencing_Token=token)).status == 200
    assert (await http.ask("DELETE", LOG, at=1)).status == 204
    assert (await http.ask("PUT", LOG, {}, at=1)).status == 201
    await append(http, 3, at=1)
    reset = await http.ask("POST", f"{ME}/reset", {"to": "earliest"}, at=1)
    version, etag = reset.headers["Consumers-Version"], reset.headers["ETag"]

    async def copy(at: int) -> Answer:
        return await commit(
            http, 2, at=at, If_Match=etag, Idempotency_Key="k", Consumers_Version=version
        )

    first, late = await copy(0), await copy(1)
    assert (first.status, late.status) == (200, 200)
    assert late.headers["ETag"] == first.headers["ETag"]


async def test_a_refused_reset_moves_nothing(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    await commit(http, 5, If_None_Match="*")

    async def away(*_: Any) -> int:
        raise EntryUnavailable("the log's end can't be read now")

    monkeypatch.setattr(consumers.Consumers, "end", away)
    refused = await http.ask("POST", f"{ME}/reset", {"to": "earliest"})
    monkeypatch.undo()
    assert refused.json["outcome"] == "not-done"
    assert (await http.ask("GET", ME)).json["offset"] == 5


async def test_a_held_lease_passes_only_to_a_later_start_of_its_holder(http: Http) -> None:
    async def take(started: int) -> Answer:
        return await http.ask("POST", LEASE, {"holder": "w", "started": started})

    assert [(await take(started)).status for started in (1, 2)] == [200, 200]
    for refused in (await take(1), await take(2), await acquire(http, "w")):
        assert code(refused) == (409, "lease-held")
