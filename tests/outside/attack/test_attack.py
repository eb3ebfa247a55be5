"""The judge of attacks notices what it must: an answer, a line of a log, a loss, a stall, a hang."""

import asyncio
import shlex

import orjson
import pytest

from quorumlog.errors import Overloaded, QuorumLogError, RouteNotFound
from quorumlog.wire import problems
from tests.outside.attack import raw
from tests.outside.attack.api import Operation, wrong
from tests.outside.attack.bystander import PACE_S, paced
from tests.outside.attack.meters import fault_of_line
from tests.outside.attack.raw import Answer, Hang
from tests.outside.attack.report import Kind, Report

GET = Operation("gateway", "GET", "/v1/x", statuses=frozenset({200, 404, 429}))
INSIDE = Operation("metadata", "GET", "/v1/x")


def problem(
    error: QuorumLogError, *, status: int = 0, media: str = problems.CONTENT_TYPE
) -> Answer:
    body = problems.to_bytes(error, "1")
    return Answer(status or error.status, {"content-type": media}, body)


@pytest.mark.parametrize(
    ("operation", "answer", "kind"),
    [
        (GET, Answer(200, {}, b"{}"), None),
        (GET, problem(Overloaded("full")), None),
        (GET, problem(QuorumLogError()), Kind.SERVER_ERROR),
        (INSIDE, problem(QuorumLogError()), Kind.SERVER_ERROR),
        (GET, problem(Overloaded("full"), status=503), Kind.SERVER_ERROR),
        (INSIDE, Answer(502, {"content-type": "text/html"}, b"<h1>"), Kind.SERVER_ERROR),
        (GET, problem(Overloaded("full"), media="text/plain"), Kind.ANSWER),
        (GET, Answer(206, {}, b"{}"), Kind.ANSWER),
        (GET, Answer(404, {"content-type": problems.CONTENT_TYPE}, b'{"code":"x"}'), Kind.ANSWER),
        (GET, Answer(404, {"content-type": problems.CONTENT_TYPE}, b"{"), Kind.ANSWER),
    ],
)
def test_an_answer_that_is_not_documented_is_noticed(
    operation: Operation, answer: Answer, kind: Kind | None
) -> None:
    found = wrong(operation, "GET", answer)

    assert (found and found[0]) == kind, found


def test_a_request_for_nothing_may_be_refused_only_as_such() -> None:
    assert wrong(None, "GET", problem(RouteNotFound("nothing"))) is None
    assert wrong(GET, "PATCH", problem(QuorumLogError())) is not None


def test_errors_and_traces_in_logs_are_noticed() -> None:
    lines = (
        {"level": "INFO", "event": "started"},
        {"level": "ERROR", "event": "unhandled-error", "error": "Traceback\nKeyError: 1"},
    )

    assert [fault_of_line(orjson.dumps(line).decode()) for line in lines] == [
        None,
        "unhandled-error: KeyError: 1",
    ]
    assert fault_of_line("Traceback (most recent call last):") is not None
    assert fault_of_line("not JSON") is None


def test_an_alarm_of_a_forged_ledger_is_expected_and_of_no_other() -> None:
    line = orjson.dumps({"level": "ERROR", "event": "row-missing", "ledger": 60001}).decode()

    assert fault_of_line(line, {60001}) is None
    assert fault_of_line(line, {10001}) is not None
    assert fault_of_line(line.replace("row-missing", "entry-corrupt"), {60001}) is not None


def test_a_stall_weighs_as_much_as_it_lasts() -> None:
    step = PACE_S * 1000

    assert paced([step] * 3) == [step] * 3
    assert len(paced([step, step, 100 * step])) == 102


async def test_a_connection_without_an_answer_and_an_end_is_a_hang() -> None:
    async def say_nothing(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)

    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(Hang):
            await raw.ask(f"127.0.0.1:{port}", b"x", peer="127.0.0.2", hang_s=0.05)
        for writer in writers:
            writer.close()
            await writer.wait_closed()


def test_the_last_line_counts_what_was_found() -> None:
    report = Report(seed=1, requests=7, peers={"127.0.0.2"})
    report.find("requests", Kind.SERVER_ERROR, "500")
    report.find("readers", Kind.HANG, "holds 36")
    report.find("readers", Kind.LOST, "closed by others")

    assert report.last_line() == (
        "attack: 7 requests, 1 peers, 1 undocumented 5xx, 1 hangs, 1 lost,"
        " bystander p50 1.0 times, slowest 0 ms, RSS 1.0 times"
    )
    assert "FOUND by readers (lost): closed by others" in report.page()


def test_a_command_repeats_a_request_byte_by_byte() -> None:
    data = b"GET /'\"\\ HTTP/1.1\r\nX: \xff\0\r\n\r\n"

    again = raw.command("h:1", data, "127.0.0.2")

    assert raw.unescaped(shlex.split(again)[-1]) == data
