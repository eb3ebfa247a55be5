"""Every append that was acknowledged, by stream and offset, and whether it is there at the end."""

import asyncio
import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from services.gateway.streams.operations import log_of
from tests.support.waiting import SETTLED_S, until
from tests.unit.logs.support import Answer, Http

_PIECE: Final = 1 << 20
"""A body of bytes becomes records of this size."""
_AT_ONCE: Final = 8
"""Streams that are read back at once."""
_ROUTE: Final = "/v1/stream/"


@dataclass(slots=True)
class _Stream:
    """One creation of a stream. `records`: by offset what was acknowledged there; JSON as values."""

    is_json: bool
    expires: bool
    records: dict[int, Any] = field(default_factory=dict)
    end: int = 0
    is_deleted: bool = False
    """Somebody has asked for its deletion."""


@dataclass(slots=True)
class Appends:
    """What clients were told."""

    _streams: dict[str, _Stream] = field(default_factory=dict)
    count: int = 0
    """Of acknowledged records, those of streams that are gone since too."""

    def created(
        self, path: str, asked: Mapping[str, str], reported: Mapping[str, str], body: bytes
    ) -> None:
        """A stream was created with a body, perhaps an empty one; headers of the request and of the answer. A fork has what
        its source had been told below the place where the fork begins.
        """
        given = {name.lower(): value for name, value in asked.items()}
        answer = {name.lower(): value for name, value in reported.items()}
        media = answer["content-type"].partition(";")[0].strip().lower()
        source = self._streams.get(given.get("stream-forked-from", ""))
        expires = not given.keys().isdisjoint(("stream-ttl", "stream-expires-at"))
        expires = expires or (source is not None and source.expires)
        stream = self._streams[path] = _Stream(media == "application/json", expires)
        records = _records(body, stream)
        first = int(answer["stream-next-offset"].partition("_")[0]) - len(records)
        if source is not None:
            # A record that the fork cuts is another one there.
            is_cut = "stream-fork-sub-offset" in given and not stream.is_json
            below = first - 1 if is_cut else first
            stream.records |= {at: one for at, one in source.records.items() if at < below}
            stream.end = first
        self._note(stream, first, records)

    def deleted(self, path: str) -> None:
        """Somebody asks for a stream's deletion: from then on it may be gone."""
        if path in self._streams:
            self._streams[path].is_deleted = True

    def end(self, path: str) -> int:
        """The stream's end, as far as it was told."""
        return self._streams[path].end if path in self._streams else 0

    def acknowledged(self, path: str, end: int, body: bytes) -> None:
        """An append was acknowledged, whose records end below `end`."""
        stream = self._streams.get(path)
        if stream is not None:
            records = _records(body, stream)
            self._note(stream, end - len(records), records)

    def _note(self, stream: _Stream, first: int, records: Sequence[Any]) -> None:
        stream.records.update(enumerate(records, first))
        stream.end = max(stream.end, first + len(records))
        self.count += len(records)

    async def read_back(self, urls: Sequence[str]) -> tuple[int, list[str]]:
        """How many records were acknowledged, and what is missing or other than it was, of the streams that must be
        there. Each gateway is asked.
        """
        lost: list[str] = []
        left = iter(self._streams.items())
        async with aiohttp.ClientSession() as session:
            http = Http(session, urls)

            async def read() -> None:
                for path, stream in left:
                    if not stream.is_deleted and not stream.expires and stream.records:
                        lost.extend(await _missing(http, path, stream))

            await asyncio.gather(*(read() for _ in range(_AT_ONCE)))
        return self.count, lost


async def _missing(http: Http, path: str, stream: _Stream) -> list[str]:
    lost: list[str] = []
    log = log_of(path.removeprefix(_ROUTE))
    for at in range(len(http.urls)):
        found = await _found(http, log, at)
        lost += [
            f"{path} at {offset}, through gateway {at + 1}"
            for offset, record in stream.records.items()
            if offset not in found or _value(found[offset], stream) != record
        ]
    return lost


async def _found(http: Http, log: str, at: int) -> dict[int, bytes]:
    """The records of a log by offset; none of one that is not there."""
    found: dict[int, bytes] = {}
    start = "earliest"
    while True:
        page = await _page(
            http, f"/v1/logs/{log}/records?encoding=base64&limit=1000&from={start}", at
        )
        if page is None or not page["records"]:
            return found
        found |= {entry["offset"]: base64.b64decode(entry["data"]) for entry in page["records"]}
        start = page["next"]


async def _page(http: Http, path: str, at: int) -> Any:
    """A page of a log, once a gateway answers; None of a log that is not there."""

    async def asked() -> Answer | None:
        answer = await http.ask("GET", path, at=at)
        return None if answer.status in (429, 503, 504) else answer

    answer = await until(asked, path, SETTLED_S, passing=(aiohttp.ClientError, OSError))
    assert answer is not None
    assert answer.status in (200, 404), answer
    return answer.json if answer.status == 200 else None


def _records(body: bytes, stream: _Stream) -> list[Any]:
    if stream.is_json and body:
        value = json.loads(body)
        return value if isinstance(value, list) else [value]
    return [body[at : at + _PIECE] for at in range(0, len(body), _PIECE)]


def _value(record: bytes, stream: _Stream) -> Any:
    return json.loads(record) if stream.is_json else record
