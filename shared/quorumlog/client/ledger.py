"""One ledger: append, read, follow, end."""

import base64
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from quorumlog.client.transport import Transport

_FRAMES: Final = "application/vnd.quorumlog.frames"
_LENGTH: Final = struct.Struct(">I")
_WAIT_MS: Final = 30_000


@dataclass(frozen=True, slots=True)
class Appended:
    """Entries that are durable on an ack quorum: ids first to last."""

    first_entry: int
    last_entry: int
    last_add_confirmed: int


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry as it was appended."""

    entry_id: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Page:
    """Some entries in order. Go on at `next`; the end is reached when `is_end` says so."""

    entries: tuple[Entry, ...]
    next: int
    last_add_confirmed: int
    closed: bool

    @property
    def is_end(self) -> bool:
        """Whether the ledger is closed and nothing follows this page."""
        return self.closed and self.next > self.last_add_confirmed


class Ledger:
    """A ledger of a cluster. Holds nothing but its id and password."""

    def __init__(self, transport: Transport, ledger_id: int, password: str | None) -> None:
        self.ledger_id = ledger_id
        self._transport = transport
        self._path = f"/v1/ledgers/{ledger_id}"
        self._headers = with_password(password)

    def __repr__(self) -> str:
        """The id."""
        return f"Ledger({self.ledger_id})"

    async def append(self, payload: bytes, *, expect: int | None = None) -> int:
        """Append one entry and return its id once it is durable.

        An error whose `outcome` is unknown may have appended it; it is never sent twice by itself.
        `expect`: the id that it must get, else UnexpectedEntryId and nothing is written.
        """
        answer = await self._post_entries(payload, "application/octet-stream", expect)
        return int(answer["entry_id"])

    async def append_batch(
        self, payloads: Sequence[bytes], *, expect: int | None = None
    ) -> Appended:
        """Append entries that get consecutive ids. Of a batch whose outcome is unknown a prefix may
        be there.
        """
        body = b"".join(part for p in payloads for part in (_LENGTH.pack(len(p)), p))
        answer = await self._post_entries(body, _FRAMES, expect)
        return Appended(
            int(answer["first_entry"]),
            int(answer["last_entry"]),
            int(answer["last_add_confirmed"]),
        )

    async def _post_entries(self, body: bytes, content_type: str, expect: int | None) -> Any:
        answer = await self._transport.request(
            "POST",
            f"{self._path}/entries",
            body=body,
            content_type=content_type,
            params=None if expect is None else {"expect": expect},
            headers=self._headers,
            is_repeatable=False,
        )
        return answer.json()

    async def read(
        self, first: int = 0, *, limit: int | None = None, last: int | None = None, wait_ms: int = 0
    ) -> Page:
        """Read entries from `first` on, as many as one answer holds.

        `wait_ms`: how long the server may wait for one at the tail.
        """
        params: dict[str, str | int] = {"from": first, "wait_ms": wait_ms}
        if limit is not None:
            params["limit"] = limit
        if last is not None:
            params["to"] = last
        answer = await self._transport.request(
            "GET",
            f"{self._path}/entries",
            params=params,
            headers=self._headers,
            is_repeatable=True,
            wait_s=wait_ms / 1000,
        )
        page = answer.json()
        return Page(
            tuple(
                Entry(int(entry["entry_id"]), base64.b64decode(entry["data"]))
                for entry in page["entries"]
            ),
            int(page["next"]),
            int(page["last_add_confirmed"]),
            bool(page["closed"]),
        )

    async def entries(self, first: int = 0, *, last: int | None = None) -> AsyncIterator[Entry]:
        """The entries that are confirmed now, in order."""
        while last is None or first <= last:
            page = await self.read(first, last=last, limit=1000)
            for entry in page.entries:
                yield entry
            if page.next > page.last_add_confirmed or page.next == first:
                return
            first = page.next

    async def tail(self, first: int = 0) -> AsyncIterator[Entry]:
        """The entries in order, and those to come, until the ledger is closed."""
        while True:
            page = await self.read(first, limit=1000, wait_ms=_WAIT_MS)
            for entry in page.entries:
                yield entry
            first = page.next
            if page.is_end:
                return

    async def info(self) -> dict[str, Any]:
        """The ledger as the API shows it: state, quorums, fragments, metadata."""
        return await self._call("GET", "", is_repeatable=True)

    async def last_add_confirmed(self) -> int:
        """The last entry that is confirmed, -1 where there is none."""
        answer = await self._call("GET", "/last-add-confirmed", is_repeatable=True)
        return int(answer["last_add_confirmed"])

    async def close(self) -> dict[str, Any]:
        """End the ledger after its last acknowledged entry, through its writer."""
        return await self._call("POST", "/close", is_repeatable=True)

    async def recover(self, *, declare_lost: Sequence[str] = ()) -> dict[str, Any]:
        """End the ledger although its writer may be gone: fence, read on, close. All who ask get
        the same end. `declare_lost` names bookies that never come back: entries may be lacking.
        """
        lost = orjson.dumps({"declare_lost": list(declare_lost)}) if declare_lost else None
        return await self._call("POST", "/recover", is_repeatable=True, body=lost)

    async def _call(
        self, method: str, path: str, *, is_repeatable: bool, body: bytes | None = None
    ) -> dict[str, Any]:
        answer = await self._transport.request(
            method,
            self._path + path,
            headers=self._headers,
            is_repeatable=is_repeatable,
            body=body,
        )
        found: dict[str, Any] = answer.json()
        return found


def with_password(password: str | None) -> Mapping[str, str]:
    """The header that opens a ledger which has a password."""
    return {} if password is None else {"Ledger-Password": password}
