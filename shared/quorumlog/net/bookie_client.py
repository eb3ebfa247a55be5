"""A client of bookies. Each bookie has one channel for reads and another for all other requests.

Requests are pipelined. A request becomes `Status.UNKNOWN` if its answer is missing at the deadline
or does not echo the request (rule 4). It also becomes UNKNOWN if the connection breaks, the
bookie's address is unknown, or too many bytes are in flight. A channel connects on its first
request. After a failure to connect, the channel backs off with jitter. During the pause, requests
become unknown at once, so that a writer can change its ensemble without waiting.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import aiohttp

from quorumlog.net.framed import SEND_BYTES_MAX, Framed, connect
from quorumlog.net.identity import Role
from quorumlog.net.ports import AddDone, LacDone, ReadDone
from quorumlog.net.sessions import ExpectedServer
from quorumlog.net.timers import awake, awake_timeout
from quorumlog.protocol.ids import NO_ENTRY, member_name
from quorumlog.protocol.messages import Status
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.protocol.ranges import Ranges
from quorumlog.protocol.record import Run
from quorumlog.protocol.row_copy import RowCopy, RowName, name_of
from quorumlog.wire import frames, row_copies, versions
from quorumlog.wire.frames import ChannelAnswer, Message, Op, Request

log = logging.getLogger(__name__)

_SWEEP_S: Final = 0.1
_COPIES_MAX: Final = 20_000
"""Maximum number of ledgers for which a channel remembers the bookie's copy of the metadata: as
many as a gateway writes at a time. The next add to a forgotten ledger carries the copy again."""
_REQUEST_COST: Final = 128
"""Every request counts as at least this number of bytes in flight."""
_QUICK: Final = (Op.READ, Op.READ_LAC)

OnAnswer = Callable[[ChannelAnswer], None]


@dataclass(frozen=True, slots=True)
class ChannelLimits:
    """Deadlines, pauses and sizes of the channels."""

    connect_s: float = 2.0
    backoff_min_s: float = 0.05
    backoff_max_s: float = 1.0
    quick_s: float = 2.0
    """The deadline of reads (docs/protocol.md, Times)."""
    slow_s: float = 10.0
    """The deadline of requests that wait for a disk (adds, fences), equal to the quorum timeout."""
    in_flight_bytes_max: int = 256 << 20


@dataclass(slots=True, eq=False)
class _InFlight:
    """A request in flight, whose fields the answer must echo."""

    op: Op
    request_id: int
    ledger_id: int
    first: int
    last: int
    member: str
    done: OnAnswer
    size: int
    deadline: float
    """The time, by the channel's clock, at which the request becomes unknown."""

    def complete(self, answer: ChannelAnswer) -> None:
        """Call `done`. If it raises, call it again with UNKNOWN, so that other requests complete."""
        try:
            self.done(answer)
        except Exception:
            log.exception("answer-broke", extra={"bookie": self.member, "ledger": self.ledger_id})
            if answer.status is not Status.UNKNOWN:
                self.unknown()

    def unknown(self) -> None:
        """Complete the request with `Status.UNKNOWN`."""
        head = (self.request_id, self.ledger_id, self.first, self.last)
        self.complete(ChannelAnswer(self.op, Status.UNKNOWN, *head))


@dataclass(eq=False)
class Channel:
    """One of the two connections to a bookie. It connects on the channel's first request.

    Invariants:
      - each request in `_in_flight` completes once, by answer, deadline or broken connection;
      - `_in_flight` has the requests of each timeout class in the order of their deadlines;
      - a request enters `_in_flight` before its bytes are queued for sending.
    """

    _name: str
    _address: Callable[[str], str | None]
    _session: aiohttp.ClientSession
    _limits: ChannelLimits
    _failed: Callable[[str], None]
    _copies: dict[int, RowName] = field(default_factory=dict)
    _in_flight_bytes: int = 0
    _outbox: deque[Message] = field(default_factory=deque)
    _framed: Framed | None = None
    """The connection; None while it is closed."""
    _task: asyncio.Task[None] | None = None
    _failures: int = 0
    _not_before: float = 0.0
    _heard_at: float = 0.0
    _sweeping: bool = False
    _closed: bool = False

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._time = awake().time
        """The clock of deadlines, which stops while this process is suspended."""
        self._in_flight: tuple[dict[int, _InFlight], dict[int, _InFlight]] = ({}, {})
        """Quick requests and slow requests, by id."""

    @property
    def is_open(self) -> bool:
        """Whether the connection is open."""
        return self._framed is not None

    def has_copy(self, ledger_id: int, name: RowName | None) -> bool:
        """Whether the bookie acknowledged, on this connection, a copy of the metadata `name`."""
        return self.is_open and self._copies.get(ledger_id) == name

    def note_copy(self, ledger_id: int, name: RowName, *, is_kept: bool) -> None:
        """Record whether the bookie stores a copy of the metadata `name`, according to its answer."""
        if not is_kept:
            self._copies.pop(ledger_id, None)
        elif self.is_open and self._copies.get(ledger_id) != name:
            self._copies[ledger_id] = name
            if len(self._copies) > _COPIES_MAX:
                del self._copies[next(iter(self._copies))]

    def send(self, request: Request, done: OnAnswer) -> None:
        """Send a request; `done` is called once, after this method has returned."""
        message = frames.encode_request(request)
        is_slow = request.op not in _QUICK or request.fence or request.from_disk
        limit_s = self._limits.slow_s if is_slow else self._limits.quick_s
        size = max(message.size, _REQUEST_COST)
        sent = _InFlight(*request[:6], done, size, self._time() + limit_s)
        if not self._may_send(size):
            self._loop.call_soon(sent.unknown)
            return
        self._in_flight[is_slow][request.request_id] = sent
        self._in_flight_bytes += size
        self._outbox.append(message)
        if self._framed is not None:
            self._framed.announce()
        if not self._sweeping:
            self._sweeping = True
            self._loop.call_later(_SWEEP_S, self._sweep)

    async def close(self) -> None:
        """Close the connection; requests in flight become unknown."""
        self._closed = True
        task = self._task
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._fail_all()

    def _may_send(self, size: int) -> bool:
        if self._closed or self._in_flight_bytes + size > self._limits.in_flight_bytes_max:
            return False
        if self._task is None:
            if self._loop.time() < self._not_before:
                return False
            self._task = self._loop.create_task(self._run())
        return True

    async def _run(self) -> None:
        """Connect, exchange messages until the connection breaks, then fail requests in flight."""
        try:
            framed = await self._connect()
            try:
                framed.announce()
                await framed.closed
                raise aiohttp.ClientConnectionResetError("the bookie ended the channel")
            finally:
                self._framed = None
                framed.abort()
        except (aiohttp.ClientError, OSError, TimeoutError, frames.BadFrame) as broken:
            log.info("channel-broken", extra={"bookie": self._name, "why": repr(broken)})
            self._failed(self._name)
        except Exception:
            # Requests in flight become unknown, and the next request connects again.
            log.exception("channel-broke", extra={"bookie": self._name})
        finally:
            self._back_off()
            self._task = None
            self._fail_all()

    async def _connect(self) -> Framed:
        url = self._address(self._name)
        if url is None:
            raise aiohttp.ClientError(f"no address of bookie {self._name} is known")
        names = versions.upgrades(versions.CHANNEL)
        async with awake_timeout(self._limits.connect_s):
            expected = ExpectedServer(Role.BOOKIE, self._name)
            framed = await connect(self._session, f"{url}/v1/channel", self, names, expected)
        # A bookie that has restarted may have lost copies that it had not synced.
        self._copies.clear()
        self._framed, self._failures, self._heard_at = framed, 0, self._time()
        log.info("channel-open", extra={"bookie": self._name, "url": url})
        return framed

    def to_send(self) -> list[bytes]:
        """The frames of the next requests."""
        outbox, size = self._outbox, 0
        buffers: list[bytes] = []
        while outbox and size < SEND_BYTES_MAX:
            message = outbox.popleft()
            buffers += frames.frame_of(message)
            size += message.size
        return buffers

    def received(self, fields: bytes, run: bytes) -> None:
        """Process a message with answers. Raises: BadFrame, ClientError."""
        self._heard_at = self._time()
        member, answers = frames.parse_answers(fields, run)
        if member_name(member) != self._name:
            # The bookie has moved, and another bookie listens at its former address. Without an
            # error, this connection would stay open for ever.
            raise aiohttp.ClientError(f"{member} answers at the address of bookie {self._name}")
        for answer in answers:
            self._complete(member, answer)

    def _complete(self, member: str, answer: ChannelAnswer) -> None:
        quick, slow = self._in_flight
        request = slow.pop(answer.request_id, None) or quick.pop(answer.request_id, None)
        if request is None:
            return  # the deadline passed earlier, and completed the request
        self._in_flight_bytes -= request.size
        echoed = (
            answer.op is request.op
            and answer.ledger_id == request.ledger_id
            and answer.first == request.first
            and answer.last == request.last
            # Another incarnation may answer only to refuse the request (rule 9).
            and (member == request.member or answer.status is Status.NOT_MINE)
        )
        if echoed:
            request.complete(answer)
        else:
            log.warning("echo-differs", extra={"bookie": self._name, "member": member})
            self._failed(self._name)
            request.unknown()

    def _back_off(self) -> None:
        limits = self._limits
        self._failures += 1
        most = min(limits.backoff_max_s, limits.backoff_min_s * 2 ** min(self._failures, 10))
        self._not_before = self._loop.time() + random.uniform(most / 2, most)  # noqa: S311

    def _fail_all(self) -> None:
        failed = [request for requests in self._in_flight for request in requests.values()]
        for requests in self._in_flight:
            requests.clear()
        self._outbox.clear()
        self._in_flight_bytes = 0
        for request in failed:
            request.unknown()

    def _is_fault(self, request: _InFlight) -> bool:
        """Whether a missed deadline is the bookie's fault. While other answers arrive, a late read
        may merely wait behind the answers to other reads.
        """
        sent_at = request.deadline - self._limits.quick_s
        return request.op is not Op.READ or self._heard_at < sent_at

    def _sweep(self) -> None:
        now = self._time()
        silent = []
        for requests in self._in_flight:
            while requests:
                request = next(iter(requests.values()))
                if request.deadline > now:
                    break
                del requests[request.request_id]
                self._in_flight_bytes -= request.size
                silent.append(request)
        if any(request.deadline - self._limits.slow_s > self._heard_at for request in silent):
            # No message has arrived since a slow request was sent: the peer is gone.
            task = self._task
            if task is not None and self.is_open:
                task.cancel()
        if any(self._in_flight):
            self._loop.call_later(_SWEEP_S, self._sweep)
        else:
            self._sweeping = False
        if any(map(self._is_fault, silent)):
            self._failed(self._name)
        for request in silent:
            request.unknown()


@dataclass(eq=False)
class BookieClient:
    """The channels of one process to all bookies. Implements `ports.BookiesPort`."""

    _address: Callable[[str], str | None]
    """Returns a bookie's last known URL."""
    _session: aiohttp.ClientSession
    _limits: ChannelLimits = ChannelLimits()
    failed: Callable[[str], None] = lambda _name: None
    """Called if a bookie misses a deadline, breaks its connection, or sends an answer that does not
    match its request."""
    _channels: dict[tuple[str, bool], Channel] = field(default_factory=dict)
    """Channels by bookie name and use for reads: adds must not wait behind answers to reads."""
    _copied: tuple[LedgerMetadata, RowCopy] | None = None
    _ids: Iterator[int] = field(default_factory=lambda: count(1))
    """The ids of requests."""

    def channels(self) -> dict[str, bool]:
        """The bookies to which requests were sent, and whether their connections are open."""
        found: dict[str, bool] = {}
        for (name, _), channel in self._channels.items():
            found[name] = channel.is_open and found.get(name, True)
        return found

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*[channel.close() for channel in self._channels.values()])

    def add(
        self,
        member: str,
        ledger_key: bytes,
        run: Run,
        done: AddDone,
        *,
        recovery: bool = False,
        row: LedgerMetadata | None = None,
    ) -> None:
        """Store a member's part of a run, and a copy of its metadata `row` (rule 18b)."""
        channel, name = self._channel(member), None if row is None else name_of(row)
        has_copy = row is None or channel.has_copy(run.ledger_id, name)

        def settle(answer: ChannelAnswer) -> None:
            if name is not None:
                channel.note_copy(run.ledger_id, name, is_kept=answer.status is Status.OK)
            done(answer.status)

        request = Request(
            Op.ADD,
            next(self._ids),
            run.ledger_id,
            run.first,
            run.last,
            member,
            ledger_key,
            recovery=recovery,
            run=run,
            named_by=name,
            row=None if row is None or has_copy else self._copy_of(row),
        )
        channel.send(request, settle)

    def fence(self, member: str, ledger_id: int, ledger_key: bytes, done: LacDone) -> None:
        """Fence a ledger at a member durably; `done` gets the member's LAC."""
        self._ask(Op.FENCE, member, ledger_id, NO_ENTRY, ledger_key, _of_lac(done))

    def read_lac(self, member: str, ledger_id: int, done: LacDone) -> None:
        """Read a member's LAC without fencing."""
        self._ask(Op.READ_LAC, member, ledger_id, NO_ENTRY, frames.NO_KEY, _of_lac(done))

    def write_lac(self, member: str, ledger_id: int, lac: int, ledger_key: bytes) -> None:
        """Send a member the explicit LAC. The answer is ignored, because the next entry has a LAC too."""
        self._ask(Op.WRITE_LAC, member, ledger_id, lac, ledger_key, lambda _answer: None)

    def _ask(
        self, op: Op, member: str, ledger_id: int, last: int, ledger_key: bytes, done: OnAnswer
    ) -> None:
        request = Request(op, next(self._ids), ledger_id, NO_ENTRY, last, member, ledger_key)
        self._channel(member).send(request, done)

    def keep_row(self, member: str, ledger_key: bytes, row: LedgerMetadata, done: AddDone) -> None:
        """Make a member store a copy of a ledger's metadata (rule 18b)."""
        channel, copy = self._channel(member), self._copy_of(row)

        def settle(answer: ChannelAnswer) -> None:
            # Later adds, which only an OPEN ledger has, need not carry the copy again.
            is_of_use = answer.status is Status.OK and row.state is State.OPEN
            channel.note_copy(row.ledger_id, copy.name, is_kept=is_of_use)
            done(answer.status)

        head = (Op.KEEP_ROW, next(self._ids), row.ledger_id, NO_ENTRY, NO_ENTRY, member)
        channel.send(Request(*head, ledger_key, named_by=copy.name, row=copy), settle)

    def read(
        self,
        member: str,
        ledger_id: int,
        first: int,
        last: int,
        done: ReadDone,
        *,
        bytes_max: int,
        fence_key: bytes | None = None,
        from_disk: bool = False,
    ) -> None:
        """Read the entries from `first` to `last` that a member has. With `fence_key`, the member
        fences first (X1); with `from_disk`, it syncs and reads its disk (rule 20a).
        """
        request = Request(
            Op.READ,
            next(self._ids),
            ledger_id,
            first,
            last,
            member,
            fence_key or frames.NO_KEY,
            fence=fence_key is not None,
            bytes_max=bytes_max,
            from_disk=from_disk,
        )
        channel = self._channel(member, is_for_reads=True)
        channel.send(request, lambda answer: done(*_checked_read(answer, member)))

    def _copy_of(self, row: LedgerMetadata) -> RowCopy:
        """The encoded copy of metadata, cached because all members get it in succession."""
        if self._copied is None or self._copied[0] is not row:
            self._copied = row, RowCopy(name_of(row), row_copies.encode(row))
        return self._copied[1]

    def _channel(self, member: str, *, is_for_reads: bool = False) -> Channel:
        name = member_name(member)
        channel = self._channels.get((name, is_for_reads))
        if channel is None:
            channel = Channel(name, self._address, self._session, self._limits, self.failed)
            self._channels[name, is_for_reads] = channel
        return channel


def _of_lac(done: LacDone) -> OnAnswer:
    return lambda answer: done(answer.status, answer.last_add_confirmed)


def _checked_read(answer: ChannelAnswer, member: str) -> tuple[Status, Run | None, Ranges]:
    """A read's checked result; UNKNOWN if the answer is invalid or outside of the requested range."""
    if answer.status is not Status.OK:
        return answer.status, None, ()
    try:
        run, absent = frames.parse_read_body(answer.body, answer.run)
    except frames.BadFrame:
        log.warning("read-answer-bad", extra={"bookie": member, "ledger": answer.ledger_id})
        return Status.UNKNOWN, None, ()
    if run is not None and (
        run.ledger_id != answer.ledger_id or run.first < answer.first or run.last > answer.last
    ):
        return Status.UNKNOWN, None, ()
    return Status.OK, run, absent
