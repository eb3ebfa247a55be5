"""Messages of the channel survive the trip, and nothing else is taken for one."""

import struct

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorumlog.protocol import record
from quorumlog.protocol.ids import ID_MAX, KEY_BYTES
from quorumlog.protocol.messages import Status
from quorumlog.protocol.metadata import DigestKind
from quorumlog.protocol.row_copy import RowCopy, RowName
from quorumlog.wire import frames
from quorumlog.wire.frames import Op, Request
from tests.unit.net.peer import read_body

IDS = st.integers(0, ID_MAX)
REQUEST_IDS = st.integers(0, 2**64 - 1)
MEMBERS = st.text(min_size=1, max_size=60)
KEYS = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)


@st.composite
def runs(draw: st.DrawFn) -> record.Run:
    kind = draw(st.sampled_from(list(DigestKind)))
    ids = draw(st.lists(st.integers(0, 10**6), min_size=1, max_size=8, unique=True).map(sorted))
    ledger_id = draw(IDS)
    codec = record.Codec(kind, b"k")
    made = [
        record.make(
            ledger_id=ledger_id,
            first_entry=entry_id,
            last_add_confirmed=draw(st.integers(-1, entry_id)),
            length_before=draw(st.integers(0, 10**9)),
            payloads=[draw(st.binary(max_size=40))],
            codec=codec,
        )
        for entry_id in ids
    ]
    merged = record.merge(made)
    assert merged is not None
    return merged


@st.composite
def ranges(draw: st.DrawFn) -> tuple[int, int]:
    first = draw(IDS)
    return first, draw(st.integers(first, ID_MAX))


@st.composite
def answers(draw: st.DrawFn) -> frames.ChannelAnswer:
    first, last = draw(ranges())
    return frames.ChannelAnswer(
        draw(st.sampled_from(list(frames.Op))),
        draw(st.sampled_from(list(Status))),
        draw(REQUEST_IDS),
        draw(IDS),
        first,
        last,
        draw(st.integers(-1, ID_MAX)),
        draw(st.binary(max_size=50)),
    )


@st.composite
def given_answers(draw: st.DrawFn) -> list[frames.ChannelAnswer]:
    """Answers of which the last one may have a run of its own."""
    some = draw(st.lists(answers(), max_size=5))
    if some:
        some[-1] = some[-1]._replace(run=draw(st.binary(max_size=50)))
    return some


NAMES = st.builds(RowName, st.integers(1, ID_MAX), st.binary(min_size=16, max_size=16))


@given(REQUEST_IDS, MEMBERS, KEYS, runs(), st.booleans(), st.none() | NAMES, st.binary(max_size=99))
def test_an_add_survives_the_trip(
    request_id: int,
    member: str,
    key: bytes,
    run: record.Run,
    recovery: bool,
    name: RowName | None,
    copy: bytes,
) -> None:
    request = Request(
        Op.ADD,
        request_id,
        run.ledger_id,
        run.first,
        run.last,
        member,
        key,
        recovery,
        run=run,
        named_by=name,
        row=RowCopy(name, copy) if name is not None and copy else None,
    )

    assert frames.parse_request(*frames.encode_request(request)) == request


@given(REQUEST_IDS, MEMBERS, IDS, KEYS, NAMES, st.binary(min_size=1, max_size=99))
def test_a_copy_of_a_row_survives_the_trip(
    request_id: int, member: str, ledger_id: int, key: bytes, name: RowName, copy: bytes
) -> None:
    head = (Op.KEEP_ROW, request_id, ledger_id, -1, -1, member, key)
    request = Request(*head, named_by=name, row=RowCopy(name, copy))

    assert frames.parse_request(*frames.encode_request(request)) == request


@given(
    REQUEST_IDS,
    MEMBERS,
    IDS,
    ranges(),
    st.integers(0, 2**32 - 1),
    st.none() | KEYS,
    st.booleans(),
)
def test_a_read_survives_the_trip(
    request_id: int,
    member: str,
    ledger_id: int,
    entries: tuple[int, int],
    bytes_max: int,
    key: bytes | None,
    from_disk: bool,
) -> None:
    request = Request(
        Op.READ,
        request_id,
        ledger_id,
        *entries,
        member,
        key or frames.NO_KEY,
        fence=key is not None,
        bytes_max=bytes_max,
        from_disk=from_disk,
    )

    assert frames.parse_request(*frames.encode_request(request)) == request


@given(REQUEST_IDS, MEMBERS, IDS, KEYS, st.integers(-1, ID_MAX))
def test_fence_and_lac_requests_survive_the_trip(
    request_id: int, member: str, ledger_id: int, key: bytes, lac: int
) -> None:
    head = (request_id, ledger_id, -1)
    for request in (
        Request(Op.FENCE, *head, -1, member, key),
        Request(Op.READ_LAC, *head, -1, member),
        Request(Op.WRITE_LAC, *head, lac, member, key),
    ):
        assert frames.parse_request(*frames.encode_request(request)) == request


def test_a_key_of_another_size_is_not_sent() -> None:
    with pytest.raises(ValueError, match=r"32 bytes \(got 3\)"):
        frames.encode_request(Request(Op.FENCE, 1, 7, -1, -1, "b@1", b"key"))


@given(MEMBERS, given_answers())
def test_answers_survive_the_trip(member: str, given_answers: list[frames.ChannelAnswer]) -> None:
    message = frames.encode_answers(member, given_answers)

    assert frames.parse_answers(*message) == (member, given_answers)
    # As one piece, which version 1 of the channel sends.
    member_told, reported = frames.parse_answers(b"".join(message))
    assert member_told == member
    assert [b"".join(answer[-2:]) for answer in reported] == [
        b"".join(answer[-2:]) for answer in given_answers
    ]


@given(st.none() | runs(), st.lists(ranges(), max_size=4).map(tuple))
def test_what_a_read_found_survives_the_trip(
    run: record.Run | None, absent: tuple[tuple[int, int], ...]
) -> None:
    assert frames.parse_read_body(read_body(run, absent)) == (run, absent)


@given(st.binary(max_size=300), st.binary(max_size=60))
def test_garbage_is_never_a_message(garbage: bytes, run: bytes) -> None:
    for parse in (frames.parse_request, frames.parse_answers):
        for pieces in ((garbage,), (garbage, run)):
            with pytest.raises(frames.BadFrame):
                parse(*pieces)


def _add(run: record.Run, member: str, *, recovery: bool = False) -> Request:
    ids = (run.ledger_id, run.first, run.last)
    return Request(Op.ADD, 7, *ids, member, bytes(32), recovery, run=run)


@given(runs(), st.data())
def test_a_flipped_bit_or_a_cut_is_noticed(run: record.Run, data: st.DataObject) -> None:
    request = frames.encode_request(_add(run, "bookie-1@1"))
    answer = frames.encode_answers(
        "bookie-1@1",
        [frames.ChannelAnswer(frames.Op.READ, Status.OK, 7, run.ledger_id, run.first, run.last)],
    )
    for whole, parse in ((request, frames.parse_request), (answer, frames.parse_answers)):
        message = b"".join(whole)
        bit = data.draw(st.integers(0, len(message) * 8 - 1))
        flipped = bytearray(message)
        flipped[bit // 8] ^= 1 << bit % 8
        cut = message[: data.draw(st.integers(0, len(message) - 1))]
        for bad in (bytes(flipped), cut):
            with pytest.raises(frames.BadFrame):
                parse(bad)


def test_a_flipped_bit_of_a_large_answer_is_noticed_wherever_it_is() -> None:
    payloads = [bytes([number]) * 5000 for number in range(40)]
    codec = record.Codec(DigestKind.CRC32C)
    run = record.make(
        ledger_id=1,
        first_entry=0,
        last_add_confirmed=-1,
        length_before=0,
        payloads=payloads,
        codec=codec,
    )
    answer = frames.ChannelAnswer(
        frames.Op.READ, Status.OK, 7, 1, 0, 39, 39, frames.encode_absent(()), run.body
    )
    message = b"".join(frames.encode_answers("b@1", [answer]))
    step = frames._CRC_STEP_BYTES
    assert len(message) > 3 * step
    ((found,),) = [frames.parse_answers(message)[1]]
    assert frames.parse_read_body(found.body, found.run).run == run

    edges = [4 + number * step + near for number in range(4) for near in (-1, 0, 1)]
    for at in [*edges, len(message) - 1]:
        flipped = bytearray(message)
        flipped[at] ^= 16
        with pytest.raises(frames.BadFrame, match="CRC"):
            frames.parse_answers(bytes(flipped))


@given(st.binary(max_size=120))
def test_a_reads_answer_that_is_garbage_is_noticed_or_parses(garbage: bytes) -> None:
    try:
        body = frames.parse_read_body(garbage)
    except frames.BadFrame:
        return
    assert read_body(*body) == garbage


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (24, struct.pack(">q", 6), "must have the request's"),
        # Flag 2 said "repair" once, and nobody ever sent it: repairs send recovery adds (flag 1).
        (1, b"\3", "flags 3"),
    ],
)
def test_an_add_that_says_what_nobody_sends_is_refused(at: int, value: bytes, why: str) -> None:
    run = record.make(
        ledger_id=1,
        first_entry=5,
        last_add_confirmed=4,
        length_before=0,
        payloads=[b"x"],
        codec=record.Codec(DigestKind.CRC32C),
    )
    message = bytearray(b"".join(frames.encode_request(_add(run, "b@1", recovery=True))))
    message[at : at + len(value)] = value
    crc = google_crc32c.value(bytes(message[:4] + message[8:]))
    struct.pack_into(">I", message, 4, crc)

    with pytest.raises(frames.BadFrame, match=why):
        frames.parse_request(bytes(message))


def test_a_run_that_no_answer_ends_with_is_refused() -> None:
    answer = frames.ChannelAnswer(frames.Op.ADD, Status.OK, 7, 1, 0, 0)
    fields, _ = frames.encode_answers("b@1", [answer])
    crc = google_crc32c.extend(google_crc32c.value(fields[4:]), b"run")

    with pytest.raises(frames.BadFrame, match="that must not have a run"):
        frames.parse_answers(struct.pack(">I", crc) + fields[4:], b"run")


@given(st.binary(min_size=1, max_size=40), st.binary(max_size=40))
def test_a_frame_says_the_sizes_of_its_message(fields: bytes, run: bytes) -> None:
    frame = b"".join(frames.frame_of(frames.Message(fields, run)))
    size = frames.FRAME_HEAD.size

    assert frames.parse_frame_head(frame[:size]) == (len(fields), len(run))
    assert frame[size:] == fields + run


@given(st.integers(0, frames.FRAME_HEAD.size * 8 - 1))
def test_a_head_with_a_flipped_bit_makes_room_for_nothing(bit: int) -> None:
    head = bytearray(frames.frame_of(frames.Message(b"fields", b"run"))[0])
    head[bit // 8] ^= 1 << bit % 8

    with pytest.raises(frames.BadFrame, match="damaged"):
        frames.parse_frame_head(bytes(head[: frames.FRAME_HEAD.size]))


def test_a_head_of_more_than_a_message_may_have_is_refused() -> None:
    for fields, run, is_right in (
        (1, -1, True),
        (1, 0, False),
        (0, 1, False),
        (2**31, 2**31, False),
    ):
        most = frames.MESSAGE_BYTES_MAX if fields < 2**31 else 0
        sizes = struct.pack(">II", fields, most + run)
        head = sizes + struct.pack(">I", google_crc32c.value(sizes))
        if is_right:
            assert sum(frames.parse_frame_head(head)) == frames.MESSAGE_BYTES_MAX
        else:
            with pytest.raises(frames.BadFrame, match="bytes"):
                frames.parse_frame_head(head)
