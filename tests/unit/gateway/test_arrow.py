"""Arrow streams as bodies of appends and reads of ledgers: what is taken, and what is refused."""

import functools
import importlib
import struct
import subprocess
import sys
import threading
from types import ModuleType
from typing import Any

import pytest

from quorumlog.errors import BadRequest
from services.gateway.edge import arrow
from tests.unit.gateway.conftest import Gateway
from tests.unit.gateway.conftest import gateway_with_ledger as gateway

__all__ = ("gateway",)

pa = pytest.importorskip("pyarrow", reason="Arrow needs pyarrow")

ARROW = "application/vnd.apache.arrow.stream"
SENT = {"Content-Type": ARROW}
WANTED = {"Accept": ARROW}
ENTRIES = "/v1/ledgers/1/entries"


def stream(table: Any, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def of(*values: bytes | str | None, kind: Any = None) -> Any:
    return pa.table({"value": pa.array(values, kind or pa.binary())})


@pytest.mark.parametrize("kind", ["binary", "string", "large_binary", "large_string"])
async def test_the_column_value_is_a_batch_of_entries(gateway: Gateway, kind: str) -> None:
    values = of("a", "", "ü", kind=getattr(pa, kind)())

    answer = await gateway.ask("POST", ENTRIES, stream(values), headers=SENT)
    read = await gateway.ask("GET", f"{ENTRIES}?from=1", headers=WANTED)

    assert (answer.status, answer.json["first_entry"], answer.json["last_entry"]) == (201, 0, 2)
    assert gateway.engine.entries[1] == [b"a", b"", "ü".encode()]
    assert read.headers["Content-Type"] == ARROW
    assert (read.headers["Next-Entry-Id"], read.headers["Ledger-Closed"]) == ("3", "false")
    assert pa.ipc.open_stream(read.body).read_all().to_pydict() == {
        "entry_id": [1, 2],
        "value": [b"", "ü".encode()],
    }


async def test_a_read_at_the_end_is_a_stream_without_rows(gateway: Gateway) -> None:
    read = await gateway.ask("GET", ENTRIES, headers=WANTED)

    assert pa.ipc.open_stream(read.body).read_all().num_rows == 0


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"\xff\xff\xff\xff", 400),
        (b"\xff\xff\xff\xff\xff\xff\xff\x7f", 400),
        (b"no stream at all", 400),
        (struct.pack("<IiI", 0xFFFFFFFF, 8, 0xFFFFFFF0), 400),
        (stream(of(b"x"))[:-20], 400),
        (stream(of(b"x"))[:40], 400),
        (stream(of()), 422),
        (stream(of(b"x", None)), 400),
        (stream(pa.table({"value": [1, 2]})), 400),
        (stream(pa.table({"other": ["x"]})), 400),
        (stream(pa.table({"value": ["x"], "key": ["k"]})), 400),
        (stream(of(b"x" * 100_000), compression="lz4"), 400),
        (stream(of(b"x" * 100_000), compression="zstd"), 400),
        (stream(pa.table({"value": pa.array(["x"]).dictionary_encode()})), 400),
        (stream(of(b"x" * ((1 << 20) + 1))), 413),
        (stream(of(*[b"x"] * 10_001)), 413),
    ],
)
async def test_what_is_no_plain_stream_of_values_is_refused_and_nothing_is_written(
    gateway: Gateway, body: bytes, status: int
) -> None:
    answer = await gateway.ask("POST", ENTRIES, body, headers=SENT)

    assert answer.status == status, answer
    assert gateway.engine.entries[1] == []


async def test_no_flipped_byte_of_a_stream_makes_more_than_a_refusal(gateway: Gateway) -> None:
    body = stream(of(b"hello", b"world"))

    statuses = set()
    for at in range(0, len(body), 3):
        broken = bytearray(body)
        broken[at] ^= 0xFF
        answer = await gateway.ask("POST", ENTRIES, bytes(broken), headers=SENT)
        statuses.add(answer.status)

    assert statuses <= {201, 400, 413, 422}


async def test_the_first_request_for_arrow_loads_it_in_a_thread(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the event loop it stopped everybody for more than a second."""
    threads = []
    load = importlib.import_module

    def noted(name: str) -> ModuleType:
        threads.append(threading.current_thread())
        return load(name)

    arrow._columns.cache_clear()
    monkeypatch.setattr(importlib, "import_module", noted)
    for _ in range(2):
        answer = await gateway.ask("GET", ENTRIES, headers={"Accept": ARROW})
        assert answer.status == 200

    assert len(threads) == 2, "two modules, once"
    assert threading.main_thread() not in threads


async def test_a_gateway_without_pyarrow_says_what_to_install(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow, "_columns", functools.cache(lambda: "numpy"))

    sent = await gateway.ask("POST", ENTRIES, stream(of(b"x")), headers=SENT)
    read = await gateway.ask("GET", ENTRIES, headers=WANTED)

    assert (sent.status, sent.code) == (415, "unsupported-media-type")
    assert (read.status, read.code) == (406, "not-acceptable")
    assert "install numpy (pip install 'quorumlog[arrow]')" in sent.json["detail"]
    assert "install numpy (pip install 'quorumlog[arrow]')" in read.json["detail"]


@pytest.mark.parametrize("missing", ["pyarrow", "numpy"])
def test_what_is_not_installed_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "quorumlog.wire.columns", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)  # as if it were not installed

    assert arrow._columns.__wrapped__() == missing


async def test_a_stream_of_many_batches_is_refused_before_they_are_made(gateway: Gateway) -> None:
    empty = pa.record_batch([pa.array([], pa.binary())], ["value"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, empty.schema) as writer:
        for _ in range(20_000):
            writer.write_batch(empty)
    headers = pa.map_(pa.string(), pa.string())
    pairs = [(str(n), "") for n in range(300_000)]
    one = pa.table({"value": [b"x"], "headers": pa.array([pairs], headers)})

    batches = await gateway.ask("POST", ENTRIES, sink.getvalue().to_pybytes(), headers=SENT)
    with pytest.raises(BadRequest, match="300000 headers"):
        arrow.records(stream(one))

    assert (batches.status, batches.code) == (400, "bad-request")
    assert "at most 10000 record batches" in batches.json["detail"]


def test_memory_of_a_large_page_goes_back() -> None:
    """In a process of its own: pyarrow's allocator is one for a process."""
    program = """
import ctypes, resource
from pathlib import Path
from services.gateway.edge import arrow
columns = arrow._columns()
import pyarrow as pa

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

def page():
    values = pa.array([b"x" * 1024] * 60_000, type=pa.binary())
    sink = pa.BufferOutputStream()
    table = pa.table({"value": values})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return len(sink.getvalue())

before = resident()
assert page() > 60_000_000
ctypes.CDLL(None).malloc_trim(0)
print((resident() - before) >> 20)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert int(done.stdout) < 100, "MiB; pyarrow's own allocator keeps 200"
