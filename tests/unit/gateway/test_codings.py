"""Compressed bodies: each unpacks to what was sent, within the same bounds, or is refused and changes nothing."""

import asyncio
import contextlib
import os
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final

import pytest

from quorumlog.errors import BadRequest
from quorumlog.zstd import zstd
from services.gateway.edge.http.codings import MEMBER_BYTES, PIECE_BYTES, Unpacker
from services.gateway.edge.http.limits import Limits
from tests.support.waiting import until
from tests.unit.gateway.conftest import Answer, Gateway, held_bytes, running

ENTRIES: Final = "/v1/ledgers/1/entries"
FRAMES: Final = "application/vnd.quorumlog.frames"
OCTETS: Final = "application/octet-stream"
NDJSON: Final = "application/x-ndjson"
Pack = Callable[[bytes], bytes]
PACK: Final[Mapping[str, Pack]] = {
    "gzip": lambda data: zlib.compress(data, 6, 31),
    "zstd": lambda data: zstd.compress(data, 3),
}
coded = pytest.mark.parametrize("coding", ["gzip", "zstd"])


def unpacked(coding: str, data: bytes, step: int) -> bytes:
    unpacker, pieces = Unpacker(coding), []
    for start in range(0, len(data), step):
        for piece, cost in unpacker.pieces(data[start : start + step]):
            assert len(piece) <= min(PIECE_BYTES, cost)
            pieces.append(piece)
    unpacker.finish()
    return b"".join(pieces)


@coded
@pytest.mark.parametrize("step", [1, 997, 1 << 30])
@pytest.mark.parametrize(
    "data",
    [b"", b"x", os.urandom(5000), *(bytes(PIECE_BYTES * 2 + more) for more in (-1, 0, 1))],
    ids=["empty", "one", "random", "below", "pieces", "above"],
)
def test_a_body_unpacks_in_pieces_to_what_was_packed(coding: str, step: int, data: bytes) -> None:
    packed = PACK[coding](data)
    assert unpacked(coding, packed, step) == data
    assert unpacked(coding, packed + PACK[coding](b"") + packed, step) == data + data
    for cut in (1, len(packed) // 2):
        with pytest.raises(BadRequest, match="truncated"):
            unpacked(coding, packed[:cut], step)
    with pytest.raises(BadRequest, match="is not valid"):
        unpacked(coding, packed + b"\0" * 8, step)


def test_a_frame_that_refers_back_further_than_a_decoder_keeps_is_refused() -> None:
    wide = {zstd.CompressionParameter.window_log: 24}
    packed = zstd.compress(os.urandom(9 << 20), options={int(k): v for k, v in wide.items()})
    with pytest.raises(BadRequest, match="memory"):
        unpacked("zstd", packed, 1 << 16)


async def send(
    gateway: Gateway, coding: str, media: str, body: bytes, path: str = ENTRIES
) -> Answer:
    return await gateway.ask(
        "POST", path, body, headers={"Content-Type": media, "Content-Encoding": coding}
    )


@coded
async def test_every_form_of_an_append_is_taken_compressed(gateway: Gateway, coding: str) -> None:
    await gateway.create()
    pack = PACK[coding]
    for media, body in (
        ("application/json", b'{"entries":[{"text":"a"},{"text":"b"}]}'),
        (OCTETS, b"c"),
        (FRAMES, b"\0\0\0\1d\0\0\0\1e"),
        (NDJSON, b'{"text":"f"}\n{"text":"g"}\n'),
    ):
        answer = await send(gateway, coding, media, pack(body))
        assert answer.status in (200, 201), answer
    read = await gateway.ask("GET", f"{ENTRIES}?encoding=text")
    assert [entry["text"] for entry in read.json["entries"]] == list("abcdefg")


@coded
async def test_every_other_body_is_taken_compressed_too(gateway: Gateway, coding: str) -> None:
    made = await send(
        gateway, coding, "application/json", PACK[coding](b'{"metadata":{"a":"b"}}'), "/v1/ledgers"
    )
    assert (made.status, made.json["metadata"]) == (201, {"a": "b"})
    closed = await send(
        gateway, coding, "application/json", PACK[coding](b"{}"), "/v1/ledgers/1/close"
    )
    assert closed.status == 200


@pytest.mark.parametrize("media", ["application/json", NDJSON, OCTETS, FRAMES])
@pytest.mark.parametrize(
    "given", ["br", "gzip, zstd", "deflate", "gzip,gzip", "\xff", "aws-chunked"]
)
async def test_another_coding_or_several_are_refused_with_those_that_are_taken(
    gateway: Gateway, media: str, given: str
) -> None:
    await gateway.create()
    answer = await send(gateway, given, media, b'{"text":"a"}')
    assert (answer.status, answer.code) == (415, "unsupported-media-type")
    assert answer.headers["Accept-Encoding"] == "zstd, gzip"
    assert "zstd, gzip" in answer.json["detail"]
    assert (await gateway.ask("GET", ENTRIES)).json["entries"] == []


async def test_two_lines_of_the_header_are_one_list_and_no_coding_is_none(gateway: Gateway) -> None:
    await gateway.create()
    status = {}
    for lines in (["gzip", "gzip"], ["identity"], ["Identity, X-GZIP"], ["", "gzip"]):
        body = b'{"text":"a"}' if lines == ["identity"] else PACK["gzip"](b'{"text":"a"}')
        head = b"".join(b"Content-Encoding: %b\r\n" % line.encode() for line in lines)
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.listener.port)
        writer.write(
            b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
            b"%bContent-Length: %d\r\n\r\n%b" % (ENTRIES.encode(), head, len(body), body)
        )
        status[tuple(lines)] = int((await reader.read()).split()[1])
        writer.close()
    assert status == {
        ("gzip", "gzip"): 415,
        ("identity",): 201,
        ("Identity, X-GZIP",): 201,
        ("", "gzip"): 415,
    }


@coded
@pytest.mark.parametrize("media", ["application/json", NDJSON])
async def test_a_damaged_body_is_a_400(gateway: Gateway, coding: str, media: str) -> None:
    await gateway.create()
    packed = PACK[coding](b'{"text":"' + os.urandom(100).hex().encode() + b'"}')
    for body in (packed[:-3], packed[:9], b"plain", packed + b"more", packed[:20] + b"\xff" * 90):
        answer = await send(gateway, coding, media, body)
        assert (answer.status, answer.code) == (400, "bad-request"), answer
    assert (await gateway.ask("GET", ENTRIES)).json["entries"] == []
    assert await held_bytes(gateway) == 0


@coded
async def test_the_limit_of_a_body_holds_for_what_it_unpacks_to(coding: str) -> None:
    limits = Limits(body_bytes_max=10_000, entry_bytes_max=5_000, frames_bytes_max=20_000)
    async with running(limits=limits) as gateway:
        await gateway.create()
        for media, most, begin in (
            (OCTETS, 5_000, b""),
            ("application/json", 10_000, b'{"text":"a"}'),
        ):
            allowed = begin.ljust(most)
            assert (await send(gateway, coding, media, PACK[coding](allowed))).status == 201
            beyond = await send(gateway, coding, media, PACK[coding](allowed + b" "))
            assert (beyond.status, beyond.code) == (413, "too-large")
            assert f"decompresses to more than {most} bytes" in beyond.json["detail"]
        assert await held_bytes(gateway) == 0


class _Counted:
    """How much of a bomb was unpacked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = self.cost = 0
        original = Unpacker.pieces

        def pieces(unpacker: Unpacker, chunk: bytes) -> object:
            for piece, cost in original(unpacker, chunk):
                self.bytes += len(piece)
                self.cost += cost
                yield piece, cost

        monkeypatch.setattr(Unpacker, "pieces", pieces)


@coded
@pytest.mark.parametrize("media", ["application/json", FRAMES])
async def test_a_bomb_is_refused_after_the_bound_and_one_piece(
    monkeypatch: pytest.MonkeyPatch, coding: str, media: str
) -> None:
    counted = _Counted(monkeypatch)
    bound = 1 << 20
    async with running(limits=Limits(body_bytes_max=bound, frames_bytes_max=bound)) as gateway:
        await gateway.create()
        answer = await send(gateway, coding, media, PACK[coding](bytes(100 << 20)))
        assert (answer.status, answer.code) == (413, "too-large")
        assert bound < counted.bytes <= bound + PIECE_BYTES
        assert await held_bytes(gateway) == 0


@coded
async def test_empty_members_count_too(monkeypatch: pytest.MonkeyPatch, coding: str) -> None:
    counted = _Counted(monkeypatch)
    bound = 1 << 20
    async with running(limits=Limits(body_bytes_max=bound)) as gateway:
        await gateway.create()
        answer = await send(gateway, coding, "application/json", PACK[coding](b"") * 10_000)
        assert (answer.status, answer.code) == (413, "too-large")
        assert (counted.bytes, counted.cost) == (0, bound + MEMBER_BYTES)


@coded
async def test_a_body_that_unpacks_to_more_than_there_is_room_for_is_a_429(coding: str) -> None:
    limits = Limits(held_bytes_max=1 << 20, body_bytes_max=16 << 20)
    async with running(limits=limits) as gateway:
        await gateway.create()
        async with waiting_body(gateway, 1000):
            body = b'{"text":"' + b"a" * (2 << 20) + b'"}'
            answer = await send(gateway, coding, "application/json", PACK[coding](body))
            assert (answer.status, answer.code) == (429, "overloaded")
        await until(lambda: _is_free(gateway), "the room is free")


async def _is_free(gateway: Gateway) -> bool:
    return await held_bytes(gateway) == 0


@contextlib.asynccontextmanager
async def waiting_body(gateway: Gateway, count: int) -> AsyncIterator[None]:
    """While the block runs, somebody else's body is being read, of which `count` bytes have come."""
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.listener.port)
    writer.write(
        b"POST /v1/ledgers/1/entries HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n"
        b"Content-Length: 100000\r\n\r\n" + b"x" * count
    )
    try:

        async def has_come() -> bool:
            return await held_bytes(gateway) >= count

        await until(has_come, "the other body has begun")
        yield
    finally:
        writer.close()


@coded
async def test_a_stream_is_unpacked_as_it_comes(gateway: Gateway, coding: str) -> None:
    """Each flush of the client gives the records that it has sent by then."""
    await gateway.create()
    begin, flush = _streamed(coding)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.listener.port)
    writer.write(
        b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\n"
        b"Content-Encoding: %b\r\nTransfer-Encoding: chunked\r\n\r\n"
        % (ENTRIES.encode(), coding.encode())
    )
    seen = b""
    for number in range(3):
        packed = begin(b'{"text":"%d"}\n' % number) + flush()
        writer.write(b"%x\r\n%b\r\n" % (len(packed), packed))
        while b'"last_entry":%d' % number not in seen:
            more = await reader.read(1 << 16)
            assert more, seen
            seen += more
    writer.write(b"0\r\n\r\n")
    while not seen.endswith(b"0\r\n\r\n"):
        more = await reader.read(1 << 16)
        assert more, seen
        seen += more
    writer.close()
    assert b'"code":"bad-request"' in seen, "the last member has no end"
    assert len((await gateway.ask("GET", ENTRIES)).json["entries"]) == 3


def _streamed(coding: str) -> tuple[Pack, Callable[[], bytes]]:
    if coding == "zstd":
        packer = zstd.ZstdCompressor()
        return packer.compress, lambda: packer.flush(packer.FLUSH_BLOCK)
    zipped = zlib.compressobj(wbits=31)
    return zipped.compress, lambda: zipped.flush(zlib.Z_SYNC_FLUSH)


@coded
async def test_a_stream_unpacks_in_bounds(monkeypatch: pytest.MonkeyPatch, coding: str) -> None:
    counted = _Counted(monkeypatch)
    bound = 1 << 20
    async with running(limits=Limits(body_bytes_max=bound)) as gateway:
        await gateway.create()
        packed = PACK[coding](b"\n" * (200 << 20))
        answer = await send(gateway, coding, NDJSON, packed)
        assert (answer.status, answer.code) == (413, "too-large")
        assert counted.bytes <= bound + 100 * len(packed) + PIECE_BYTES
        assert await held_bytes(gateway) == 0
