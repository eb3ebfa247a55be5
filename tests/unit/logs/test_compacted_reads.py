"""A compacted log over HTTP: every form of a read skips what is gone, and so do queues (rule 27d)."""

from collections.abc import AsyncIterator
from typing import Any, Final

import aiohttp
import orjson
import pyarrow as pa
import pytest

from quorumlog.net.listen import listening
from services.gateway.app import build_app
from services.gateway.edge.http.limits import Limits
from tests.model.logs.model import Cluster
from tests.support.waiting import until
from tests.unit.gateway.fake_engine import FakeEngine
from tests.unit.logs.support import Http
from tests.unit.logs.test_http import LOG, RECORDS, code, port
from tests.unit.logs.test_rewrites import swept

LEFT: Final = [(5, "a", "5"), (6, "c", "6"), (7, "b", None), (8, "d", "8")]


@pytest.fixture
async def http() -> AsyncIterator[Http]:
    """A log of nine records, of which the first five are gone, in a compacted and an open ledger."""
    cluster = Cluster(1)
    gateway = cluster.gateway()
    app = build_app(FakeEngine(), Limits(comment_every_s=0.5), logs=gateway.logs)
    async with (
        listening(app, host="127.0.0.1", port=port()) as listener,
        aiohttp.ClientSession() as session,
    ):
        http = Http(session, [f"http://127.0.0.1:{listener.port}"])
        await http.done("PUT", LOG, {"cleanup_policy": "compact"})
        for keys in ("abaaca", "c"):
            begin = {"abaaca": 0, "c": 6}[keys]
            records = [{"key": key, "text": f"{begin + n}"} for n, key in enumerate(keys)]
            await http.done("POST", RECORDS, {"records": records})
            await http.done("POST", f"{LOG}/roll")
        await http.done("POST", RECORDS, {"key": "b", "text": None})
        await http.done("POST", f"{LOG}/roll")
        await swept(gateway)
        await until(lambda: len(cluster.logs["log"].items) == 2, "the log is compacted")
        await http.done("POST", RECORDS, {"key": "d", "text": "8"})
        yield http
    await gateway.end()


def shown(records: list[dict[str, Any]]) -> list[tuple[int, str, str | None]]:
    return [(one["offset"], one["key"], one["text"]) for one in records]


@pytest.mark.parametrize("limit", [1, 2, 100])
async def test_lists_skip_removed_records(http: Http, limit: int) -> None:
    found, at = [], 0
    while True:
        query = f"encoding=text&from={at}&limit={limit}"
        page = await http.done("GET", f"{RECORDS}?{query}")
        found += shown(page["records"])
        if page["next"] == at:
            break
        at = page["next"]
    assert (found, at) == (LEFT, 9)
    page = await http.done("GET", f"{RECORDS}?encoding=text&from=3&limit={limit}")
    assert shown(page["records"]) == LEFT[:limit]


async def test_all_forms_skip_removed_records(http: Http) -> None:
    lines = await http.ask(
        "GET", f"{RECORDS}?encoding=text&limit=9", headers={"Accept": "application/x-ndjson"}
    )
    assert shown([*map(orjson.loads, lines.body.splitlines())]) == LEFT
    events = await http.ask(
        "GET", f"{RECORDS}?encoding=text&limit=4", headers={"Accept": "text/event-stream"}
    )
    data = [line[6:] for line in events.body.splitlines() if line.startswith(b'data: {"offset')]
    assert shown([*map(orjson.loads, data)]) == LEFT
    frames = await http.ask("GET", RECORDS, headers={"Accept": "application/vnd.quorumlog.frames"})
    assert frames.headers["Next-Offset"] == "9"
    assert frames.body == b"".join(
        offset.to_bytes(8, "big") + len(text or "").to_bytes(4, "big") + (text or "").encode()
        for offset, _, text in LEFT
    )
    arrow = await http.ask(
        "GET", RECORDS, headers={"Accept": "application/vnd.apache.arrow.stream"}
    )
    table = pa.ipc.open_stream(arrow.body).read_all().select(["offset", "key", "value"])
    assert [
        (o, k.decode(), v and v.decode())
        for o, k, v in zip(*table.to_pydict().values(), strict=True)
    ] == LEFT


@pytest.mark.parametrize(
    ("encoding", "member"), [("base64", "data"), ("text", "text"), ("json", "data_base64")]
)
async def test_a_tombstone_has_null_where_its_value_would_be(
    http: Http, encoding: str, member: str
) -> None:
    page = await http.done("GET", f"{RECORDS}?encoding={encoding}&from=7&limit=1")

    (one,) = page["records"]
    assert one[member] is None
    assert not {"data", "text", "json", "data_base64"} & one.keys() - {member}


async def test_what_a_compacted_log_refuses(http: Http) -> None:
    assert code(await http.ask("POST", RECORDS, {"text": "no key"})) == (422, "key-required")
    both = {"records": [{"key": "aw==", "data": "YQ=="}, {"data": "YQ=="}]}
    assert code(await http.ask("POST", RECORDS, both)) == (422, "key-required")
    assert code(await http.ask("POST", RECORDS, {"text": None})) == (422, "invalid")
    assert code(await http.ask("POST", RECORDS, {"data": None, "key": "no base64"})) == (
        422,
        "invalid",
    )
    null = await http.ask("POST", RECORDS, {"key": "k", "json": None})
    assert null.status == 201
    page = await http.done("GET", f"{RECORDS}?encoding=json&from=9")
    assert page["records"][0]["json"] is None, "the value null of JSON is a value"


@pytest.mark.parametrize("order", ["none", "key"])
async def test_a_queue_counts_removed_records_as_lost(http: Http, order: str) -> None:
    queue = f"{LOG}/queues/q"
    await http.done("PUT", queue, {"order": order})
    done: list[tuple[int, str, str | None]] = []

    async def worked() -> bool:
        claimed = await http.done("POST", f"{queue}/claim?encoding=text", {"max": 3})
        done.extend(shown(claimed["records"]))
        if claimed["records"]:
            parts = [{"claim": claimed["records"][0]["claim"]}]
            await http.done("POST", f"{queue}/ack", {"claims": parts})
        return len(done) == len(LEFT)

    await until(worked, "all records are done")
    assert sorted(done) == LEFT
    view = await http.done("GET", queue)
    assert (view["depth"], view["lost"], view["floor"]) == (0, 5, 9)


async def test_a_claim_goes_on_over_removed_records(http: Http) -> None:
    """It need not wait, and does not take the gap in steps of its `max`: there may be millions."""
    queue = f"{LOG}/queues/q"
    await http.done("PUT", queue, {})

    claimed = await http.done("POST", f"{queue}/claim?encoding=text", {"max": 1})

    assert shown(claimed["records"]) == LEFT[:1]
    view = await http.done("GET", queue)
    assert (view["lost"], view["floor"]) == (5, 5)


async def test_a_stream_is_not_compacted(http: Http) -> None:
    """Its appends have no keys, so all would be refused."""
    assert (await http.ask("PUT", "/v1/stream/a")).status == 201

    answer = await http.ask("PATCH", "/v1/logs/durable-stream.a", {"cleanup_policy": "compact"})

    assert code(answer) == (422, "invalid")
