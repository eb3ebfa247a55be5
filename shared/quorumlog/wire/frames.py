"""Pure functions for the binary messages of a bookie's channel (`GET /v1/channel`).

The channel is the hot path; the same operations exist as plain HTTP for people. All numbers are
big-endian. If a message can't be parsed (`BadFrame`), its receiver closes the connection, since no
part of the message can be trusted, not even the request id.

Frame, one per message:
    size of the fields u32 | size of the run u32 | crc32c u32 (of both sizes) | fields | run
The run, if there is one, ends the message. The run has a size of its own, so that the receiver can
keep the run in one buffer from the socket to the log. The head has a CRC, so that no receiver
allocates memory for a damaged size.

Request, one per message:
    op u8 | flags u8 | 0 u16 | crc32c u32 | request id u64 | ledger i64 | first i64 | last i64
    | size of member u8 | member (name@incarnation of the receiver) | then by op:
    ADD        ledger key [32] | with flag 4, the metadata that names the member (rule 18b):
               version u64 | attempt [16] (zeros: none) | size u32 (0: the member has a copy)
               | copy of the metadata | run
    READ       ledger key [32] (zeros when not fencing) | bytes max u32
    FENCE      ledger key [32]
    READ_LAC   nothing
    WRITE_LAC  ledger key [32]; the value is `last`
    KEEP_ROW   ledger key [32] | version u64 | attempt [16] | size u32 | copy of the metadata
The CRC covers the whole message except itself.

Answers, many per message:
    crc32c u32 (of the rest) | size of member u8 | member (the sender, rule 4) | then per answer:
    kind u8 (the op) | status u8 | 0 u16 | request id u64 | ledger i64 | first i64 | last i64
    | LAC i64 | size of body u32 | body
Body of a READ: absent count u32 | (first i64, last i64) each | run or nothing. Other answers have
no body. The message's run belongs to the last answer.
"""

import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import google_crc32c

from quorumlog.protocol.ids import KEY_BYTES, NO_ENTRY
from quorumlog.protocol.messages import Status
from quorumlog.protocol.record import BadRun, Run
from quorumlog.protocol.row_copy import RowCopy, RowName

NO_KEY: Final = bytes(KEY_BYTES)
"""The value that represents a missing ledger key."""

MESSAGE_BYTES_MAX: Final = 80 << 20
"""Maximum message size, above the largest run (64 MiB: docs/reference/http.md) with its columns."""

FRAME_HEAD: Final = struct.Struct(">III")
_SIZES_BYTES: Final = 8
_REQUEST: Final = struct.Struct(">BBHIQqqqB")
_REST: Final = struct.Struct(">QqqqB")
_ANSWER: Final = struct.Struct(">BBHQqqqqI")
_U32: Final = struct.Struct(">I")
_RANGE: Final = struct.Struct(">qq")
_ROW: Final = struct.Struct(">Q16sI")

_SMALL_BYTES: Final = 16 * 1024
"""Maximum size of a frame in one buffer: a copy costs less than another buffer (measured)."""

_CRC_STEP_BYTES: Final = 64 * 1024
"""Size of the steps in which messages are copied for the CRC, which accepts no memoryview."""

_RECOVERY: Final = 1
_NAMED: Final = 4
_FENCING: Final = 1
_FROM_DISK: Final = 2


class Op(IntEnum):
    """The operations of a bookie."""

    ADD = 1
    """Store a run's entries. Recovery adds, which repairs send too, pass the fence (rule 2)."""
    READ = 2
    """Return entries first..last."""
    FENCE = 3
    """Fence the ledger durably, then answer with the LAC."""
    READ_LAC = 4
    """Answer with the bookie's highest LAC, without fencing."""
    WRITE_LAC = 5
    """Store `last` as the explicit LAC, which never decreases."""
    KEEP_ROW = 6
    """Store a copy of the ledger's metadata durably (rule 18b)."""


_OPS: Final = dict(enumerate(Op, start=1))
_FLAGS_MAX: Final = (0, _RECOVERY | _NAMED, _FENCING | _FROM_DISK, 0, 0, 0, 0)
_WITH_BODY: Final = (Op.ADD, Op.KEEP_ROW)
_STATUSES: Final = tuple(Status)
_STATUS_BYTES: Final = {status: index for index, status in enumerate(Status)}


class BadFrame(ValueError):
    """The bytes are not a valid message: they are truncated, damaged, or of another protocol."""


class Message(NamedTuple):
    """A message, in the two parts of its frame."""

    fields: bytes
    run: bytes = b""
    """The run that ends the message; empty if there is none."""

    @property
    def size(self) -> int:
        """The size of the message, in bytes."""
        return len(self.fields) + len(self.run)


class Request(NamedTuple):
    """A request. Fields that its op does not use have their defaults."""

    op: Op
    request_id: int
    ledger_id: int
    first: int
    last: int
    member: str
    ledger_key: bytes = NO_KEY
    recovery: bool = False
    fence: bool = False
    """For a READ: whether to fence the ledger first, with `ledger_key`."""
    bytes_max: int = 0
    run: Run | None = None
    from_disk: bool = False
    """For a READ: whether to sync the entries first, and read them from the disk."""
    named_by: RowName | None = None
    """For an ADD: the version of the metadata that names the member (rule 18b)."""
    row: RowCopy | None = None
    """A copy of the version in `named_by`; None if the member has already acknowledged a copy."""


class ChannelAnswer(NamedTuple):
    """An answer, which repeats the request's op, ledger and range (rule 4)."""

    op: Op
    status: Status
    request_id: int
    ledger_id: int
    first: int
    last: int
    last_add_confirmed: int = NO_ENTRY
    body: bytes | memoryview = b""
    """The body; in a received answer, a view into the message's fields."""
    run: bytes = b""
    """The bytes that follow `body`, separate so that a large run is not copied."""


class ReadBody(NamedTuple):
    """A bookie's entries of a range. An entry in neither `run` nor `absent` is unknown."""

    run: Run | None
    absent: tuple[tuple[int, int], ...]


def frame_of(message: Message) -> tuple[bytes, ...]:
    """The frame of a message, as a tuple of buffers for one write."""
    fields, run = message
    sizes = FRAME_HEAD.pack(len(fields), len(run), 0)[:_SIZES_BYTES]
    head = sizes + _U32.pack(google_crc32c.value(sizes))
    if len(fields) + len(run) <= _SMALL_BYTES:
        return (b"".join((head, fields, run)),)
    return (head, fields, run) if run else (head, fields)


def parse_frame_head(head: bytes) -> tuple[int, int]:
    """Parse the sizes of a message's fields and of its run. Raises: BadFrame."""
    fields, run, crc = FRAME_HEAD.unpack(head)
    if crc != google_crc32c.value(head[:_SIZES_BYTES]):
        raise BadFrame("a frame's head is damaged: the CRC is wrong")
    if fields + run > MESSAGE_BYTES_MAX:
        raise BadFrame(f"a message has {fields + run} bytes; the limit is {MESSAGE_BYTES_MAX}")
    return fields, run


def encode_request(request: Request) -> Message:
    """Encode a request as a message."""
    op, request_id, ledger_id, first, last, member = request[:6]
    key = request.ledger_key or NO_KEY
    if len(key) != KEY_BYTES:
        raise ValueError(f"a ledger key must have {KEY_BYTES} bytes (got {len(key)})")
    flags = request.recovery * _RECOVERY | request.fence * _FENCING | request.from_disk * _FROM_DISK
    tail = b"" if op is Op.READ_LAC else key
    if op is Op.READ:
        tail += _U32.pack(request.bytes_max)
    if request.named_by is not None:
        flags |= _NAMED if op is Op.ADD else 0
        row = b"" if request.row is None else request.row.body
        tail += _ROW.pack(*request.named_by, len(row)) + row
    name, run = member.encode(), b"" if request.run is None else request.run.body
    start = bytes((op, flags, 0, 0))
    rest = _REST.pack(request_id, ledger_id, first, last, len(name)) + name + tail
    crc = google_crc32c.extend(google_crc32c.value(start + rest), run)
    return Message(b"".join((start, _U32.pack(crc), rest)), run)


def parse_request(fields: bytes, run: bytes = b"") -> Request:
    """Parse the request in a message. Raises: BadFrame.

    An ADD's run is parsed too, and must be of the request's ledger and range.
    """
    if len(fields) < _REQUEST.size:
        raise BadFrame("a request is truncated")
    code, flags, zero, crc, request_id, ledger_id, first, last, size = _REQUEST.unpack_from(fields)
    op = _OPS.get(code)
    if op is None or zero or flags & ~_FLAGS_MAX[code]:
        raise BadFrame(f"a request has the unknown op {code} or flags {flags}")
    at = _REQUEST.size + size
    tail_at = at if op is Op.READ_LAC else at + KEY_BYTES
    body_at = tail_at + 4 if op is Op.READ else tail_at
    if len(fields) < body_at or (len(fields) + len(run) != body_at and op not in _WITH_BODY):
        raise BadFrame("a request's size does not match its op")
    body = fields[body_at:]
    start_crc = google_crc32c.value(fields[:4] + fields[8:body_at])
    if crc != google_crc32c.extend(google_crc32c.extend(start_crc, body), run):
        raise BadFrame("a request's CRC is wrong")
    member = _member(fields[_REQUEST.size : at])
    key = fields[at:tail_at] or NO_KEY
    if ledger_id < 0 or last < NO_ENTRY or first < NO_ENTRY:
        raise BadFrame("a request has a negative id")
    head = (op, request_id, ledger_id, first, last, member, key)
    if op is Op.ADD:
        named_by: RowName | None = None
        row: RowCopy | None = None
        if flags & _NAMED:
            named_by, row, body = _named(body)
        # Joining two `bytes` copies nothing if one is empty.
        added = _run(body + run)
        if added.ledger_id != ledger_id or added.first != first or added.last != last:
            raise BadFrame("an ADD's run must have the request's ledger and range")
        return Request(
            *head, recovery=flags & _RECOVERY != 0, run=added, named_by=named_by, row=row
        )
    if op is Op.READ:
        if not 0 <= first <= last:
            raise BadFrame(f"a READ has the invalid range {first}..{last}")
        (bytes_max,) = _U32.unpack_from(fields, tail_at)
        return Request(
            *head,
            fence=flags & _FENCING != 0,
            bytes_max=bytes_max,
            from_disk=flags & _FROM_DISK != 0,
        )
    if op is Op.KEEP_ROW:
        name, copy, rest = _named(body + run)
        if copy is None or rest:
            raise BadFrame("a KEEP_ROW must have exactly one copy of metadata")
        return Request(*head, named_by=name, row=copy)
    return Request(*head)


def encode_answers(member: str, answers: Sequence[ChannelAnswer]) -> Message:
    """Encode answers from `member` as one message."""
    name = member.encode()
    parts = [b"", bytes((len(name),)), name]
    last_run = answers[-1].run if answers else b""
    for op, status, request_id, ledger_id, first, last, lac, body, run in answers:
        size = len(body) + len(run)
        parts.append(
            _ANSWER.pack(
                op, _STATUS_BYTES[status], 0, request_id, ledger_id, first, last, lac, size
            )
        )
        if size:
            parts += (bytes(body), run)
    if last_run:
        parts.pop()
    rest = b"".join(parts)
    crc = google_crc32c.extend(google_crc32c.value(rest), last_run)
    return Message(_U32.pack(crc) + rest, last_run)


def parse_answers(fields: bytes, run: bytes = b"") -> tuple[str, list[ChannelAnswer]]:
    """Parse the name of the answering member, and its answers. Raises: BadFrame."""
    end = len(fields)
    if end < 5:
        raise BadFrame("an answer is truncated")
    if _U32.unpack_from(fields)[0] != google_crc32c.extend(_crc_behind(fields, 4), run):
        raise BadFrame("an answer's CRC is wrong")
    at = 5 + fields[4]
    if at > end:
        raise BadFrame("an answer is truncated")
    member = _member(fields[5:at])
    view = memoryview(fields)
    answers = []
    while at < end:
        if end - at < _ANSWER.size:
            raise BadFrame("an answer is truncated")
        code, status, zero, request_id, ledger_id, first, last, lac, size = _ANSWER.unpack_from(
            fields, at
        )
        op = _OPS.get(code)
        at += _ANSWER.size
        is_last = size == end - at + len(run)
        if op is None or zero or status >= len(_STATUSES) or (size > end - at and not is_last):
            raise BadFrame(f"an answer has an unknown op {code}, status {status} or size {size}")
        answers.append(
            ChannelAnswer(
                op,
                _STATUSES[status],
                request_id,
                ledger_id,
                first,
                last,
                lac,
                view[at:end] if is_last else view[at : at + size],
                run if is_last else b"",
            )
        )
        at = end if is_last else at + size
    if run and not (answers and answers[-1].run):
        raise BadFrame("a run follows an answer that must not have a run")
    return member, answers


def encode_absent(absent: Iterable[tuple[int, int]]) -> bytes:
    """Encode absent ranges, which precede the run in a READ's answer."""
    ranges = [_RANGE.pack(first, last) for first, last in absent]
    return b"".join((_U32.pack(len(ranges)), *ranges))


def parse_read_body(body: bytes | memoryview, run: bytes = b"") -> ReadBody:
    """Parse the run and the absent ranges in a READ's answer. Raises: BadFrame."""
    if len(body) < 4:
        raise BadFrame("a read's answer is truncated")
    (count,) = _U32.unpack_from(body)
    at = 4 + count * _RANGE.size
    if at > len(body):
        raise BadFrame("a read's answer is truncated")
    absent = tuple(_RANGE.iter_unpack(body[4:at]))
    if any(not 0 <= first <= last for first, last in absent):
        raise BadFrame("a READ's answer has an absent range that ends before it begins")
    run = bytes(body[at:]) + run
    return ReadBody(_run(run) if run else None, absent)


def _crc_behind(message: bytes, at: int) -> int:
    """The CRC of all bytes after the first `at`."""
    crc = 0
    for start in range(at, len(message), _CRC_STEP_BYTES):
        crc = google_crc32c.extend(crc, message[start : start + _CRC_STEP_BYTES])
    return crc


def _member(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError as error:
        raise BadFrame("a member's name must be UTF-8") from error


def _named(body: bytes) -> tuple[RowName, RowCopy | None, bytes]:
    """The metadata's name in an ADD or KEEP_ROW, the metadata's copy if present, and the rest."""
    if len(body) < _ROW.size:
        raise BadFrame("an add is truncated")
    version, attempt, size = _ROW.unpack_from(body)
    end = _ROW.size + size
    if end > len(body):
        raise BadFrame("an add is truncated")
    name = RowName(version, attempt)
    return name, RowCopy(name, body[_ROW.size : end]) if size else None, body[end:]


def _run(body: bytes) -> Run:
    try:
        return Run(body)
    except BadRun as error:
        raise BadFrame(str(error)) from error
