r"""Bytes to a socket, and what comes back: no client library stands between, which would refuse to
send what is wrong.

As a program it sends a finding's request again: `python -m tests.outside.attack.raw HOST:PORT --peer
127.0.0.2 'GET / HTTP/1.1\r\n\r\n'` (escapes as Python writes them), or `--file` with the bytes.
"""

import argparse
import asyncio
import contextlib
import hashlib
import shlex
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

BUILD: Final = Path(__file__).resolve().parents[3] / "build" / "attack"
LITERAL_MAX: Final = 3000
"""Bytes of a request that a command line still shows; longer ones go into a file."""
BODY_MAX: Final = 4 << 20
"""Of an answer so much is read and then no more: nobody looks at the rest."""
HANG_S: Final = 100.0
"""Above every documented deadline of a connection: 65 s at rest, 60 s for an answer."""
STREAMS: Final = ("text/event-stream", "application/x-ndjson")
"""These answers need not end."""


class Hang(Exception):
    """A connection neither got its answer nor ended."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer's status, its headers in small letters, and its body as far as it was read."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def media(self) -> str:
        """Its type without parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip()


@contextlib.asynccontextmanager
async def connected(
    address: str, peer: str
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection from an address of this machine's own; it is broken off at the end."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(
        host, int(port), local_addr=(peer, 0), limit=1 << 20
    )
    try:
        yield reader, writer
    finally:
        # Not `close`, which would wait for bytes that nobody takes.
        writer.transport.abort()


async def ask(
    address: str,
    data: bytes,
    *,
    peer: str,
    method: str = "GET",
    hang_s: float = HANG_S,
    ends: bool = False,
) -> Answer | None:
    """The final answer to these bytes; None where the connection ended without one. `ends`: the client says at once that it
    sends no more.

    Raises: Hang.
    """
    try:
        async with asyncio.timeout(hang_s), connected(address, peer) as (reader, writer):
            writer.write(data)
            if ends:
                writer.write_eof()
            return await answer_of(reader, has_body=method != "HEAD")
    except TimeoutError as error:
        raise Hang(f"neither an answer nor an end within {hang_s:g} s") from error
    except OSError:
        return None


async def answer_of(reader: asyncio.StreamReader, *, has_body: bool = True) -> Answer | None:
    """The next final answer; None where the connection ended before it was whole."""
    try:
        while True:
            answer = await _head(reader)
            if answer.status == 101 or answer.status >= 200:
                break
        if not has_body or answer.status in (101, 204, 304) or answer.media in STREAMS:
            return answer
        return Answer(answer.status, answer.headers, await _body(reader, answer.headers))
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
        return None


async def ended(reader: asyncio.StreamReader) -> None:
    """Read to the connection's end, whatever comes."""
    with contextlib.suppress(OSError):
        while await reader.read(1 << 20):
            pass


async def _head(reader: asyncio.StreamReader) -> Answer:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines if line)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    return Answer(int(first.split(" ")[1]), headers, b"")


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if "content-length" in headers:
        return await reader.readexactly(min(int(headers["content-length"]), BODY_MAX))
    if headers.get("transfer-encoding", "") != "chunked":
        return await reader.read(BODY_MAX)
    parts = []
    while size := int(await reader.readline(), 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
        if sum(map(len, parts)) > BODY_MAX:
            break
    return b"".join(parts)


def command(address: str, data: bytes, peer: str) -> str:
    """A command that sends this again."""
    program = f"python -m tests.outside.attack.raw {address} --peer {peer}"
    if len(data) <= LITERAL_MAX:
        return f"{program} {shlex.quote(escaped(data))}"
    BUILD.mkdir(parents=True, exist_ok=True)
    path = BUILD / f"{hashlib.sha256(data).hexdigest()[:16]}.request"
    path.write_bytes(data)
    return f"{program} --file {path.relative_to(BUILD.parents[1])}"


def escaped(data: bytes) -> str:
    """The bytes as text for a command line."""
    return data.decode("latin-1").encode("unicode_escape").decode()


def unescaped(text: str) -> bytes:
    """The bytes of such a text."""
    return text.encode().decode("unicode_escape").encode("latin-1")


async def _again(asked: argparse.Namespace) -> int:
    data = asked.file.read_bytes() if asked.file else unescaped(asked.bytes)
    try:
        answer = await ask(asked.address, data, peer=asked.peer)
    except Hang as error:
        print(error)
        return 1
    if answer is None:
        print("the connection ended without an answer")
        return 1
    print(answer.status, dict(answer.headers))
    print(answer.body.decode(errors="replace"))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.outside.attack.raw")
    parser.add_argument("address", help="HOST:PORT")
    parser.add_argument("bytes", nargs="?", default="", help="with Python's escapes")
    parser.add_argument("--file", type=Path)
    parser.add_argument("--peer", default="127.0.0.2", help="the address to ask from")
    return asyncio.run(_again(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
