"""What a write does with each answer: of a rival's commit, an end of its transaction, a bad gateway."""

import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import pytest

from loadtest.spark_cluster import SparkCluster
from quorumlog.errors import (
    NOT_DONE,
    UNKNOWN,
    InvalidRequest,
    MetadataUnavailable,
    NoSuchTransaction,
    Overloaded,
    QuorumLogError,
)
from quorumlog.spark.http import Gateways
from quorumlog.spark.options import WriteOptions

pytest.importorskip("pyspark", reason="PySpark is not installed: make setup-spark")

import pyarrow as pa

from quorumlog.spark.writing import (
    LogRowsWriter,
    Whose,
    WriteOver,
    WrittenPart,
    abort,
    begin,
    publish,
)

NO_HEADERS: Final[Mapping[str, str]] = {}
FIRST: Final = Whose("app", 1)


class Driver:
    """Writes one version of an app, as the tasks and the driver of a job do."""

    def __init__(self, cluster: SparkCluster, log: str, whose: Whose = FIRST) -> None:
        given = {"gateway.url": cluster.urls, "topic": log, "rowsPerRequest": "1"}
        self.options = WriteOptions.of(given, is_stream=False)
        self.log, self.whose = log, whose
        self.gateways = cluster.http

    def task(self, partition: int = 0) -> LogRowsWriter:
        return LogRowsWriter(self.gateways, self.options, self.log, self.whose, (partition, 0))

    def part(self, *values: str, partition: int = 0) -> WrittenPart:
        task = self.task(partition)
        task.add(table(*values))
        return task.seal()

    def publish(self, *parts: WrittenPart) -> tuple[bool, int]:
        (done,) = publish(self.options, self.whose, parts)
        return done.is_duplicate, done.rows

    def state(self, part: WrittenPart) -> str:
        found = self.gateways.get(f"/v1/transactions/{part.transaction}")
        return str(found["state"])


def table(*values: str) -> Any:
    return pa.table({"value": pa.array([value.encode() for value in values], pa.binary())})


def test_of_two_drivers_of_one_version_the_first_commit_counts_and_the_other_one_is_a_repeat(
    cluster: SparkCluster,
) -> None:
    log = cluster.create("rivals")
    one, two = Driver(cluster, log), Driver(cluster, log)
    before = two.part("two's first", partition=0)
    meanwhile = two.task(1)
    meanwhile.add(table("two's second"))

    assert one.publish(one.part("one's")) == (False, 1)

    # A task that is at work hears of it with its next request, whatever that is.
    meanwhile.add(table("two's third"))
    late = [meanwhile.seal(), two.part("two's fourth", partition=2)]
    assert [part.is_duplicate for part in (before, *late)] == [False, True, True]
    assert two.publish(before, *late) == two.publish(*late) == (True, 0)
    assert cluster.values(log) == ["one's"]


def test_a_task_that_only_seals_hears_of_a_rivals_commit_too(cluster: SparkCluster) -> None:
    log = cluster.create("rivals-sealing")
    one, two = Driver(cluster, log), Driver(cluster, log)
    task, before = two.task(), cluster.ledgers()
    task.add(table("two's"))
    own = cluster.ledgers() - before

    one.publish(one.part("one's"))
    cluster.until(lambda: not own & cluster.ledgers(), "what was not published is deleted")
    part = task.seal()

    assert two.publish(part) == (True, 0)
    assert cluster.values(log) == ["one's"]


def test_a_write_whose_transaction_was_ended_says_so_and_leaves_nothing(
    cluster: SparkCluster,
) -> None:
    log = cluster.create("ended")
    before = cluster.ledgers()
    driver = Driver(cluster, log)
    task = driver.task(1)
    task.add(table("b"))
    sealed = driver.part("a")

    abort(driver.options, [sealed.transaction])

    with pytest.raises(WriteOver, match="run the write again"):
        task.add(table("c"))
    with pytest.raises(WriteOver, match="txnExpiresInSeconds"):
        driver.publish(sealed)
    # A task that begins now gets another transaction: the two make no commit.
    later = driver.part("d", partition=2)
    assert later.transaction != sealed.transaction
    with pytest.raises(WriteOver):
        driver.publish(sealed, later)
    abort(driver.options, [sealed.transaction, later.transaction])
    assert cluster.values(log) == []
    cluster.until(lambda: cluster.ledgers() <= before, "what was not published is deleted")
    # And the version is not used up.
    assert driver.publish(driver.part("e")) == (False, 1)


def test_a_write_without_rows_leaves_no_transaction_open(cluster: SparkCluster) -> None:
    log = cluster.create("without-rows")
    driver = Driver(cluster, log)
    transaction, _ = begin(driver.gateways, driver.options, log, Whose())

    (done,) = publish(driver.options, Whose(transaction=transaction), [], even_if_empty=True)

    assert (done.rows, done.is_duplicate) == (0, False)
    found = driver.gateways.get(f"/v1/transactions/{transaction}")
    assert found["state"] == "COMMITTED"


Fault = Literal["cut", "lose", "429", "503"]


class BadGateway:
    """Stands before a gateway, and gives the next commits other answers than that does."""

    def __init__(self, url: str) -> None:
        self.plan: list[Fault] = []
        outer, target = self, urlsplit(url)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._serve()

            def do_POST(self) -> None:
                self._serve()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                del format, args

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                fault = outer.next(self.path)
                if fault in ("429", "503"):
                    kind = Overloaded if fault == "429" else MetadataUnavailable
                    self._answer(kind.status, _document(kind()))
                    return
                status, content, headers = 0, b"", {}
                if fault != "cut":
                    near = http.client.HTTPConnection(str(target.hostname), target.port)
                    near.request(self.command, self.path, body, dict(self.headers))
                    answer = near.getresponse()
                    status, content = answer.status, answer.read()
                    headers = {"X-Request-Id": answer.headers["X-Request-Id"]}
                    near.close()
                if fault is not None:
                    self.close_connection = True
                    self.connection.close()
                    return
                self._answer(status, content, headers)

            def _answer(
                self, status: int, content: bytes, headers: Mapping[str, str] = NO_HEADERS
            ) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def next(self, path: str) -> Fault | None:
        """What to do with a request."""
        if not path.endswith("/commit"):
            return None
        return self.plan.pop(0) if self.plan else None

    def close(self) -> None:
        """Take no more connections."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _document(error: QuorumLogError) -> bytes:
    document = {
        "code": error.code,
        "detail": error.detail,
        "status": error.status,
        "retryable": error.retryable,
        "outcome": error.outcome,
    }
    return json.dumps(document).encode()


@pytest.fixture
def bad(cluster: SparkCluster) -> Iterator[BadGateway]:
    made = BadGateway(cluster.url("gateway-1"))
    yield made
    made.close()


def test_a_commit_is_asked_for_until_it_is_answered_and_done_once(
    cluster: SparkCluster, bad: BadGateway
) -> None:
    log = cluster.create("answers")
    driver = Driver(cluster, log, Whose("app", 1))
    part = driver.part("a", "b")
    through = WriteOptions.of({"gateway.url": bad.url, "topic": log}, is_stream=False)
    bad.plan = ["cut", "503", "429", "lose", "lose"]

    (done,) = publish(through, driver.whose, [part])

    assert bad.plan == []
    assert (done.rows, done.is_duplicate, done.first_offset, done.last_offset) == (2, False, 0, 1)
    assert cluster.values(log) == ["a", "b"]


def test_a_gateway_that_can_do_nothing_now_is_left_for_the_next_one(
    cluster: SparkCluster, bad: BadGateway
) -> None:
    log = cluster.create("sick")
    driver = Driver(cluster, log)
    part = driver.part("a")
    bad.plan = ["503"] * 1000

    with Gateways(f"{bad.url},{cluster.url('gateway-2')}") as gateways:
        # Whichever it begins with; one who does not leave it would ask for ever.
        gateways._at = 0
        path = f"/v1/transactions/{part.transaction}/commit"
        ledgers = {"ledgers": [ledger.ledger_id for ledger in part.ledgers]}
        done = gateways.request("POST", path, value=ledgers, is_repeatable=True).json()

    assert done["state"] == "COMMITTED"
    assert len(bad.plan) < 1000


def test_a_commit_that_is_wrong_is_refused_at_once_and_can_be_aborted(
    cluster: SparkCluster, bad: BadGateway
) -> None:
    log = cluster.create("wrong")
    driver = Driver(cluster, log)
    part = driver.part("a")
    *others, ledger = part.ledgers
    longer = ledger._replace(last_entry=ledger.last_entry + 1)
    wrong = replace(part, ledgers=(*others, longer))
    through = WriteOptions.of({"gateway.url": bad.url, "topic": log}, is_stream=False)

    with pytest.raises(InvalidRequest, match=f"ends at entry {ledger.last_entry}"):
        publish(through, driver.whose, [wrong])

    abort(through, [part.transaction])
    assert driver.state(part) == "ABORTED"


def test_a_commit_that_may_be_done_is_not_told_as_refused(bad: BadGateway) -> None:
    """A verdict on the repetition says nothing of the try before it."""
    commit = "/v1/transactions/nothing/commit"
    with Gateways(bad.url) as gateways:
        for plan, outcome in (((), NOT_DONE), (("cut",), UNKNOWN)):
            bad.plan = [*plan]
            with pytest.raises(NoSuchTransaction) as reported:
                gateways.request("POST", commit, value={"ledgers": []}, is_repeatable=True)
            assert reported.value.outcome == outcome


def test_a_commit_that_may_have_been_forgotten_is_not_told_as_nothing_on_the_log(
    cluster: SparkCluster, bad: BadGateway
) -> None:
    """Of a transaction that ended days ago nobody knows any more how."""
    log = cluster.create("forgotten")
    driver = Driver(cluster, log, Whose("app", 1))
    part = replace(driver.part("a"), transaction="nothing")
    through = WriteOptions.of({"gateway.url": bad.url, "topic": log}, is_stream=False)

    bad.plan = ["cut"]
    with pytest.raises(NoSuchTransaction) as reported:
        publish(through, driver.whose, [part])
    assert reported.value.outcome == UNKNOWN
    with pytest.raises(WriteOver):
        publish(through, driver.whose, [part])
