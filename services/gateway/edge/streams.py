"""Streams over HTTP: NDJSON both ways, and Server-Sent Events that follow a ledger's tail.

Until the first byte of an answer an error is a status; after that it is the stream's last line.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson
from aiohttp import web

from quorumlog.errors import BadRequest, QuorumLogError, RequestTimeout, TooLarge
from quorumlog.protocol.ids import ID_MAX
from quorumlog.wire import problems
from services.gateway.edge import params
from services.gateway.edge.answers import entries_json
from services.gateway.edge.body import Room, send_continue
from services.gateway.edge.follows import Told, told_tail
from services.gateway.edge.limits import BATCH_ENTRIES_MAX
from services.gateway.edge.middleware import REQUEST_ID
from services.gateway.edge.params import EVENTS, NDJSON
from services.gateway.edge.payloads import from_line
from services.gateway.edge.pipe import Pipe
from services.gateway.interface import EngineInterface, ReadResult

log = logging.getLogger(__name__)

PAGE_BYTES: Final = 1 << 20
"""What a stream reads ahead of its client (taste)."""
TAIL_BYTES: Final = 256 << 10
"""What a tail does: hundreds of slow readers, each with a page in hand, must fit into memory."""
_ENTRY_BYTES: Final = 64
"""What an entry takes besides its payload."""
_LINE_OVERHEAD: Final = 1024
_ESCAPED: Final = 6
"""Bytes that JSON may take for one: \\u0000."""


ParseLine = Callable[[bytes, int, int], bytes]
"""The payload of a line: its text, its number, and the most bytes that an entry may have."""


@dataclass(frozen=True, slots=True)
class Range:
    """What a reader asks for; `last` is inclusive, and None stands for no limit."""

    ledger_id: int
    first: int
    last: int | None = None
    limit: int | None = None
    max_bytes: int | None = None
    password: str | None = None


class Source:
    """Reads a range page by page. Invariant: `first` is the next entry that nobody was given."""

    def __init__(self, engine: EngineInterface, room: Room, wanted: Range) -> None:
        self._engine = engine
        self._room = room
        self.wanted = wanted
        self.first = wanted.first

    async def page(
        self, *, limit: int = BATCH_ENTRIES_MAX, max_bytes: int = PAGE_BYTES, wait_s: float = 0.0
    ) -> ReadResult:
        """The next entries, maybe none. At the tail waits until there are some, or the ledger is
        closed, or the time is over.
        """
        result = await self._read(self.first, limit, max_bytes)
        if wait_s > 0 and not result.runs and not result.closed:
            await self._room.wait(self._news(self.first, wait_s))
            result = await self._read(self.first, limit, max_bytes)
        self.first = result.next
        return result

    async def _read(self, first: int, limit: int, max_bytes: int) -> ReadResult:
        return await self._engine.read(
            self.wanted.ledger_id,
            first,
            last=self.wanted.last,
            limit=limit,
            max_bytes=max_bytes,
            password=self.wanted.password,
        )

    async def _news(self, at: int, wait_s: float) -> object:
        return await self._engine.last_add_confirmed(
            self.wanted.ledger_id, after=at - 1, wait_s=wait_s, password=self.wanted.password
        )

    async def read(self, at: int, wait_s: float) -> ReadResult:
        """As a follow reads."""
        page = await self._read(at, BATCH_ENTRIES_MAX, TAIL_BYTES)
        if wait_s > 0 and not page.runs and not page.closed:
            await self._news(at, wait_s)
            page = await self._read(at, BATCH_ENTRIES_MAX, TAIL_BYTES)
        return page

    def size(self, page: ReadResult) -> int:
        """Bytes of a page."""
        return sum(run.payload_bytes + _ENTRY_BYTES * run.count for run in page.runs)

    def rest(self, page: ReadResult, at: int) -> ReadResult:
        """The entries from `at` on."""
        parts = (run.where(lambda entry_id: entry_id >= at) for run in page.runs)
        return replace(page, runs=tuple(part for part in parts if part is not None))

    def is_end(self, page: ReadResult) -> bool:
        """Whether a page reaches the end of a closed ledger."""
        return is_end(page)

    async def tail(self) -> AsyncGenerator[Told[ReadResult], None]:
        """Pages without an end, the first one at once, then an empty one for each 15 s in which
        nothing came. Ends after the page that reaches the end of a closed ledger or the range's
        last entry, or when this process is about to end.
        """
        wait_s, last = self._room.limits.comment_every_s, self.wanted.last
        if last is None:
            async with aclosing(
                told_tail(
                    self._room.follows,
                    ("ledger", self.wanted.ledger_id),
                    self,
                    self.first,
                    wait_s=wait_s,
                    waited=self._room.wait,
                )
            ) as shared:
                async for told in shared:
                    yield told
                    if self._room.is_ending:
                        return
            return
        wait_s = 0.0
        while True:
            page = await self.page(wait_s=wait_s)
            yield Told(page)
            wait_s = self._room.limits.comment_every_s
            if is_end(page) or self.first > last or self._room.is_ending:
                return


def is_end(page: ReadResult) -> bool:
    """Whether a page reaches the end of a closed ledger."""
    return page.closed and page.next > page.last_add_confirmed


def position(result: ReadResult) -> dict[str, str]:
    """Where a read stands, for forms that have no room for it in the body."""
    return {
        "Next-Entry-Id": str(result.next),
        "Last-Add-Confirmed": str(result.last_add_confirmed),
        "Ledger-Closed": "true" if result.closed else "false",
        "Lac-Source": result.lac_source,
    }


async def opened(
    request: web.Request, media: str, headers: dict[str, str] | None = None
) -> web.StreamResponse:
    """A streamed answer whose head is sent."""
    response = web.StreamResponse(
        headers={
            "Content-Type": media,
            "Cache-Control": "no-store",
            "Vary": "Accept",
            "X-Accel-Buffering": "no",
            "X-Request-Id": request[REQUEST_ID],
            **(headers or {}),
        }
    )
    await response.prepare(request)
    return response


@contextlib.asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Run work beside a block, and end it with the block."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


# --- NDJSON --------------------------------------------------------------------------------------


async def send_lines(
    request: web.Request, source: Source, page: ReadResult, encoding: str
) -> web.StreamResponse:
    """A range as lines, up to what is confirmed now; an error in between is the last line."""
    wanted, end = source.wanted, page.last_add_confirmed
    left = _Left(wanted)
    lines = _lines_of(page, encoding)
    response = await opened(request, NDJSON, position(page))
    if request.method == "HEAD":
        return response
    try:
        while True:
            if lines:
                await response.write(lines)
            left.take(page)
            if not page.runs or left.is_over or source.first > end:
                break
            page = await source.page(limit=left.entries, max_bytes=left.bytes)
            lines = _lines_of(page, encoding)
    except QuorumLogError as error:
        await response.write(problems.to_bytes(error, request[REQUEST_ID]) + b"\n")
    await response.write_eof()
    return response


class _Left:
    """What of a range's limits is left; one that was not given never ends."""

    def __init__(self, wanted: Range) -> None:
        self._entries, self._bytes = wanted.limit, wanted.max_bytes

    def take(self, page: ReadResult) -> None:
        """Count a page."""
        if self._entries is not None:
            self._entries -= sum(run.count for run in page.runs)
        if self._bytes is not None:
            self._bytes -= sum(run.payload_bytes for run in page.runs)

    @property
    def is_over(self) -> bool:
        return any(left is not None and left <= 0 for left in (self._entries, self._bytes))

    @property
    def entries(self) -> int:
        return BATCH_ENTRIES_MAX if self._entries is None else self._entries

    @property
    def bytes(self) -> int:
        return PAGE_BYTES if self._bytes is None else min(PAGE_BYTES, self._bytes)


def _lines_of(page: ReadResult, encoding: str) -> bytes:
    return b"".join(line + b"\n" for line in entries_json(page.runs, encoding))


async def append_lines(
    request: web.Request,
    room: Room,
    pipe: Pipe,
    *,
    parse: ParseLine = from_line,
    names: tuple[str, str] = ("first_entry", "last_entry"),
) -> web.StreamResponse:
    """Append one entry a line; answer one line for each acknowledged run, cumulative."""
    response: web.StreamResponse | None = None
    async with beside(_read_lines(request, room, pipe, parse)):
        async for appended in pipe.acknowledged():
            if response is None:
                response = await opened(request, NDJSON)
            await response.write(
                f'{{"{names[0]}":{appended.first},"{names[1]}":{appended.last}}}\n'.encode()
            )
    if pipe.error is not None:
        if response is None:
            raise pipe.error
        await response.write(problems.to_bytes(pipe.error, request[REQUEST_ID]) + b"\n")
    if response is None:
        response = await opened(request, NDJSON)
    await response.write_eof()
    return response


async def _read_lines(request: web.Request, room: Room, pipe: Pipe, parse: ParseLine) -> None:
    """Put each line of the body into the pipe; what ends the stream too early is the pipe's error."""
    entry_bytes_max, number = room.limits.entry_bytes_max, 0
    try:
        await send_continue(request)
        async for lines in _lines(request, room):
            payloads = []
            for line in lines:
                if line and not line.isspace():
                    try:
                        payloads.append(parse(line, number, entry_bytes_max))
                    except QuorumLogError:
                        await _put(pipe, payloads)
                        raise
                    number += 1
            await _put(pipe, payloads)
    except QuorumLogError as error:
        pipe.finish(error)
    except (web.RequestPayloadError, ConnectionError):
        pipe.finish(BadRequest("the stream was cut short"))
    except Exception:
        log.exception("unhandled-error")
        pipe.finish(QuorumLogError())
    else:
        pipe.finish()


async def _put(pipe: Pipe, payloads: list[bytes]) -> None:
    for start in range(0, len(payloads), BATCH_ENTRIES_MAX):
        await pipe.put(payloads[start : start + BATCH_ENTRIES_MAX])


async def _lines(request: web.Request, room: Room) -> AsyncIterator[Iterable[bytes]]:
    """The lines of a body, as many as come at once.

    A line that has begun must be complete in time; between lines a stream may rest for longer.
    Raises: RequestTimeout, TooLarge.
    """
    limits, loop = room.limits, asyncio.get_running_loop()
    line_bytes_max = _ESCAPED * limits.entry_bytes_max + _LINE_OVERHEAD
    rest, deadline = b"", loop.time() + limits.stream_idle_s
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                chunk = await room.wait(request.content.readany())
        except TimeoutError as error:
            raise RequestTimeout("the next line was not complete in time") from error
        if chunk is None:
            raise RequestTimeout("this gateway is about to end")
        if not chunk:
            if rest:
                yield (rest,)
            return
        *lines, last = chunk.split(b"\n")
        now = loop.time()
        if lines:
            lines[0] = rest + lines[0]
            rest, deadline = last, now + limits.body_timeout_s
        elif rest:
            rest += last
            deadline += len(chunk) / limits.body_rate_bytes_s_min
        else:
            rest, deadline = last, now + limits.body_timeout_s
        if not rest:
            deadline = now + limits.stream_idle_s
        if len(rest) > line_bytes_max:
            raise TooLarge(f"a line of more than {line_bytes_max} bytes")
        if lines:
            yield lines


# --- Server-Sent Events --------------------------------------------------------------------------


def last_event_id(request: web.Request) -> int:
    """The id of the last event that a client has seen."""
    text = request.headers.get("Last-Event-ID", "")
    return params.integer(text, "/header/Last-Event-ID", 0, ID_MAX - 1)


async def send_events(request: web.Request, source: Source, encoding: str) -> web.StreamResponse:
    """Each entry as an event whose id is the entry's; follows the tail until the ledger is closed."""
    response: web.StreamResponse | None = None
    try:
        async with aclosing(source.tail()) as pages:
            async for told in pages:
                page = told.page
                events = told.form(("events", encoding), lambda page: _events_of(page, encoding))
                if response is None:
                    response = await opened(request, EVENTS)
                    if request.method == "HEAD":
                        return response
                if events or not is_end(page):
                    await response.write(events or b": \n\n")
                if is_end(page):
                    end = orjson.dumps({"last_entry": page.last_add_confirmed})
                    await response.write(b"event: end\ndata: " + end + b"\n\n")
    except QuorumLogError as error:
        if response is None:
            raise
        document = problems.to_bytes(error, request[REQUEST_ID])
        await response.write(b"event: problem\ndata: " + document + b"\n\n")
    assert response is not None, "a tail has at least one page"
    await response.write_eof()
    return response


def _events_of(page: ReadResult, encoding: str) -> bytes:
    ids = (entry_id for run in page.runs for entry_id in run.ids)
    return b"".join(
        b"id: %d\ndata: %b\n\n" % (entry_id, entry)
        for entry_id, entry in zip(ids, entries_json(page.runs, encoding), strict=True)
    )
