"""The command line against a whole cluster, as a shell uses it."""

import asyncio
import contextlib
import io
import json
import os
import random
import signal
import struct
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from loadtest.cluster import Cluster
from quorumlog.cli.output import EndedEarly
from quorumlog.cli.pipes import Framing, Places, SubmitPayloads, send, write_items
from quorumlog.client import Client, ConnectionLost, Entry, Paged
from quorumlog.errors import NOT_DONE
from services.local.process import Become, in_child
from tests.support.commands import told, words
from tests.support.waiting import SETTLED_S, until, within

pytestmark = pytest.mark.asyncio(loop_scope="package")


def environment(cluster: Cluster) -> dict[str, str]:
    # What a terminal can do must not depend on where the tests run.
    given = {name: value for name, value in os.environ.items() if name[:4] not in ("TTY_", "FORC")}
    return {
        **given,
        "TERM": "xterm",
        "QUORUMLOG_TIMEOUT": "60",
        "QUORUMLOG_GATEWAY": ",".join(cluster.gateways),
        "CLUSTER_SECRET_FILE": str(cluster.secret_file),
    }


async def run(cluster: Cluster, *arguments: str, given: bytes = b"") -> tuple[int, bytes, str]:
    """The command line: exit status, output, errors."""
    return await told(*arguments, given=given, environment=environment(cluster))


@asynccontextmanager
async def started(
    cluster: Cluster, *arguments: str, stderr: int = subprocess.PIPE
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command line, beside the test."""
    process = await asyncio.create_subprocess_exec(
        *words(*arguments),
        env=environment(cluster),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        preexec_fn=in_child(Become.SELF, signal.SIGKILL),
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def new_log(cluster: Cluster) -> str:
    async with Client(*cluster.gateways) as client:
        return (await client.create_log(f"log-{uuid4().hex[:8]}")).name


async def values(cluster: Cluster, log: str) -> list[bytes]:
    async with Client(*cluster.gateways) as client:
        return [record.value async for record in client.log(log).records()]


async def ended(process: asyncio.subprocess.Process) -> str:
    """What it said on standard error; it must have ended by itself."""
    assert process.stderr
    async with within("it ends"):
        said = await process.stderr.read()
        await process.wait()
    assert b"Traceback" not in said, said.decode()
    return said.decode()


async def test_the_command_line_does_what_it_says(cluster: Cluster) -> None:
    status, out, _ = await run(cluster, "ledger", "create")
    assert status == 0
    ledger = out.decode().strip()

    assert await run(cluster, "ledger", "append", ledger, "one", "two") == (0, b"0..1\n", "")
    assert await run(cluster, "ledger", "append", ledger, given=b"three\n\nfive") == (
        0, b"2..4\n", "",
    )  # fmt: skip
    assert (await run(cluster, "ledger", "read", ledger))[1] == b"one\ntwo\nthree\n\nfive\n"
    _, out, _ = await run(cluster, "ledger", "read", ledger, "--from", "1", "--to", "2", "--json")
    assert [json.loads(line)["entry_id"] for line in out.splitlines()] == [1, 2]
    shown = json.loads((await run(cluster, "ledger", "show", ledger, "--json"))[1])
    assert shown["state"] == "OPEN"
    assert (await run(cluster, "ledger", "close", ledger))[0] == 0
    assert (await run(cluster, "ledger", "tail", ledger, "-n", "1"))[1] == b"five\n"
    _, listed, _ = await run(cluster, "bookie", "list", "--json")
    assert {json.loads(line)["id"] for line in listed.splitlines()} == {
        "bookie-1@1",
        "bookie-2@1",
        "bookie-3@1",
    }
    assert (await run(cluster, "cluster", "status", "--json"))[0] == 0


async def test_the_exit_status_tells_what_became_of_it(cluster: Cluster) -> None:
    missing, _, said = await run(cluster, "ledger", "read", "999999")
    usage, _, _ = await run(cluster, "ledger", "read")
    refused, _, _ = await run(cluster, "ledger", "create", "--digest", "hmac-sha256")
    closed = await new_log(cluster)
    async with Client(*cluster.gateways) as client:
        await client.log(closed).close()
    late, _, reported = await run(cluster, "log", "append", closed, "too late")

    assert (missing, usage, refused, late) == (4, 2, 1, 1)
    assert said.startswith("no-such-ledger")
    assert reported.startswith("no records appended\nlog-closed")


async def test_any_bytes_go_through_a_log_and_come_back(cluster: Cluster, tmp_path: Path) -> None:
    log, chance = await new_log(cluster), random.Random(7)
    records = [chance.randbytes(chance.choice((0, 1, 100, 70_000))) for _ in range(300)]
    frames = b"".join(struct.pack(">I", len(record)) + record for record in records)
    whole = tmp_path / "whole"
    whole.write_bytes(b"one\n\0record\n")

    assert (await run(cluster, "log", "append", log, "--format", "frames", given=frames))[:2] == (
        0, b"0..299\n",
    )  # fmt: skip
    appended = await run(cluster, "log", "append", log, "--format", "raw", "--file", str(whole))
    assert appended[:2] == (0, b"300..300\n")
    assert (await run(cluster, "log", "append", log, "--format", "null", given=b"a\nb\0c\0"))[
        0
    ] == 0

    assert await values(cluster, log) == [*records, b"one\n\0record\n", b"a\nb", b"c"]
    _, out, _ = await run(cluster, "log", "read", log, "--format", "frames")
    assert out.startswith(frames)
    _, out, _ = await run(cluster, "log", "read", log, "--from", "300", "--format", "raw")
    assert out == b"one\n\0record\na\nbc"
    _, out, _ = await run(cluster, "log", "read", log, "--from", "301", "--format", "null")
    assert out == b"a\nb\0c\0"


async def test_an_input_that_ends_within_a_frame_is_an_error(cluster: Cluster) -> None:
    log = await new_log(cluster)

    cut = struct.pack(">I", 1) + b"a" + struct.pack(">I", 5) + b"b"
    status, _, said = await run(cluster, "log", "append", log, "--format", "frames", given=cut)

    assert status == 1
    assert "within a frame" in said
    assert await values(cluster, log) in ([], [b"a"])


async def test_trickling_input_is_appended_at_once_and_ctrl_c_is_clean(cluster: Cluster) -> None:
    log = await new_log(cluster)
    async with started(cluster, "log", "append", log) as process:
        assert process.stdin
        for count in (1, 2):
            process.stdin.write(b"a line\n")

            async def is_there(count: int = count) -> bool:
                return len(await values(cluster, log)) == count

            await until(is_there, "the line is in the log")
        process.send_signal(signal.SIGINT)
        said = await ended(process)

        assert process.returncode == 130
        assert said == (
            "2 records appended, the last at offset 1; continue the input after its first 2 records\n"
            "interrupted\n"
        )


Futures = list[asyncio.Future[Places]]


def submits(asked: Futures) -> SubmitPayloads:
    async def submit(_group: Sequence[bytes]) -> asyncio.Future[Places]:
        asked.append(asyncio.get_running_loop().create_future())
        return asked[-1]

    return submit


async def test_ctrl_c_waits_for_the_answers_of_what_was_sent() -> None:
    asked: Futures = []

    async def payloads() -> AsyncIterator[list[bytes]]:
        yield [b"a", b"b"]
        yield [b"c"]
        asked[0].set_result(Places(5, 6))
        # The third record is answered after Ctrl-C. Another writer's record lies between.
        asyncio.get_running_loop().call_soon(lambda: asked[1].set_result(Places(8, 8)))
        raise asyncio.CancelledError

    with pytest.raises(EndedEarly) as stopped:
        await send(payloads(), submits(asked), ("records", "offset"), None)

    assert str(stopped.value) == (
        "3 records appended, the last at offset 8; continue the input after its first 3 records"
    )
    assert stopped.value.members["first"] == 5


@pytest.mark.parametrize(
    ("second", "reported"),
    [
        (ConnectionLost("gone"), "the outcome of the next ones is unknown"),
        (ConnectionLost("gone", outcome=NOT_DONE), ", and 1 after the refused ones"),
    ],
)
async def test_what_followed_a_failure_is_shown(second: ConnectionLost, reported: str) -> None:
    asked: Futures = []

    async def payloads() -> AsyncIterator[list[bytes]]:
        for value in (b"a", b"b", b"c"):
            yield [value]
        asked[0].set_result(Places(0, 0))
        asked[1].set_exception(second)
        asked[2].set_result(Places(1, 1))

    with pytest.raises(EndedEarly, match="1 records appended, the last at offset 0") as stopped:
        await send(payloads(), submits(asked), ("records", "offset"), None)

    assert stopped.value.why is second
    assert reported in str(stopped.value)


async def test_a_key_and_headers_go_with_each_record(cluster: Cluster) -> None:
    log = await new_log(cluster)

    options = ("--key", "k", "--header", "a=b=c", "--header", "d=")
    assert (await run(cluster, "log", "append", log, "x", "y", *options))[0] == 0
    _, out, _ = await run(cluster, "log", "read", log, "--json")

    for line in out.splitlines():
        record = json.loads(line)
        assert (record["key"], record["headers"]) == ("aw==", {"a": "b=c", "d": ""})
    assert len(out.splitlines()) == 2


async def test_an_empty_input_appends_nothing(cluster: Cluster) -> None:
    log = await new_log(cluster)

    assert await run(cluster, "log", "append", log) == (0, b"", "")
    status, out, _ = await run(cluster, "log", "append", log, "--json")

    assert status == 0
    assert json.loads(out) == {"log": log, "first_offset": None, "last_offset": None}


async def test_an_interrupted_write_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unbuffered(io.RawIOBase):
        """As PYTHONUNBUFFERED makes standard output, while signals come."""

        taken = b""

        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            self.taken += bytes(data[:1000])
            return min(len(data), 1000)

    async def pages() -> AsyncGenerator[list[Entry], None]:
        yield [Entry(0, b"a" * 2500), Entry(1, b"b")]
        yield []
        yield [Entry(2, b"c" * 1000)]

    raw = Unbuffered()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, write_through=True))  # type: ignore[type-var]
    await write_items(Paged(pages()), Framing.RAW, ("records", "offset"))

    assert raw.taken == b"a" * 2500 + b"b" + b"c" * 1000


async def test_a_tail_prints_what_comes_until_the_log_ends(cluster: Cluster) -> None:
    log = await new_log(cluster)
    await run(cluster, "log", "append", log, given=b"0\n1\n2\n")
    async with (
        Client(*cluster.gateways) as client,
        started(cluster, "log", "tail", log, "-n", "2") as tail,
        started(cluster, "log", "read", log, "--from", "1", "--follow") as follow,
    ):
        for process in (tail, follow):
            assert process.stdout
            async with within("the last records come"):
                assert [await process.stdout.readline() for _ in range(2)] == [b"1\n", b"2\n"]
        await client.log(log).append(b"3")
        for process in (tail, follow):
            assert process.stdout
            async with within("a new record comes"):
                assert await process.stdout.readline() == b"3\n"
        follow.send_signal(signal.SIGINT)
        assert await ended(follow) == (
            "3 records read, the last at offset 3; continue with --from 4\ninterrupted\n"
        )
        await client.log(log).close()
        await ended(tail)

        assert (follow.returncode, tail.returncode) == (130, 0)


async def test_a_read_prints_only_the_records_that_it_asks_for(cluster: Cluster) -> None:
    log = await new_log(cluster)
    await run(cluster, "log", "append", log, "--key", "a", given=b"0\n1\n")
    await run(cluster, "log", "append", log, "--key", "ab", "--header", "h=1", given=b"2\n")

    assert (await run(cluster, "log", "read", log, "--key", "a"))[1] == b"0\n1\n"
    assert (await run(cluster, "log", "read", log, "--key-prefix", "a"))[1] == b"0\n1\n2\n"
    assert (await run(cluster, "log", "read", log, "--header", "h=1"))[1] == b"2\n"
    async with Client(*cluster.gateways) as client:
        await client.log(log).close()
    assert (await run(cluster, "log", "tail", log, "--key", "ab"))[1] == b"2\n"


async def test_a_reader_that_closes_the_pipe_ends_the_output_quietly(cluster: Cluster) -> None:
    log = await new_log(cluster)
    lines = b"".join(b"%099d\n" % n for n in range(20_000))
    assert (await run(cluster, "log", "append", log, given=lines))[1] == b"0..19999\n"

    shell = subprocess.list2cmdline(words("log", "read", log))
    done = await asyncio.to_thread(
        subprocess.run,
        ["bash", "-c", f"{shell} | head -n 1; exit ${{PIPESTATUS[0]}}"],
        env=environment(cluster),
        capture_output=True,
        timeout=240,
        check=False,
    )

    assert (done.returncode, done.stdout, done.stderr) == (141, b"%099d\n" % 0, b"")


@pytest.mark.parametrize("options", [(), ("--quiet",), ("--json",)])
@pytest.mark.parametrize("work", ["append", "read"])
async def test_a_terminal_is_shown_how_far_it_is_unless_it_shall_be_quiet(
    cluster: Cluster, work: str, options: tuple[str, ...]
) -> None:
    log = await new_log(cluster)
    async with Client(*cluster.gateways) as client:
        await client.log(log).append(b"a record")
    ours, theirs = os.openpty()
    os.set_blocking(ours, False)
    try:
        async with started(cluster, "log", work, log, *options, stderr=theirs) as process:
            assert process.stdin
            process.stdin.write(b"a line\n" if work == "append" else b"")
            process.stdin.close()
            async with within("it ends"):
                await process.wait()
        assert process.returncode == 0
        shown = b""
        with contextlib.suppress(BlockingIOError):  # all was read: our own end of it is open
            while True:
                shown += os.read(ours, 1 << 16)
        assert (work.encode() in shown) == (not options), shown
    finally:
        os.close(ours)
        os.close(theirs)


async def test_limits_are_set_and_logs_listed_by_prefix(cluster: Cluster) -> None:
    log = await new_log(cluster)
    await run(cluster, "log", "append", log, given=b"a\nb\nc\n")

    status, out, _ = await run(
        cluster, "log", "set", log, "--retention-seconds", "60", "--roll-entries", "5", "--json"
    )
    shown = json.loads(out)
    late = await run(cluster, "log", "set", log, "--roll-bytes", "1", "--if-version", "1")
    nothing = await run(cluster, "log", "set", log)
    _, listed, _ = await run(cluster, "log", "list", "--prefix", log, "--json")
    _, last, _ = await run(cluster, "log", "read", log, "--from", "-2")
    _, whole, _ = await run(cluster, "log", "read", log, "--from", "1999-01-01T00:00:00+02:00")
    wrong = await run(cluster, "log", "read", log, "--from", "1999-01-01T00:00:00")

    assert status == 0
    assert (shown["settings"]["retention_seconds"], shown["settings"]["roll_entries"]) == (60, 5)
    assert (late[0], "version-conflict" in late[2] or "version" in late[2]) == (1, True)
    assert nothing[0] == wrong[0] == 2
    assert [json.loads(line)["name"] for line in listed.splitlines()] == [log]
    assert (last, whole) == (b"b\nc\n", b"a\nb\nc\n")


async def test_a_compacted_log_on_the_command_line(cluster: Cluster) -> None:
    """Rules 27d and 27f."""
    log = f"compacted-{uuid4().hex}"
    status, out, _ = await run(
        cluster,
        "log",
        "create",
        log,
        "--cleanup-policy",
        "compact",
        "--max-dirty-percent",
        "10",
        "--json",
    )
    settings = json.loads(out)["settings"]
    assert (status, settings["cleanup_policy"], settings["max_dirty_percent"]) == (0, "compact", 10)
    assert (await run(cluster, "log", "append", log, "x"))[0] != 0, "a record needs a key"
    assert (await run(cluster, "log", "append", log, "x", "--key", "k"))[0] == 0
    assert (await run(cluster, "log", "append", log, "--key", "k", "--tombstone"))[0] == 0
    for wrong in (["--tombstone"], ["--tombstone", "--key", "k", "x"]):
        assert (await run(cluster, "log", "append", log, *wrong))[0] == 2
    async with Client(*cluster.gateways) as client:
        found = [record async for record in client.log(log).records()]
    assert [(one.value, one.is_tombstone) for one in found] == [(b"x", False), (b"", True)]

    assert (await run(cluster, "log", "append", log, "x", "--key", "k", "--ttl", "5"))[0] != 0
    changed = await run(cluster, "log", "set", log, "--cleanup-policy", "delete", "--json")
    assert (changed[0], json.loads(changed[1])["settings"]["cleanup_policy"]) == (0, "delete")

    async def expires() -> bool:
        await run(cluster, "log", "append", log, "gone", "--key", "k", "--ttl", "1")
        await asyncio.sleep(1.1)
        async with Client(*cluster.gateways) as client:
            return [one.value async for one in client.log(log).records()] == [b"x", b""]

    await until(expires, "the owner has the new policy, and the record is gone", SETTLED_S)
