"""Whatever one record has that an append takes, every reader of its log gets it and all around it."""

import asyncio
import functools
from typing import Any, Final

import orjson
import pytest

from quorumlog.cli.pipes import Framing, form
from quorumlog.client import Client
from quorumlog.client import sync as sync_client
from quorumlog.client.records import LogRecord
from quorumlog.protocol.batch import Record
from quorumlog.spark.http import Gateways
from quorumlog.spark.plan import TaskRange
from quorumlog.spark.rows import TYPES, rows
from quorumlog.wire.columns import HEADERS
from services.gateway.edge.log_models import LogRecords
from tests.support.events import after_retry
from tests.support.waiting import within
from tests.unit.logs.support import Http
from tests.unit.logs.test_arrow import ARROW, pa, stream
from tests.unit.logs.test_http import RECORDS, http, log

__all__ = ["http", "log"]

TIMES: Final = (-62_135_596_800_000, -1, 0, 253_402_300_799_999)
ODD: Final[tuple[Record, ...]] = (
    Record(b"plain"),
    Record(b"", b""),
    Record(b"\0\r\n\n: x\rid: 7\r\n\r\nevent: end\n\n", b"\r\nid: 9\n\ndata: x"),
    Record(b"\xff" * 10, b"\xed\xa0\x80"),
    Record(b'{"a":\r\r1}', "\u2028\x85\ufeff".encode()),
    Record(b"\xef\xbb\xbf{}", b"\x7f\x00"),
    Record(b"1e999", b"k", (("", ""), ("\0\r\n", "\x1b[2J\r\n\r\n"), ("__proto__", "\u2029"))),
    Record(b"[" * 3000, b"k" * 100_000, (("n" * 65_535, "v" * 65_535),)),
    Record(b"9" * 5000, None, tuple((str(n), "") for n in range(1000))),
    *(Record(b"t", None, (), time) for time in TIMES),
    Record(b'"the last"'),
)
VALUES: Final = [record.value for record in ODD]


def columns() -> bytes:
    """All as an Arrow stream, the form that has the fewest rules."""
    times = [record.timestamp_ms for record in ODD]
    table = {
        "value": pa.array(VALUES, pa.binary()),
        "key": pa.array([record.key for record in ODD], pa.binary()),
        "headers": pa.array([list(record.headers) or None for record in ODD], HEADERS),
        "timestamp": pa.array(times, pa.timestamp("ms", tz="UTC")),
    }
    return stream(pa.table(table))


@pytest.fixture
async def odd(log: Http) -> Http:
    answer = await log.ask("POST", RECORDS, body=columns(), headers={"Content-Type": ARROW})
    assert answer.status == 201, answer
    assert (await log.ask("POST", "/v1/logs/log/close")).status == 200
    return log


def check(records: list[Any]) -> None:
    """Each is there, in one form."""
    LogRecords.model_validate(
        {
            "log": "log",
            "created_at": "2026-01-01T00:00:00Z",
            "records": records,
            "next": len(ODD),
            "first_offset": 0,
            "closed": True,
        }
    )
    assert [record["offset"] for record in records] == list(range(len(ODD)))
    for record in records:
        assert len({"data", "text", "json", "data_base64"} & record.keys()) == 1


@pytest.mark.parametrize("encoding", ["base64", "text", "json"])
async def test_pages_lines_events_and_sockets_have_all(odd: Http, encoding: str) -> None:
    query = f"{RECORDS}?encoding={encoding}"
    page = await odd.ask("GET", query)
    lines = await odd.ask("GET", query, headers={"Accept": "application/x-ndjson"})
    events = await odd.ask("GET", query, headers={"Accept": "text/event-stream"})
    reported: list[Any] = []
    async with (
        within("the tail ends"),
        odd.session.ws_connect(f"{odd.urls[0]}/v1/logs/log/ws", max_msg_size=0) as socket,
    ):
        await socket.send_json({"tail": {"encoding": encoding}})
        while "end" not in (message := await socket.receive_json()):
            reported += message["records"]
    # As EventSource divides it: each of these ends a line.
    data = after_retry(events.body).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n\n")

    check(page.json["records"])
    check([orjson.loads(line) for line in lines.body.split(b"\n") if line])
    check(reported)
    assert data[-2:] == [b'event: end\ndata: {"next_offset":%d}' % len(ODD), b""]
    check([orjson.loads(block.split(b"\ndata: ")[1]) for block in data[:-2]])
    for offset, block in enumerate(data[:-2]):
        assert block.startswith(b"id: %d." % offset)


async def test_the_clients_and_the_command_line_have_all(odd: Http) -> None:
    def read() -> list[bytes]:
        with sync_client.Client(*odd.urls) as client:
            return [record.value for record in client.log("log").records()]

    async with within("all is read"), Client(*odd.urls) as client:
        found = [record async for record in client.log("log").tail()]
        plain = await asyncio.to_thread(read)
    shown = [orjson.loads(form(record, Framing.LINES, as_json=True)) for record in found]

    assert [record.value for record in found] == plain == VALUES
    assert [record.key for record in found] == [record.key for record in ODD]
    assert [dict(record.headers) for record in found] == [dict(record.headers) for record in ODD]
    assert [line["offset"] for line in shown] == list(range(len(ODD)))


@pytest.mark.parametrize("speaks_arrow", [True, False])
async def test_spark_has_all_with_arrow_and_without(
    odd: Http, monkeypatch: pytest.MonkeyPatch, speaks_arrow: bool
) -> None:
    if not speaks_arrow:
        missing = functools.cache(lambda: "pyarrow")
        monkeypatch.setattr("services.gateway.edge.arrow._columns", missing)

    def read() -> list[Any]:
        with Gateways(odd.urls[0]) as gateways:
            part = TaskRange("log", 1, 0, len(ODD))
            batches = rows(gateways, part, tuple(TYPES), fails_on_loss=True)
            return [row for batch in batches for row in batch.to_pylist()]

    found = await asyncio.to_thread(read)

    assert [row["value"] for row in found] == VALUES
    assert [row["key"] for row in found] == [record.key for record in ODD]
    assert all(1 <= row["timestamp"].year <= 9999 for row in found)


def test_a_tombstone_has_no_value_in_json() -> None:
    """A copy that is made of the output deletes the same keys."""
    for is_tombstone, data in ((True, b'"data":null'), (False, b'"data":""')):
        record = LogRecord(1, b"", b"k", {}, "2026-01-02T03:04:05Z", 1, 0, is_tombstone)
        assert data in form(record, Framing.LINES, as_json=True)
