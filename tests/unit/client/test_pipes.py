"""The input of an append that ends early, in this process."""

import asyncio
import contextlib
import os
import threading
from pathlib import Path

import pytest

from quorumlog.cli import pipes
from quorumlog.cli.pipes import Framing, records
from tests.support.waiting import until_sync


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


def test_what_comes_after_the_event_loop_has_ended_is_dropped_without_a_warning(
    tmp_path: Path,
) -> None:
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
