"""Responses: JSON, and entries in the forms that a reader may ask for."""

import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import orjson
from aiohttp import web

from quorumlog.net.operations import JSON
from quorumlog.protocol.record import Run
from services.gateway.edge.encodings import encoded

_FRAME: Final = struct.Struct(">QI")
_JSON_HEADERS: Final = {"Content-Type": JSON, "Vary": "Accept", "Cache-Control": "no-store"}


def json_bytes(
    body: bytes, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """A response whose body is JSON already."""
    return web.Response(
        body=body,
        status=status,
        headers=_JSON_HEADERS if headers is None else {**_JSON_HEADERS, **headers},
    )


def json_value(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """A response with a JSON value."""
    return json_bytes(orjson.dumps(value), status, headers)


def no_content() -> web.Response:
    """The response to a DELETE that is done."""
    return web.Response(status=204, headers={"Cache-Control": "no-store"})


def octets(body: bytes, media: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """A response with bytes that browsers must not guess about."""
    return web.Response(
        body=body,
        headers={
            "Content-Type": media,
            "Vary": "Accept",
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            **(headers or {}),
        },
    )


def entries_json(runs: Iterable[Run], encoding: str) -> Iterator[bytes]:
    """Each entry of some runs as a JSON object."""
    return (
        b'{"entry_id":%d,%b}' % (entry_id, encoded(run.payload(index), encoding))
        for run in runs
        for index, entry_id in enumerate(run.ids)
    )


def entries_frames(runs: Iterable[Run]) -> bytes:
    """The entries of some runs as (u64 id, u32 length, payload), repeated."""
    parts: list[bytes | memoryview] = []
    for run in runs:
        for entry_id, payload in zip(run.ids, run.payloads(), strict=True):
            parts.append(_FRAME.pack(entry_id, len(payload)))
            parts.append(payload)
    return b"".join(parts)
