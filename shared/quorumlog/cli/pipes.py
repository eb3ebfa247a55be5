"""Standard input to a ledger or a log, and back: the framing of records, and their flow.

Records are sent as they arrive (from a slow `tail -f` too), in batches of what is waiting; records that
are read are written page by page. Standard output has nothing but the records.
"""

import asyncio
import contextlib
import os
import struct
import sys
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, TypeVar

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from quorumlog.client import Batching

T = TypeVar("T")

_CHUNK: Final = 1 << 16
_CHUNKS_AHEAD: Final = 8
_LENGTH: Final = struct.Struct(">I")
_RECORD_BYTES_MAX: Final = 64 << 20
"""Bounds the bytes that are read for one record: no server takes a longer one."""

BATCHING: Final = Batching(count_max=5000, linger_ms=2, queued_bytes_max=8 << 20)


class Framing(StrEnum):
    """How a stream of bytes is divided into records."""

    LINES = "lines"
    """A newline after each record; the last record may lack it."""
    NULL = "null"
    """A zero byte after each record, as `find -print0` and `sort -z` write it."""
    FRAMES = "frames"
    """The length before each record, u32 big-endian: records may have any bytes."""
    RAW = "raw"
    """No framing: the whole input is one record, and records are written without separators."""


FramingOption = Annotated[
    Framing,
    typer.Option(
        "--format", help="How input is divided into records; frames and raw take any bytes."
    ),
]
FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Continue with new ones.")]
LinesOption = Annotated[
    int, typer.Option("--lines", "-n", min=0, help="Begin this many before the end.")
]
FileOption = Annotated[Path | None, typer.Option(help="Read this file instead of standard input.")]


class CutShort(Exception):
    """The input ends within a record."""


def split(data: bytearray, framing: Framing) -> list[bytes]:
    """Take the complete records off the start of `data`."""
    if framing is Framing.RAW:
        return []
    if framing is not Framing.FRAMES:
        *whole, rest = bytes(data).split(b"\n" if framing is Framing.LINES else b"\0")
        data[:] = rest
        return whole
    whole, at = [], 0
    while len(data) >= at + _LENGTH.size:
        end = at + _LENGTH.size + _LENGTH.unpack_from(data, at)[0]
        if len(data) < end:
            break
        whole.append(bytes(data[at + _LENGTH.size : end]))
        at = end
    del data[:at]
    return whole


def joined(payloads: Sequence[bytes], framing: Framing) -> bytes:
    """The bytes of records, with framing."""
    if framing is Framing.FRAMES:
        return b"".join(part for p in payloads for part in (_LENGTH.pack(len(p)), p))
    after = {Framing.LINES: b"\n", Framing.NULL: b"\0", Framing.RAW: b""}[framing]
    return b"".join(payload + after for payload in payloads)


async def records(
    texts: Sequence[str] | None, file: Path | None, framing: Framing
) -> AsyncIterator[list[bytes]]:
    """The records to append: the arguments, or those of a file or of standard input as they arrive.

    Raises: CutShort.
    """
    if texts:
        yield [text.encode() for text in texts]
        return
    rest = bytearray()
    async with contextlib.aclosing(_chunks(file)) as chunks:
        async for chunk in chunks:
            rest += chunk
            found = split(rest, framing)
            if found:
                yield found
            if len(rest) > _RECORD_BYTES_MAX:
                raise CutShort(f"a record of more than {_RECORD_BYTES_MAX} bytes")
    if framing is Framing.FRAMES and rest:
        raise CutShort("the input ends within a frame")
    if rest:
        yield [bytes(rest)]


async def _chunks(file: Path | None) -> AsyncGenerator[bytes, None]:
    """A file's bytes, read by a daemon thread beside the event loop: a read of a terminal may last for
    ever, and must not delay Ctrl-C.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | OSError] = asyncio.Queue(_CHUNKS_AHEAD)
    source = sys.stdin.fileno() if file is None else os.open(file, os.O_RDONLY)

    def read() -> None:
        # The event loop may be closed by the time the read returns.
        with contextlib.suppress(RuntimeError):
            while True:
                try:
                    chunk: bytes | OSError = os.read(source, _CHUNK)
                except OSError as error:
                    chunk = error
                asyncio.run_coroutine_threadsafe(queue.put(chunk), loop).result()
                if not chunk or isinstance(chunk, OSError):
                    return

    threading.Thread(target=read, daemon=True).start()
    while True:
        chunk = await queue.get()
        if isinstance(chunk, OSError):
            raise chunk
        if not chunk:
            return
        yield chunk


async def send(
    payloads: AsyncIterator[list[bytes]],
    submit: Callable[[bytes], Awaitable[asyncio.Future[T]]],
    place: Callable[[T], int],
) -> tuple[int, int] | None:
    """Append everything in order, and return the first and last place. After a failure, print on
    standard error what was acknowledged until then.
    """
    under_way: deque[asyncio.Future[T]] = deque()
    first: int | None = None
    last: int | None = None

    def acknowledged(done: T) -> int:
        nonlocal first, last
        last = place(done)
        first = last if first is None else first
        del under_way[0]
        return last - first + 1

    async def settle(most: int) -> None:
        while len(under_way) > most or (under_way and under_way[0].done()):
            bar(acknowledged(await under_way[0]))

    try:
        with _progress() as bar:
            async for some in payloads:
                for payload in some:
                    under_way.append(await submit(payload))
                await settle(BATCHING.count_max)
            await settle(0)
    except BaseException:
        # Answers that arrived while we waited for input count too, up to the first error.
        with contextlib.suppress(Exception, asyncio.CancelledError):
            while under_way and under_way[0].done():
                acknowledged(under_way[0].result())
        for future in under_way:
            future.cancel()
        said = "nothing" if first is None else f"{first}..{last}"
        sys.stderr.write(f"acknowledged: {said}\n")
        raise
    return None if first is None or last is None else (first, last)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int], None]]:
    """A counter on standard error, where that is a terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.completed:,} appended"), TimeElapsedColumn())
    console = Console(stderr=True, highlight=False)
    with Progress(
        *columns, console=console, transient=True, disable=not sys.stderr.isatty()
    ) as progress:
        task = progress.add_task("appended", total=None)
        yield lambda count: progress.update(task, completed=count)


async def write(pages: AsyncGenerator[Sequence[T], None], form: Callable[[T], bytes]) -> None:
    """Write each page to standard output, at once."""
    async with contextlib.aclosing(pages):
        async for page in pages:
            if page:
                left = memoryview(b"".join(map(form, page)))
                while left:
                    # Without a buffer (PYTHONUNBUFFERED), an interrupted write (Ctrl-Z and fg, say) has
                    # written only a part.
                    left = left[sys.stdout.buffer.write(left) :]
                sys.stdout.buffer.flush()
