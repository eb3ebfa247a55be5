"""Spark against gateways that are not at their best: overloaded, or without pyarrow."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest

from loadtest.spark_cluster import SparkCluster, spark_cluster
from loadtest.stores import StoreServers
from quorumlog.errors import NotAcceptable, UnsupportedMediaType
from quorumlog.spark.http import Gateways
from quorumlog.wire.columns import MEDIA
from services.local.config import ROOT
from tests.support.waiting import SETTLED_S, UNHURRIED, until_sync

pytest.importorskip("pyspark", reason="PySpark is not installed: make setup-spark")

from pyspark.sql import DataFrame, SparkSession

PLACES: Final = 2
"""Requests that a gateway takes at once."""

REFUSALS: Final = 8
"""Of a task that waits, at the least. The pauses between them, each at least half of what
`Gateways` says, come to more than 2 s."""


@pytest.fixture(scope="module")
def odd(servers: StoreServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    """Gateways that take two requests at once; the second one has no pyarrow, as in our image."""
    environment = {**UNHURRIED, "REQUESTS_MAX": str(PLACES), "BODY_TIMEOUT_S": "3600"}
    without = tmp_path_factory.mktemp("without")
    (without / "pyarrow.py").write_text("raise ImportError('no pyarrow here')\n")
    path = os.pathsep.join(map(str, (without, ROOT / "shared", ROOT)))
    settings = {"bookies": 3, "gateways": 2, "environment": environment}
    with spark_cluster(servers.fresh(), **settings) as cluster:
        cluster.kill("gateway-2")
        cluster.restart("gateway-2", "env", f"PYTHONPATH={path}")
        yield cluster


class Watched:
    """A way to a gateway that counts its answers 429, and can take all of its places."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._to = (str(parts.hostname), int(parts.port or 80))
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self.refused = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with near, socket.create_connection(self._to) as far:
            back = threading.Thread(target=self._pump, args=(far, near), daemon=True)
            back.start()
            self._pump(near, far, counts=False)
            back.join()

    def _pump(self, source: socket.socket, to: socket.socket, *, counts: bool = True) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(1 << 16):
                self.refused += counts and chunk.startswith(b"HTTP/1.1 429 ")
                to.sendall(chunk)
        for end in (source, to):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def full(self, log: str) -> Iterator[None]:
        """All places taken, by requests whose bodies do not come, until the end of the block."""
        with contextlib.ExitStack() as stack:
            for _ in range(PLACES):
                until_sync(lambda: self._takes(log, stack), "a place is taken")
            yield

    def _takes(self, log: str, stack: contextlib.ExitStack) -> bool:
        head = (
            f"POST /v1/logs/{log}/records HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
            "Content-Type: application/json\r\nExpect: 100-continue\r\n\r\n"
        )
        one = stack.enter_context(socket.create_connection(self._to))
        one.sendall(head.encode())
        return one.recv(1 << 16).startswith(b"HTTP/1.1 100 ")

    def slow(self, log: str, folder: Path) -> None:
        """Once two tasks have begun: be full until tasks were refused, and then no more."""
        try:
            until_sync(lambda: len(list(folder.glob("begun-*"))) == 2, "two tasks have begun")
            with self.full(log):
                before = self.refused
                (folder / "go").touch()
                until_sync(lambda: self.refused >= before + REFUSALS, "tasks were refused")
        finally:
            (folder / "go").touch()


@pytest.fixture
def watched(odd: SparkCluster) -> Iterator[Watched]:
    made = Watched(odd.url("gateway-1"))
    yield made
    made.close()


def _gated(folder: Path) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Rows with the number of the attempt that brought them, after the first ones have waited."""

    def wait(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        for batch in batches:
            (folder / f"begun-{context.partitionId()}").touch()
            until_sync((folder / "go").exists, "the gateway is full", SETTLED_S)
            reported = [
                f"{value}/{context.attemptNumber()}" for value in batch.column(0).to_pylist()
            ]
            yield pa.RecordBatch.from_pydict({"value": pa.array(reported, pa.string())})

    return wait


def test_an_overload_longer_than_the_deadline_slows_a_request_and_does_not_fail_it(
    odd: SparkCluster, watched: Watched
) -> None:
    log = odd.create("patient")
    gateways = Gateways(watched.url, deadline_s=0.2)

    with ThreadPoolExecutor(1) as pool:
        with watched.full(log):
            asked = pool.submit(gateways.get, f"/v1/logs/{log}")
            until_sync(lambda: watched.refused >= REFUSALS, "the request is refused")
            assert not asked.done()
        assert asked.result()["name"] == log
    gateways.close()


def test_writing_tasks_that_meet_429_are_slowed_and_do_not_fail(
    spark: SparkSession, odd: SparkCluster, watched: Watched, tmp_path: Path
) -> None:
    log = odd.create("written-slowly")
    frame = spark.range(2000, numPartitions=2).selectExpr("CAST(id AS string) AS value")

    with ThreadPoolExecutor(1) as pool:
        slowed = pool.submit(watched.slow, log, tmp_path)
        (
            frame.mapInArrow(_gated(tmp_path), "value string")
            .write.format("quorumlog")
            .options(**{"gateway.url": watched.url, "topic": log})
            .mode("append")
            .save()
        )
        slowed.result()

    # None is of a second attempt.
    assert odd.values(log) == [f"{n}/0" for n in range(2000)]


def test_reading_tasks_that_meet_429_are_slowed_and_do_not_fail(
    spark: SparkSession, odd: SparkCluster, watched: Watched, tmp_path: Path
) -> None:
    log = odd.create("read-slowly")
    odd.append(log, *map(str, range(600)))
    frame = (
        spark.read.format("quorumlog")
        .options(**{"gateway.url": watched.url, "subscribe": log})
        .options(columns="value", maxEntriesPerPartition="100")
        .load()
        .selectExpr("CAST(value AS string) AS value")
    )

    with ThreadPoolExecutor(1) as pool:
        slowed = pool.submit(watched.slow, log, tmp_path)
        # Two tasks run at once: the other four begin where the gateway is full.
        rows = frame.mapInArrow(_gated(tmp_path), "value string").collect()
        slowed.result()

    assert [row.value for row in rows] == [f"{n}/0" for n in range(600)]


def test_a_gateway_without_pyarrow_is_written_and_read_as_json(
    spark: SparkSession, odd: SparkCluster
) -> None:
    log, url = odd.create("as-json"), odd.url("gateway-2")
    with Gateways(url) as gateways:
        path = f"/v1/logs/{log}/records"
        with pytest.raises(NotAcceptable, match="pyarrow"):
            gateways.request("GET", path, headers={"Accept": MEDIA}, is_repeatable=True)
        kind = {"Content-Type": MEDIA}
        with pytest.raises(UnsupportedMediaType, match="pyarrow"):
            gateways.request("POST", path, body=b"x", headers=kind, is_repeatable=False)
    frame = spark.range(12_000, numPartitions=2).selectExpr(
        "unhex(hex(id)) AS value",
        "if(id % 2 = 0, CAST(id AS string), NULL) AS key",
        "if(id % 3 = 0, map('h', CAST(id AS string)), NULL) AS headers",
        "timestamp_millis(1767323045678 + id) AS timestamp",
    )

    frame.write.format("quorumlog").options(**{"gateway.url": url, "topic": log}).mode(
        "append"
    ).save()

    wanted = [_row(*row) for row in frame.collect()]
    assert [_row(*row) for row in _read(spark, url, log).collect()] == wanted
    # The same to the byte by the gateway that speaks Arrow.
    assert [_row(*row) for row in _read(spark, odd.url("gateway-1"), log).collect()] == wanted


def _read(spark: SparkSession, url: str, log: str) -> DataFrame:
    reader = spark.read.format("quorumlog").options(**{"gateway.url": url, "subscribe": log})
    return reader.option("columns", "value,key,headers,timestamp").load()


def _row(value: bytes, key: str | bytes | None, headers: Any, timestamp: Any) -> tuple[Any, ...]:
    """A row as it was written, or as it was read, where headers are pairs and keys bytes."""
    pairs = headers.items() if isinstance(headers, dict) else headers or ()
    known = [
        (name, text if isinstance(text, str) else bytes(text).decode()) for name, text in pairs
    ]
    reported = key.encode() if isinstance(key, str) else key
    return bytes(value), reported, known, timestamp


def test_a_plain_ledger_is_read_as_json(spark: SparkSession, odd: SparkCluster) -> None:
    url = odd.url("gateway-2")
    ledger = odd.http.request("POST", "/v1/ledgers", is_repeatable=False).json()["ledger_id"]
    odd.http.request(
        "POST",
        f"/v1/ledgers/{ledger}/entries",
        value={"entries": [{"text": str(n)} for n in range(50)]},
        is_repeatable=False,
    )

    reader = spark.read.format("quorumlog").options(**{"gateway.url": url, "ledgers": str(ledger)})
    rows = reader.load().select("entry", "value").collect()

    assert [(row.entry, row.value) for row in rows] == [(n, b"%d" % n) for n in range(50)]


def test_what_is_no_gateway_s_url_is_refused_at_once_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="is not a gateway URL: use http://host:port"):
        Gateways("http://127.0.0.1:1,127.0.0.1:8080")
