"""How commands end: errors, interrupts, closed pipes, and inputs that are left early."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest
import typer

from loadtest.ports import free_ports
from quorumlog.cli import pipes, session
from quorumlog.cli.commands import app
from quorumlog.cli.output import ExitStatus, run_command
from quorumlog.cli.pipes import Framing, records
from services.local.process import Become, in_child
from tests.support.commands import words
from tests.support.waiting import until, until_sync, within
from tests.unit.client.test_transport import Gateway, serving

_SHAPE: Final = {"code", "detail", "retryable", "outcome", "exit_status"}
_ARGUMENTS: Final = {
    "audit": (),
    "accept-loss": ("1", "--from", "0", "--to", "0", "--yes"),
    "append": ("1", "text"),
    "consume": ("x", "me"),
    "delay": ("60",),
    "get": ("1", "key"),
    "limit": ("--concurrency", "2"),
    "reset": ("x", "me", "--to", "1"),
    "set": ("x", "--roll-bytes", "1"),
    "truncate": ("x", "1"),
    **dict.fromkeys(
        (
            "check",
            "create",
            "list",
            "pause",
            "rebuild",
            "reseal",
            "resume",
            "status",
            "trigger",
            "witnesses",
        ),
        (),
    ),
}
"""What a command needs besides a name or an id, which is 1."""
_NAMED: Final = {("log", "create"), ("bookie", "pause"), ("bookie", "resume")}
_GUIDE: Final = Path(__file__).resolve().parents[3] / "docs" / "guides" / "cli.md"


def commands(tree: typer.Typer, *path: str) -> Iterator[tuple[str, ...]]:
    """The words of each command."""
    for command in tree.registered_commands:
        assert command.callback
        yield (*path, command.name or command.callback.__name__.replace("_", "-"))
    for group in tree.registered_groups:
        assert group.typer_instance
        assert group.name
        yield from commands(group.typer_instance, *path, group.name)


# `serve` would become the process of the cluster: test_wheel.py runs it.
COMMANDS: Final = sorted(each for each in commands(app) if each != ("serve",))
ASKING: Final = [
    command
    for command in COMMANDS
    if command[0] not in {"certificates", "doctor"} and command != ("metadata", "new-key")
]
"""Commands that ask a server."""


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> str:
    """A URL at which nobody listens, for gateways and metadata services."""
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    monkeypatch.setenv("QUORUMLOG_GATEWAY", url)
    monkeypatch.setenv("METADATA_URLS", url)
    return url


def arguments(command: tuple[str, ...]) -> tuple[str, ...]:
    if command == ("token", "create"):
        return (*command, "1", "read:*")
    if command[0] == "queue":
        more = {"ack": ("1:1",), "work": ("--exec", "true", "--wait", "0"), "list": ()}
        return (*command, "1", *(() if command[1] == "list" else ("1",)), *more.get(command[1], ()))
    given: tuple[str, ...] = (
        ("1",) if command[:2] in _NAMED else _ARGUMENTS.get(command[-1], ("1",))
    )
    return (*command, *given)


def error_of(said: str) -> dict[str, Any]:
    """The one error on standard error, of the one shape."""
    [line] = said.splitlines()
    error: dict[str, Any] = json.loads(line)
    assert error.keys() >= _SHAPE
    return error


@pytest.mark.parametrize("command", ASKING, ids=" ".join)
def test_each_command_tells_of_a_cluster_that_is_down_in_json(
    command: tuple[str, ...], nobody: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run_command(app, [*arguments(command), "--json", "--timeout", "0.1"])

    reported = capsys.readouterr()
    error = error_of(reported.err)
    assert (status, error["exit_status"]) == (ExitStatus.FAILED, ExitStatus.FAILED)
    assert (error["code"], error["outcome"]) == ("connection-lost", "not-done")
    assert nobody in error["detail"]
    assert reported.out == ""


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_each_command_tells_of_wrong_usage_in_json(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    status = run_command(app, [*command, "--no-such-option", "--json"])

    assert status == ExitStatus.USAGE
    assert error_of(capsys.readouterr().err)["code"] == "usage"


@pytest.mark.parametrize(
    "given",
    [
        ("log", "show", "\udcff"),
        ("log", "show", "x", "--gateway", "127.0.0.1:8080"),
        ("log", "show", "x", "--gateway", ","),
        ("log", "show", "x", "--gateway", "http://"),
        ("bookie", "cookie", "show", "x", "--metadata", "127.0.0.1:8082"),
        ("log", "append", "x", "y", "--header", "no equals sign"),
        ("log", "append", "x", "y", "--header", "a=\udcff"),
        ("log", "read", "x", "--from", "yesterday"),
        ("ledger", "read", "1", "--follow", "--to", "1"),
        ("log", "show", "x", "--timeout", "0"),
        ("log", "show"),
        ("nothing",),
    ],
)
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_wrong_arguments_are_usage_errors(
    given: tuple[str, ...], form: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    status = run_command(app, [*given, *form])

    said = capsys.readouterr().err
    assert status == ExitStatus.USAGE
    assert "Traceback" not in said
    if form:
        assert error_of(said)["code"] == "usage"


@pytest.mark.parametrize("name", ["absent", "."])
def test_an_input_that_can_not_be_read_is_an_error(
    name: str, nobody: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / name)
    status = run_command(app, ["log", "append", "x", "--file", file, "--json"])

    assert nobody
    assert status == ExitStatus.FAILED
    assert error_of(capsys.readouterr().err)["code"] == "os-error"


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(app, ["--version"]) == ExitStatus.DONE

    assert capsys.readouterr().out.startswith("quorumlog ")


def test_a_retry_is_told_at_once_with_its_end_and_once_only(
    nobody: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(app, ["log", "show", "x", "--timeout", "1"]) == ExitStatus.FAILED

    first, last = capsys.readouterr().err.splitlines()
    assert nobody in first
    assert "retrying for 1 s (--timeout)" in first
    assert last.startswith("connection-lost: ")


def test_a_quiet_command_tells_its_error(nobody: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert nobody
    assert run_command(app, ["log", "show", "x", "--timeout", "0.1", "-q"]) == ExitStatus.FAILED

    assert len(capsys.readouterr().err.splitlines()) == 1


async def test_a_gateway_that_takes_connections_and_never_answers_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_SHORT_WAIT_S", 0.05)
    is_over = asyncio.Event()

    async def never(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await is_over.wait()
        writer.close()

    server = await asyncio.start_server(never, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    await session._notice_silence(f"http://127.0.0.1:{port}")
    is_over.set()
    server.close()
    await server.wait_closed()

    assert f"http://127.0.0.1:{port} has not responded" in capsys.readouterr().err


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_ctrl_c_while_a_result_is_printed_is_told_as_such(
    form: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    tree = typer.Typer()

    @tree.command()
    def print_much() -> None:
        raise KeyboardInterrupt

    assert run_command(session.with_common_options(tree), form) == ExitStatus.INTERRUPTED

    said = capsys.readouterr().err
    assert said == "interrupted\n" if not form else error_of(said)["code"] == "interrupted"


async def test_a_cookie_is_asked_of_the_next_metadata_service_where_the_first_is_gone(
    nobody: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"name": "b1", "version": 1, "cookie": {"incarnation": 1}}
    async with serving(Gateway(row)) as url:
        given = ["bookie", "cookie", "show", "b1", "--metadata", f"{nobody}, {url}/", "--json"]
        status = await asyncio.to_thread(run_command, app, given)

    assert status == ExitStatus.DONE
    assert json.loads(capsys.readouterr().out)["incarnation"] == 1


@pytest.mark.parametrize("form", [(), ("--json",)])
async def test_ctrl_c_while_more_is_read_than_can_be_sent_is_clean(
    nobody: str, form: tuple[str, ...], tmp_path: Path
) -> None:
    lines = tmp_path / "lines"
    lines.write_bytes(b"a line\n" * 1_000_000)
    with lines.open("rb") as stdin:
        process = await asyncio.create_subprocess_exec(
            *words("log", "append", "x", "--timeout", "600", *form),
            env={**os.environ, "QUORUMLOG_GATEWAY": nobody},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A CI may ignore SIGINT, which children would inherit.
            preexec_fn=in_child(Become.SELF, signal.SIGKILL),
        )
        assert process.stderr
        await until(lambda: os.lseek(stdin.fileno(), 0, os.SEEK_CUR) >= 1 << 20, "much is read")
        process.send_signal(signal.SIGINT)
        async with within("it ends"):
            said = (await process.stderr.read()).decode()
            await process.wait()

    assert process.returncode == ExitStatus.INTERRUPTED
    assert "Traceback" not in said
    if form:
        error = error_of(said)
        assert (error["code"], error["appended"]) == ("interrupted", 0)
    else:
        assert "no records appended" in said


def test_a_table_whose_reader_is_gone_ends_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with closing(os.fdopen(writer, "w")) as stdout:
        done = subprocess.run(
            words("--version"), stdout=stdout, stderr=subprocess.PIPE, timeout=240, check=False
        )

    assert (done.returncode, done.stderr) == (ExitStatus.PIPE_CLOSED, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_an_output_without_room_is_an_error() -> None:
    with Path("/dev/full").open("w") as stdout:
        done = subprocess.run(
            words("--version"), stdout=stdout, stderr=subprocess.PIPE, timeout=240, check=False
        )

    assert done.returncode == ExitStatus.FAILED
    assert b"No space left" in done.stderr
    assert b"Traceback" not in done.stderr


def test_closed_standard_streams_are_no_tracebacks(nobody: str) -> None:
    shell = subprocess.list2cmdline(words("log", "append", "x", "--json"))
    done = subprocess.run(
        ["bash", "-c", f"{shell} <&- >&-"],
        env={**os.environ, "QUORUMLOG_GATEWAY": nobody},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert done.returncode == ExitStatus.FAILED
    assert "standard input is closed" in error_of(done.stderr)["detail"]


def test_the_guide_has_every_exit_status() -> None:
    guide = _GUIDE.read_text(encoding="utf-8")

    assert [status for status in ExitStatus if f"| {status.value} |" not in guide] == []


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "quorumlog-input"]


async def first_of(file: Path) -> list[bytes]:
    async with contextlib.aclosing(records(None, file, Framing.LINES)) as found:
        return await anext(found)


def test_an_input_that_is_left_early_is_closed_with_its_thread(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_bytes(b"a line\n" * 1_000_000)

    assert asyncio.run(first_of(lines))

    until_sync(lambda: not readers(), "the thread has ended")
    assert lines not in [descriptor.resolve() for descriptor in Path("/proc/self/fd").iterdir()]


def test_what_comes_after_the_event_loops_end_is_dropped_silently(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pipe.open("r+b", buffering=0) as writer:
        writer.write(b"first\n")
        assert asyncio.run(first_of(pipe)) == [b"first"]
        writer.write(b"late\n")
        until_sync(lambda: not readers(), "the thread has ended")


async def test_no_more_is_read_ahead_than_a_few_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipes, "_CHUNK", 7)
    lines = tmp_path / "lines"
    lines.write_bytes(b"a line\n" * 100)
    reads = 0
    read = os.read

    def counted(source: int, size: int) -> bytes:
        nonlocal reads
        reads += size == 7
        return read(source, size)

    monkeypatch.setattr(os, "read", counted)
    taken = 0
    async with contextlib.aclosing(records(None, lines, Framing.LINES)) as found:
        async for some in found:
            assert some == [b"a line"]
            taken += 1
            assert reads <= taken + pipes._CHUNKS_AHEAD

    assert taken == 100
