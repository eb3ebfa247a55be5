"""The bookie's hot path: one connection per peer, with many pipelined requests.

There is no task per request. A request is decided as soon as it is parsed. Its answer is queued
when all records that the answer depends on are on disk. Answers that are queued in one turn of the
event loop share a message. The bookie stops reading from a peer that does not read its answers or
has too much in flight, so that TCP applies back-pressure.
"""

import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from quorumlog.errors import Overloaded
from quorumlog.net.framed import SEND_BYTES_MAX, Framed
from quorumlog.protocol import replica
from quorumlog.protocol.messages import Status
from quorumlog.wire import frames
from quorumlog.wire.frames import ChannelAnswer, Op, Request
from services.bookie.store import ReadAnswer, Store

log = logging.getLogger(__name__)

OUT_BYTES_MAX: Final = 16 * 1024 * 1024
"""Maximum size of a slow peer's queued answers; above it the bookie stops reading from the peer."""

IN_FLIGHT_BYTES_MAX: Final = 128 * 1024 * 1024
IN_FLIGHT_MAX: Final = 16_384
"""Limits per peer. Above either limit, the channel isn't read until requests are answered."""

_ANSWER_BYTES: Final = 64
_LARGE_BYTES: Final = 64 * 1024
"""An answer with a larger run is the last in its message, because all earlier runs are copied."""


class Peer:
    """The peer of one channel, with its requests in flight and its queued answers."""

    connection: Framed
    """The connection, which is set before the first request."""

    def __init__(self, store: Store) -> None:
        """Serve `store`."""
        self._store = store
        self._out: deque[tuple[str, ChannelAnswer]] = deque()
        self._out_bytes = 0
        self._in_flight = 0
        self._in_flight_bytes = 0
        self._is_paused = False
        self._waits_for_disk = False

    def received(self, fields: bytes, run: bytes) -> None:
        """Handle a request. Raises: BadFrame."""
        request = frames.parse_request(fields, run)
        # A read counts with the size of its largest possible answer.
        size = len(fields) + len(run) + min(request.bytes_max, OUT_BYTES_MAX)
        self._receive(request, size)
        if not self._is_paused and (self._is_full() or self._store.pending.is_crowded):
            self._is_paused = True
            self.connection.pause()
            self._resume_if_roomy()

    def to_send(self) -> tuple[bytes, ...]:
        """A frame with the next answers: as many answers from one member as fit into a message."""
        out = self._out
        if not out:
            return ()
        name = out[0][0]
        answers: list[ChannelAnswer] = []
        size = 0
        while out and out[0][0] == name and size < SEND_BYTES_MAX:
            answer = out.popleft()[1]
            answers.append(answer)
            size += _size(answer)
            if len(answer.run) > _LARGE_BYTES:
                break
        self._out_bytes -= size
        self._resume_if_roomy()
        return frames.frame_of(frames.encode_answers(name, answers))

    def _is_full(self) -> bool:
        return (
            self._out_bytes > OUT_BYTES_MAX
            or self._in_flight > IN_FLIGHT_MAX
            or self._in_flight_bytes > IN_FLIGHT_BYTES_MAX
        )

    def _resume_if_roomy(self) -> None:
        if not self._is_paused or self._is_full():
            return
        if self._store.pending.is_crowded:
            # The disk can't keep up. TCP slows the peer down before the bookie must refuse adds.
            if not self._waits_for_disk:
                self._waits_for_disk = True
                self._store.pending.when_roomy(self._disk_has_room)
            return
        self._is_paused = False
        self.connection.resume()

    def _disk_has_room(self) -> None:
        self._waits_for_disk = False
        self._resume_if_roomy()

    def _receive(self, request: Request, size: int) -> None:
        self._in_flight += 1
        self._in_flight_bytes += size
        # Release the run of an add, because its payload must not stay in memory until the answer.
        asked = request._replace(run=None, row=None)

        def answer(status: Status, lac: int, body: bytes = b"", run: bytes = b"") -> None:
            self._answer(asked, size, status, lac, body, run)

        try:
            dispatch(self._store, request, answer)
        except Overloaded:
            answer(Status.UNKNOWN, -1)
        except Exception:
            # An unexpected error proves nothing about stored entries.
            log.exception("request-failed", extra={"ledger": request.ledger_id})
            answer(Status.UNKNOWN, -1)

    def _answer(
        self, request: Request, size: int, status: Status, lac: int, body: bytes, run: bytes
    ) -> None:
        self._in_flight -= 1
        self._in_flight_bytes -= size
        op, request_id, ledger_id, first, last, member = request[:6]
        # The answer to a request for an older incarnation names that incarnation (rule 15).
        name = self._store.me if status is Status.NOT_MINE else member
        answer = ChannelAnswer(op, status, request_id, ledger_id, first, last, lac, body, run)
        self._out.append((name, answer))
        self._out_bytes += _size(answer)
        self.connection.announce()


def _size(answer: ChannelAnswer) -> int:
    return _ANSWER_BYTES + len(answer.body) + len(answer.run)


def dispatch(
    store: Store, request: Request, answer: Callable[[Status, int, bytes, bytes], None]
) -> None:
    """Pass a request to the store; `answer(status, lac, body, run)` is called once."""

    def verdict(given: replica.Verdict) -> None:
        answer(given.status, given.last_add_confirmed, b"", b"")

    def found(given: ReadAnswer) -> None:
        if given.status is not Status.OK:
            answer(given.status, given.last_add_confirmed, b"", b"")
            return
        absent = frames.encode_absent(given.absent)
        answer(Status.OK, given.last_add_confirmed, absent, given.run or b"")

    member, ledger_id = request.member, request.ledger_id
    match request.op:
        case Op.ADD:
            assert request.run is not None
            store.add(
                replica.AddAsked(
                    member,
                    request.run,
                    request.ledger_key,
                    request.recovery,
                    named_by=request.named_by,
                    row=request.row,
                ),
                verdict,
            )
        case Op.READ:
            store.read(
                ledger_id,
                replica.ReadAsked(
                    member,
                    request.first,
                    request.last,
                    request.fence,
                    request.ledger_key,
                    request.from_disk,
                ),
                request.bytes_max,
                found,
            )
        case Op.FENCE:
            store.ask(ledger_id, replica.FenceAsked(member, request.ledger_key), verdict)
        case Op.READ_LAC:
            store.ask(ledger_id, replica.LacAsked(member), verdict)
        case Op.WRITE_LAC:
            store.ask(
                ledger_id, replica.LacReported(member, request.last, request.ledger_key), verdict
            )
        case Op.KEEP_ROW:
            assert request.row is not None
            store.ask(
                ledger_id, replica.RowReported(member, request.row, request.ledger_key), verdict
            )
