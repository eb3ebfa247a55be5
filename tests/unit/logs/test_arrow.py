"""Arrow streams as bodies of appends and reads of logs."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import aiohttp
import pytest

from loadtest.ports import free_ports
from quorumlog.net.listen import listening
from quorumlog.protocol import batch
from quorumlog.protocol.batch import Record
from services.gateway.app import build_app
from services.gateway.edge.http.limits import Limits
from tests.model.logs.model import Cluster
from tests.unit.gateway.fake_engine import FakeEngine
from tests.unit.logs.support import Http

pa = pytest.importorskip("pyarrow", reason="Arrow needs pyarrow")

ARROW = "application/vnd.apache.arrow.stream"
RECORDS = "/v1/logs/log/records"
NOON = datetime(2026, 1, 2, 12, 0, 0, 123000, tzinfo=UTC)


@pytest.fixture
async def log() -> AsyncIterator[Http]:
    gateway = Cluster(1).gateway()
    app = build_app(FakeEngine(), Limits(), logs=gateway.logs)
    async with (
        listening(app, host="127.0.0.1", port=free_ports(1)[0]) as listener,
        aiohttp.ClientSession() as session,
    ):
        http = Http(session, [f"http://127.0.0.1:{listener.port}"])
        assert (await http.ask("PUT", "/v1/logs/log", {})).status == 201
        yield http
    await gateway.end()


def stream(table: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


async def read(log: Http, query: str = "") -> Any:
    answer = await log.ask("GET", f"{RECORDS}?limit=10000{query}", headers={"Accept": ARROW})
    assert answer.status == 200, answer
    return pa.ipc.open_stream(answer.body).read_all(), answer.headers


async def test_records_with_all_that_they_carry_go_in_and_come_out(log: Http) -> None:
    rows = pa.table(
        {
            "value": pa.array(["a", "", "c"]),
            "key": pa.array([b"k", None, b""], pa.binary()),
            "headers": pa.array(
                [[("h", "1"), ("i", "")], None, []], pa.map_(pa.string(), pa.string())
            ),
            "timestamp": pa.array([NOON, NOON, NOON], pa.timestamp("us", tz="UTC")),
        }
    )

    sent = await log.ask("POST", RECORDS, body=stream(rows), headers={"Content-Type": ARROW})
    found, headers = await read(log)

    assert (sent.status, sent.json["first_offset"], sent.json["last_offset"]) == (201, 0, 2)
    assert found.column("value").to_pylist() == [b"a", b"", b"c"]
    assert found.column("key").to_pylist() == [b"k", None, b""]
    assert found.column("headers").to_pylist() == [[("h", "1"), ("i", "")], None, None]
    assert found.column("timestamp").to_pylist() == [NOON] * 3
    assert found.column("offset").to_pylist() == [0, 1, 2]
    assert set(found.column("ledger_id").to_pylist()) == {sent.json["ledger_id"]}
    assert (headers["Next-Offset"], headers["Log-Closed"]) == ("3", "false")


async def test_a_page_may_begin_and_end_within_a_batch(log: Http) -> None:
    for count in (5, 1, 4):
        entries = [{"text": f"{count}-{n}"} for n in range(count)]
        assert (await log.ask("POST", RECORDS, {"records": entries})).status == 201

    found, headers = await read(log, "&from=3")
    short = await log.ask("GET", f"{RECORDS}?limit=4&from=3", headers={"Accept": ARROW})

    assert found.column("offset").to_pylist() == list(range(3, 10))
    assert found.column("value").to_pylist()[:4] == [b"5-3", b"5-4", b"1-0", b"4-0"]
    assert headers["Next-Offset"] == "10"
    part = pa.ipc.open_stream(short.body).read_all()
    assert part.column("value").to_pylist() == [b"5-3", b"5-4", b"1-0", b"4-0"]
    assert short.headers["Next-Offset"] == "7"


async def test_at_the_end_a_reader_waits_for_something_new(log: Http) -> None:
    nothing, headers = await read(log, "&wait_ms=1")

    assert (nothing.num_rows, headers["Next-Offset"]) == (0, "0")


@pytest.mark.parametrize(
    "columns",
    [
        {"value": ["x"], "headers": [[("h", "1"), ("h", "2")]]},
        {"value": ["x"], "headers": [[("h", None)]]},
        {"value": ["x"], "headers": [[("h", "x" * 70_000)]]},
        {"value": ["x"], "timestamp": [1]},
        {"value": ["x"], "partition": [1]},
    ],
)
async def test_records_that_no_log_takes_are_refused(log: Http, columns: dict[str, Any]) -> None:
    kinds = {"headers": pa.map_(pa.string(), pa.string())}
    rows = pa.table({name: pa.array(v, kinds.get(name)) for name, v in columns.items()})

    sent = await log.ask("POST", RECORDS, body=stream(rows), headers={"Content-Type": ARROW})

    assert sent.status in (400, 422), sent
    assert (await read(log))[0].num_rows == 0


def test_columns_of_a_stored_batch_are_its_records() -> None:
    from quorumlog.wire import columns

    records = [
        Record(b"v" * n, None if n % 3 else b"k" * n, (("h", str(n)),) if n % 2 else ())
        for n in range(50)
    ]
    data = batch.placed(batch.encode(records), append_time_ms=5, records_before=7)

    part = batch.opened(data).part(3, 40)
    found = columns.records(part, first_offset=10, time_ms=5, ledger_id=1, entry_id=2)

    found.validate(full=True)
    assert found.column("value").to_pylist() == [r.value for r in records[3:43]]
    assert found.column("key").to_pylist() == [r.key for r in records[3:43]]
    assert found.column("offset").to_pylist() == list(range(10, 50))
    for at in range(len(data)):
        with pytest.raises(batch.BadBatch):
            batch.opened(data[:at])


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_that_readers_could_not_be_told_are_refused(unit: str) -> None:
    """Reads would cut these to the nearest that calendars have."""
    from quorumlog.wire import columns

    def records_at(*times: int | None) -> list[Record]:
        column = pa.array(times, pa.int64()).cast(pa.timestamp(unit, tz="UTC"))
        return columns.records_of(pa.table({"value": [b""] * len(times), "timestamp": column}))

    per_s = {"s": 1, "ms": 1000, "us": 10**6, "ns": 10**9}[unit]
    first, end = -62_135_596_800 * per_s, 253_402_300_800 * per_s
    if unit == "ns":  # 64 bits of them end in 2262
        first, end = -(2**63), 2**63
    taken = records_at(first, None, end - 1)
    assert [record.timestamp_ms is None for record in taken] == [False, True, False]
    assert records_at(None)[0].timestamp_ms is None
    for wrong in (first - 1, end):
        if -(2**63) <= wrong < 2**63:
            with pytest.raises(columns.BadColumns, match="years 1 to 9999"):
                records_at(wrong)
