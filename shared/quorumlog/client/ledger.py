"""The handle of one ledger: append, read, follow, close, recover."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final, cast

from quorumlog import header
from quorumlog.client import checks
from quorumlog.client.batching import Batcher, Batching, Call
from quorumlog.client.records import (
    FRAMES,
    Appended,
    Entry,
    Page,
    Paged,
    ahead,
    entries_of,
    frames,
)
from quorumlog.client.shown import LedgerInfo
from quorumlog.client.streaming import AppendStream
from quorumlog.client.transport import Transport

_OCTETS: Final = "application/octet-stream"
PAGE: Final = 10_000
"""Entries per page that an iterator requests: the API's maximum. The server limits the bytes of a
page too. Reading pages of 1,000 short entries took twice as long (measured)."""
WAIT_MS: Final = 30_000
"""How long one request waits at a tail for new entries, in milliseconds."""


class Ledger:
    """A handle of a ledger. It keeps the ledger's id and password, and the appends under way."""

    ledger_id: int

    def __init__(
        self,
        transport: Transport,
        ledger_id: int,
        password: str | None,
        batching: Batching,
    ) -> None:
        """Use `Client.ledger` or `Client.create_ledger`."""
        self.ledger_id = checks.offset("ledger_id", ledger_id)
        self._transport = transport
        self._path = f"/v1/ledgers/{ledger_id}"
        self._headers = with_password(password)
        self._stream = AppendStream(transport, f"{self._path}/ws")
        self.batcher = Batcher(self._send, _share, _size_of, transport, batching)

    def __repr__(self) -> str:
        """The class and the id, for log lines."""
        return f"Ledger({self.ledger_id})"

    async def append(self, payload: bytes, *, expect: int | None = None) -> int:
        """Append one entry and return the entry's id once the entry is durable.

        Appends that are made while a request is under way share the next request, in the order of
        the calls. After an error whose `outcome` is unknown the entry may have been appended. The
        client does not retry this append, and does not send the appends queued behind it. `expect`:
        the id that the entry must get. Otherwise nothing is written, and UnexpectedEntryId is raised.
        """
        return (await self.batcher.append((payload,), expect)).first_entry

    async def submit(self, payload: bytes) -> asyncio.Future[Appended]:
        """Queue one entry; the future is done once the entry is durable.

        Waits only while the queue is full (`Batching.queued_bytes_max`).
        """
        return await self.batcher.submit((payload,))

    async def append_batch(
        self, payloads: Sequence[bytes], *, expect: int | None = None
    ) -> Appended:
        """Append entries with consecutive ids. After an unknown outcome, the first entries may exist."""
        return await self.batcher.append(checks.several("payloads", payloads), expect)

    async def flush(self) -> None:
        """Wait until every append of this handle has succeeded or failed."""
        await self.batcher.flush()

    async def _send(self, call: Call[bytes]) -> Appended:
        is_streamed = call.expect is None and self._stream.is_ready(self._headers)
        if is_streamed or len(call.payloads) > 1:
            body, content_type = frames(call.payloads), FRAMES
        else:
            body, content_type = call.payloads[0], _OCTETS
        if is_streamed:
            reported = await self._stream.send(body, call.end)
            if reported is not None:
                return _appended(reported, len(call.payloads))
        answer = await self._transport.request(
            "POST",
            f"{self._path}/entries",
            body=body,
            content_type=content_type,
            params={"expect": call.expect},
            headers=self._headers,
            is_repeatable=False,
            end=call.end,
        )
        return _appended(answer.json(), len(call.payloads))

    async def read(
        self, first: int = 0, *, limit: int | None = None, last: int | None = None, wait_ms: int = 0
    ) -> Page:
        """Read entries from `first` to `last`, as many as fit in one response.

        `wait_ms`: how long the server may wait for a new entry at the tail.
        """
        params = {
            "from": checks.offset("first", first),
            "wait_ms": checks.offset("wait_ms", wait_ms),
            "limit": checks.maybe_offset("limit", limit),
            "to": checks.maybe_offset("last", last),
        }
        answer = await self._transport.request(
            "GET",
            f"{self._path}/entries",
            params=params,
            headers={"Accept": FRAMES, **self._headers},
            is_repeatable=True,
            wait_s=wait_ms / 1000,
        )
        return Page(
            tuple(entries_of(answer.body)),
            int(answer.headers[header.NEXT_ENTRY_ID]),
            int(answer.headers[header.LAST_ADD_CONFIRMED]),
            answer.headers[header.LEDGER_CLOSED] == "true",
        )

    def entries(self, first: int = 0, *, last: int | None = None) -> Paged[Entry]:
        """The entries that are confirmed when the iteration begins, in order."""
        end = checks.maybe_offset("last", last)
        return Paged(ahead(self._entries(checks.offset("first", first), end)))

    async def _entries(self, first: int, last: int | None) -> AsyncGenerator[Sequence[Entry], None]:
        while last is None or first <= last:
            page = await self.read(first, last=last, limit=PAGE)
            yield page.entries
            last = page.last_add_confirmed if last is None else min(last, page.last_add_confirmed)
            if page.next == first:
                return
            first = page.next

    def tail(self, first: int = 0) -> Paged[Entry]:
        """Yield entries, and new entries once they are confirmed, until the ledger is closed. Never fences."""
        return Paged(self._tail(checks.offset("first", first)))

    async def _tail(self, first: int) -> AsyncGenerator[Sequence[Entry], None]:
        while True:
            page = await self.read(first, limit=PAGE, wait_ms=WAIT_MS)
            yield page.entries
            first = page.next
            if page.is_end:
                return

    async def info(self) -> LedgerInfo:
        """The ledger as the API shows it: state, quorums, fragments, metadata."""
        return cast("LedgerInfo", await self._call("GET", ""))

    async def last_add_confirmed(self) -> int:
        """The id of the last confirmed entry; -1 while no entry is confirmed."""
        answer = await self._call("GET", "/last-add-confirmed")
        return int(answer["last_add_confirmed"])

    async def close(self) -> dict[str, Any]:
        """Close the ledger after its last acknowledged entry, through its writer."""
        return await self._call("POST", "/close")

    async def recover(self, *, declare_lost: Sequence[str] = ()) -> dict[str, Any]:
        """Recover a ledger whose writer may be gone: fence it, read to its end, close it. Every caller
        gets the same last entry. `declare_lost`: bookies that never come back. If you name such
        bookies, the recovered ledger may lack entries.
        """
        named = checks.names("declare_lost", declare_lost)
        return await self._call("POST", "/recover", {"declare_lost": named} if named else None)

    async def change_password(self, password: str) -> dict[str, Any]:
        """Replace the ledger's password. This handle uses the new password from then on.

        Raises: WrongPassword; InvalidRequest for a ledger without a password.
        """
        headers = with_password(password)
        shown = await self._call("PUT", "/password", {"password": password})
        self._headers = headers
        return shown

    async def accept_loss(
        self, first: int, last: int, *, declare_lost: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Give up entries first..last of a closed ledger for ever: reads of these entries raise
        EntryLost.

        Raises: LossNotProven unless every bookie that could store the entries reports that it lacks
        them. Bookies in `declare_lost` are gone for ever, and need not respond.
        """
        wanted = {
            "first": checks.offset("first", first),
            "last": checks.offset("last", last),
            "declare_lost": checks.names("declare_lost", declare_lost),
        }
        return await self._call("POST", "/accept-loss", wanted)

    async def _call(
        self, method: str, path: str, value: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        return await self._transport.call(method, self._path + path, value, headers=self._headers)


async def created(transport: Transport, options: Mapping[str, Any]) -> int:
    """Create a ledger and return its id. A retry of the request creates no second ledger."""
    return int((await transport.call("POST", "/v1/ledgers", options))["ledger_id"])


def _appended(shown: Mapping[str, Any], count: int) -> Appended:
    first = int(shown["entry_id"] if "entry_id" in shown else shown["first_entry"])
    return Appended(first, first + count - 1, int(shown["last_add_confirmed"]))


def _size_of(payload: bytes) -> int:
    return len(checks.octets("an entry", payload))


def _share(done: Appended, index: int, count: int) -> Appended:
    first = done.first_entry + index
    return Appended(first, first + count - 1, done.last_add_confirmed)


def with_password(password: str | None) -> Mapping[str, str]:
    """The header with the ledger's password; empty without a password."""
    if password is None:
        return {}
    return {header.LEDGER_PASSWORD: checks.header_value("password", password)}
