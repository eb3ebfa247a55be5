"""Arrow streams as bodies of appends and reads of logs."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.ports import free_ports
from quorumlog.net.listen import listening
from quorumlog.protocol import batch, packed
from quorumlog.protocol.batch import BATCH_BYTES_MAX, Record
from quorumlog.protocol.log.messages import Append
from services.gateway.app import build_app
from services.gateway.edge import arrow
from services.gateway.edge.http.limits import Limits
from tests.model.logs.model import Cluster
from tests.unit.gateway.fake_engine import FakeEngine
from tests.unit.logs.support import Http

pa = pytest.importorskip("pyarrow", reason="Arrow needs pyarrow")
pc = pytest.importorskip("pyarrow.compute", reason="Arrow needs pyarrow")
columns = pytest.importorskip("quorumlog.wire.columns", reason="Arrow needs pyarrow")

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
    records = [
        Record(b"v" * n, None if n % 3 else b"k" * n, (("h", str(n)),) if n % 2 else ())
        for n in range(50)
    ]
    data = batch.placed(batch.encode(records), append_time_ms=5, records_before=7)

    part = batch.opened(data).part(3, 40)
    found = columns.records(batch.StoredBatch(10, 1, 2, 5, part))

    found.validate(full=True)
    assert found.column("value").to_pylist() == [r.value for r in records[3:43]]
    assert found.column("key").to_pylist() == [r.key for r in records[3:43]]
    assert found.column("offset").to_pylist() == list(range(10, 50))
    for at in range(len(data)):
        with pytest.raises(batch.BadBatch):
            batch.opened(data[:at])


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_ROWS = st.lists(
    st.builds(
        Record,
        value=st.binary(max_size=50),
        key=st.none() | st.binary(max_size=20),
        headers=st.dictionaries(_TEXT, _TEXT, max_size=3).map(lambda found: tuple(found.items())),
        timestamp_ms=st.none() | st.integers(-62_135_596_800_000, 253_402_300_799_999),
    ),
    min_size=1,
    max_size=30,
)
_KINDS = {"value": pa.binary(), "key": pa.binary(), "headers": pa.map_(pa.string(), pa.string())}
_KINDS["timestamp"] = pa.timestamp("ms", tz="UTC")


def _table(records: list[Record], columns: set[str]) -> Any:
    """The records as a client's table, without the columns that are not in `columns`."""
    found = {
        "value": [record.value for record in records],
        "key": [record.key for record in records],
        "headers": [list(record.headers) or None for record in records],
        "timestamp": [record.timestamp_ms for record in records],
    }
    wanted = {name: pa.array(found[name], _KINDS[name]) for name in found if name in columns}
    return pa.table(wanted)


@given(
    _ROWS,
    st.sets(st.sampled_from(sorted(_KINDS))).map(lambda names: names | {"value"}),
    st.lists(st.integers(0, 30), max_size=3),
    st.integers(0, 5),
)
def test_columns_make_the_batch_that_their_rows_make(
    records: list[Record], names: set[str], cuts: list[int], skip: int
) -> None:
    """In streams of several batches, of which some are empty, and cut out of larger arrays."""
    ends = [*sorted(min(cut, len(records)) for cut in cuts), len(records)]
    table = _table(records[:1] * skip + records, names)
    parts = [
        table.slice(skip + begin, end - begin) for begin, end in zip([0, *ends], ends, strict=False)
    ]
    kept = [
        Record(
            record.value,
            record.key if "key" in names else None,
            record.headers if "headers" in names else (),
            record.timestamp_ms if "timestamp" in names else None,
        )
        for record in records
    ]

    for sent in (pa.concat_tables(parts), table.slice(skip)):
        found = arrow.records(stream(sent))
        assert batch.encode(found) == batch.encode(kept)
        assert Append.of(found, seq="7") == Append.of(kept, seq="7")
        made, size = columns.encoded(sent, lambda _headers, _index: None)
        assert (made, size) == (found, sum(record.size for record in kept))


@given(_ROWS, st.booleans(), st.data())
def test_stored_batches_are_read_as_columns_of_their_records(
    records: list[Record], is_packed: bool, data: st.DataObject
) -> None:
    skip = data.draw(st.integers(0, len(records) - 1))
    count = data.draw(st.integers(1, len(records) - skip))
    made = batch.encode(arrow.records(stream(_table(records, set(_KINDS)))))
    stored = batch.placed(
        packed.pack(made) if is_packed else made, append_time_ms=5, records_before=7
    )

    part = batch.opened(packed.unpack(stored)).part(skip, count)
    found = columns.records(batch.StoredBatch(10, 1, 2, 5, part))

    found.validate(full=True)
    rows = records[skip : skip + count]
    assert found.column("value").to_pylist() == [row.value for row in rows]
    assert found.column("key").to_pylist() == [row.key for row in rows]
    assert found.column("headers").to_pylist() == [list(row.headers) or None for row in rows]
    times = found.column("timestamp").cast(pa.timestamp("ms", tz="UTC")).cast(pa.int64())
    assert times.to_pylist() == [
        5 if row.timestamp_ms is None else row.timestamp_ms for row in rows
    ]


@given(_ROWS, st.sampled_from(["large_binary", "binary"]))
def test_what_a_null_hides_is_not_stored(records: list[Record], kind: str) -> None:
    """An Arrow column may have bytes below a null."""
    table = _table(records, {"value", "key"})
    shown = pa.array([record.key or b"hidden" for record in records], getattr(pa, kind)())
    is_null = pa.array([record.key is None for record in records])
    hidden = pc.if_else(is_null, pa.scalar(None, shown.type), shown)
    validity = hidden.buffers()[0]
    keys = pa.Array.from_buffers(shown.type, len(shown), [validity, *shown.buffers()[1:]])

    found = arrow.records(stream(table.set_column(1, "key", keys)))

    rows = [
        Record(record.value, None if record.key is None else record.key or b"hidden")
        for record in records
    ]
    assert batch.encode(found) == batch.encode(rows)


async def test_a_batch_of_the_maximum_size_is_taken_and_a_larger_one_is_not(log: Http) -> None:
    half = BATCH_BYTES_MAX // 2
    sizes = {half - 1000: 201, half + 1000: 413}
    for size, status in sizes.items():
        rows = pa.table({"value": [bytes(half), bytes(size - 10)], "key": [b"k" * 10, None]})
        sent = await log.ask("POST", RECORDS, body=stream(rows), headers={"Content-Type": ARROW})
        assert sent.status == status, (size, sent)


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_that_readers_could_not_be_told_are_refused(unit: str) -> None:
    """Reads would cut these to the nearest that calendars have."""

    def records_at(*times: int | None) -> list[Record]:
        column = pa.array(times, pa.int64()).cast(pa.timestamp(unit, tz="UTC"))
        rows = pa.table({"value": [b""] * len(times), "timestamp": column})
        made, _ = columns.encoded(rows, lambda _headers, _index: None)
        return batch.decode(batch.encode(made))[1]

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
