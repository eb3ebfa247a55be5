"""Moves records between standard input or output and a ledger or log, with a framing.

Input records are sent as they arrive, even from a slow `tail -f`, in batches of the waiting
records. Records that are read are written page by page. Standard output contains nothing but the
records.
"""

import asyncio
import base64
import contextlib
import os
import stat
import struct
import sys
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import orjson
import typer

from quorumlog.cli.output import (
    CutShort,
    EndedEarly,
    common_options,
    print_answer,
    progress,
)
from quorumlog.cli.session import BATCHING
from quorumlog.client import Entry, LogRecord, Paged
from quorumlog.client.records import frames
from quorumlog.errors import NOT_DONE, UNKNOWN, QuorumLogError

_CHUNK: Final = 1 << 18
_GROUP: Final = 1000
"""Records per future. With one future per record, futures took half of an append's time."""
_SETTLE_S: Final = 2.0
"""How long Ctrl-C waits for responses; a second Ctrl-C ends the wait (by judgement)."""
_CHUNKS_AHEAD: Final = 8
_LENGTH: Final = struct.Struct(">I")
_RECORD_BYTES_MAX: Final = 64 << 20
"""Maximum bytes that are read for one record. No server accepts a longer record."""
ENTRIES: Final = ("entries", "entry")
RECORDS: Final = ("records", "offset")
"""Words for messages: the plural of the item, and the API's name for an item's id or offset."""


class Framing(StrEnum):
    """How a stream of bytes is divided into records."""

    LINES = "lines"
    """A newline after each record; the last record may lack it."""
    NULL = "null"
    """A zero byte after each record, as `find -print0` and `sort -z` write it."""
    FRAMES = "frames"
    """Each record follows its length (u32 big-endian). Records may contain any bytes."""
    RAW = "raw"
    """No framing: the whole input is one record, and output records have no separators."""


FramingOption = Annotated[
    Framing,
    typer.Option(
        "--format", help="How a stream is divided into records; frames and raw allow any bytes."
    ),
]
FollowOption = Annotated[
    bool,
    typer.Option(
        "--follow", "-f", help="Also print new entries or records, once they are confirmed."
    ),
]
LinesOption = Annotated[
    int,
    typer.Option("--lines", "-n", min=0, help="Begin this many entries or records before the end."),
]
FileOption = Annotated[Path | None, typer.Option(help="Read this file instead of standard input.")]


def split(data: bytearray, framing: Framing) -> list[bytes]:
    """Remove the complete records from the start of `data`, and return them."""
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
    """Join records to one sequence of bytes, with framing."""
    if framing is Framing.FRAMES:
        return frames(payloads)
    after = {Framing.LINES: b"\n", Framing.NULL: b"\0", Framing.RAW: b""}[framing]
    return b"".join(payload + after for payload in payloads)


async def records(
    texts: Sequence[str] | None, file: Path | None, framing: Framing
) -> AsyncGenerator[list[bytes], None]:
    """Yield the records to append: the arguments, or else the records of a file or of standard
    input as they arrive.

    Raises: CutShort if the input ends within a frame, or a record is too long.
    """
    if texts:
        yield [os.fsencode(text) for text in texts]
        return
    if file is None and sys.stdin is None:
        raise CutShort("standard input is closed: pass records as arguments or with --file")
    rest = bytearray()
    async with contextlib.aclosing(_chunks(file)) as chunks:
        async for chunk in chunks:
            rest += chunk
            found = split(rest, framing)
            if found:
                yield found
            if len(rest) > _RECORD_BYTES_MAX:
                raise CutShort(f"a record exceeds {_RECORD_BYTES_MAX:,} bytes: check --format")
    if framing is Framing.FRAMES and rest:
        raise CutShort("the input ends within a frame: check --format")
    if rest:
        yield [bytes(rest)]


async def _chunks(file: Path | None) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of a file or of standard input, as they arrive. A daemon thread reads the
    bytes, so that a read from a terminal, which may block for ever, does not delay Ctrl-C.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    room, is_over = threading.Semaphore(_CHUNKS_AHEAD), threading.Event()
    source = 0 if file is None else os.open(file, os.O_RDONLY)

    def read() -> None:
        while room.acquire() and not is_over.is_set():
            try:
                chunk: bytes | OSError = os.read(source, _CHUNK)
            except OSError as error:
                chunk = error
            # The event loop may be closed by the time the read returns.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(queue.put_nowait, chunk)
            if not chunk or isinstance(chunk, OSError):
                break
        if file is not None:
            os.close(source)

    threading.Thread(target=read, name="quorumlog-input", daemon=True).start()
    try:
        while chunk := await queue.get():
            if isinstance(chunk, OSError):
                raise chunk
            room.release()
            yield chunk
    finally:
        is_over.set()
        room.release()


class Places(NamedTuple):
    """The ids or offsets of the first and the last record."""

    first: int
    last: int


SubmitPayloads = Callable[[Sequence[bytes]], Awaitable[asyncio.Future[Places]]]


@dataclass(slots=True)
class _Sending:
    """The groups of records under way, in order, and the answers so far. Records are counted
    separately, because records of other writers may lie between two groups.
    """

    under_way: deque[tuple[asyncio.Future[Places], int, int]] = field(default_factory=deque)
    """For each group: its future, the number of records, and their bytes."""
    queued_bytes: int = 0
    count: int = 0
    bytes_done: int = 0
    first: int | None = None
    last: int | None = None

    def take(self) -> None:
        """Add the oldest group, which is done, to the totals. Raises the future's exception."""
        future, count, size = self.under_way.popleft()
        self.queued_bytes -= size
        done = future.result()
        self.first = done.first if self.first is None else self.first
        self.last = done.last
        self.count += count
        self.bytes_done += size


def print_places(words: tuple[str, str], subject: dict[str, Any], done: Places | None) -> None:
    """Print the first and the last id or offset of the appended records."""
    first, last = (done.first, done.last) if done else (None, None)
    text = f"{first}..{last}" if done else None
    print_answer({**subject, f"first_{words[1]}": first, f"last_{words[1]}": last}, text)


async def send_input(
    texts: Sequence[str] | None,
    file: Path | None,
    framing: Framing,
    submit: SubmitPayloads,
    words: tuple[str, str],
) -> Places | None:
    """Append the records that `records` yields. Returns and raises the same as `send`."""
    return await send(
        records(texts, file, framing), submit, words, None if texts else _size_of(file)
    )


async def send(
    payloads: AsyncIterator[list[bytes]],
    submit: SubmitPayloads,
    words: tuple[str, str],
    size: int | None,
) -> Places | None:
    """Append all payloads in order, and return the first and last id or offset, or None without
    payloads.

    `words`: ENTRIES or RECORDS. `size`: bytes of the input, if known. Raises: EndedEarly, whose
    message reports what was appended. After Ctrl-C the function reads no more input, and waits
    briefly for outstanding responses.
    """
    sending = _Sending()
    try:
        with progress("appended", size) as show:
            async for some in payloads:
                await _send_groups(some, submit, sending)
                show(sending.count, sending.bytes_done)
            await _settle(sending, 0)
    except asyncio.CancelledError:
        raise await _stopped(sending, words, None, await _settled(sending)) from None
    except QuorumLogError as error:
        raise await _stopped(sending, words, error, error) from error
    except (CutShort, OSError) as error:  # the input has failed
        raise await _stopped(sending, words, error, await _settled(sending)) from error
    if sending.first is None or sending.last is None:
        return None
    return Places(sending.first, sending.last)


async def _send_groups(some: list[bytes], submit: SubmitPayloads, sending: _Sending) -> None:
    for start in range(0, len(some), _GROUP):
        group = some[start : start + _GROUP]
        size = sum(map(len, group)) + len(group)
        await _settle(sending, BATCHING.queued_bytes_max // 2 - size)
        sending.under_way.append((await submit(group), len(group), size))
        sending.queued_bytes += size


async def _settle(sending: _Sending, bytes_max: int) -> None:
    """Count the answered groups, and wait until at most `bytes_max` bytes are under way."""
    under_way = sending.under_way
    while under_way and (under_way[0][0].done() or sending.queued_bytes > bytes_max):
        await asyncio.wait([under_way[0][0]])
        sending.take()


async def _settled(sending: _Sending) -> BaseException | None:
    """Wait up to `_SETTLE_S` for all answers. Returns the first error, or None."""
    try:
        async with asyncio.timeout(_SETTLE_S):
            await _settle(sending, 0)
    except (QuorumLogError, TimeoutError, asyncio.CancelledError) as error:
        return error
    return None


async def _stopped(
    sending: _Sending, words: tuple[str, str], why: Exception | None, failed: BaseException | None
) -> EndedEarly:
    """Build the error that reports which records were appended. `failed`: a group's error, if any."""
    rest = [future for future, _, _ in sending.under_way]
    if rest and not isinstance(failed, TimeoutError):
        await asyncio.wait(rest, timeout=_SETTLE_S)
    later = sum(count for future, count, _ in sending.under_way if _error_of(future) is None)
    errors = [failed, *map(_error_of, rest)]
    is_known = all(each is None or getattr(each, "outcome", UNKNOWN) == NOT_DONE for each in errors)
    for future in rest:
        future.cancel()
    name, place = words
    said = f"{sending.count or 'no'} {name} appended"
    if sending.last is not None:
        said += f", the last at {place} {sending.last}"
    if not is_known:
        said += "; the outcome of the next ones is unknown"
    elif later:
        said += f", and {later} after the refused ones"
    elif sending.count:
        said += f"; continue the input after its first {sending.count} {name}"
    members = {"appended": sending.count, "first": sending.first, "last": sending.last}
    return EndedEarly(said, members | {"appended_later": later, "is_rest_known": is_known}, why)


def _error_of(future: asyncio.Future[Places]) -> BaseException | None:
    if not future.done() or future.cancelled():
        return asyncio.CancelledError()
    return future.exception()


def _size_of(file: Path | None) -> int | None:
    """The size of the input in bytes, or None if the input is not a regular file."""
    with contextlib.suppress(OSError):
        found = os.fstat(0) if file is None else file.stat()
        return found.st_size if stat.S_ISREG(found.st_mode) else None
    return None


def form(item: Entry | LogRecord, framing: Framing, *, as_json: bool) -> bytes:
    """Format an entry or a record for output: its payload with framing, or a line of JSON."""
    payload = item.payload if isinstance(item, Entry) else item.value
    if not as_json:
        return joined((payload,), framing)
    is_tombstone = isinstance(item, LogRecord) and item.is_tombstone
    data = None if is_tombstone else base64.b64encode(payload).decode()
    shown: dict[str, Any]
    if isinstance(item, Entry):
        shown = {"entry_id": item.entry_id, "data": data}
    else:
        key = None if item.key is None else base64.b64encode(item.key).decode()
        shown = {"offset": item.offset, "timestamp": item.timestamp, "key": key}
        shown |= {"headers": item.headers, "data": data}
    return orjson.dumps(shown) + b"\n"


async def write_items(
    found: Paged[Entry] | Paged[LogRecord],
    framing: Framing,
    words: tuple[str, str],
    end: int | None = None,
) -> None:
    """Write entries or records to standard output, page by page.

    `end`: the total number of items, if known.
    Raises: EndedEarly, whose message reports which items were written.
    """
    count, last, as_json = 0, None, common_options().as_json
    pages: AsyncGenerator[Sequence[Any], None] = found.pages()
    try:
        # A progress bar on the same terminal would hide the output lines.
        with progress("read", end, "items", is_hidden=sys.stdout.isatty()) as show:
            async with contextlib.aclosing(pages):
                async for page in pages:
                    if page:
                        _write_all(
                            b"".join([form(item, framing, as_json=as_json) for item in page])
                        )
                        count, final = count + len(page), page[-1]
                        last = final.entry_id if isinstance(final, Entry) else final.offset
                    show(count, 0)
    except (asyncio.CancelledError, QuorumLogError) as error:
        if isinstance(error, QuorumLogError) and last is None:
            raise
        said = f"{count} {words[0]} read"
        if last is not None:
            said += f", the last at {words[1]} {last}; continue with --from {last + 1}"
        raise EndedEarly(said, {"read": count, "last": last}, error) from None


def _write_all(data: bytes) -> None:
    left = memoryview(data)
    while left:
        # Without a buffer (PYTHONUNBUFFERED), a write that a signal interrupts (Ctrl-Z and fg, for
        # example) writes only a part of the data.
        left = left[sys.stdout.buffer.write(left) :]
    sys.stdout.buffer.flush()
