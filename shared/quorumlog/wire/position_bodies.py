"""The log of positions as bytes, and requests about positions between gateways.

A record of that log is JSON: `{"v":1,"rows":[[log, consumer, created, offset, version, token, holder, lease_ms,
committed_ms]…],"gone":[[log, consumer]…]}`.
"""

from collections.abc import Sequence
from dataclasses import asdict, astuple
from typing import Any, Final

import orjson

from quorumlog.errors import QuorumLogError
from quorumlog.protocol import positions
from quorumlog.protocol.positions import Answer, Batch, Position, Request
from quorumlog.wire.problems import from_document, to_document

POSITIONS_LOG: Final = "quorumlog.positions"
"""A name of the cluster's own: no request of a client reaches it by name."""

_VERSION: Final = 1
_REQUESTS: Final[dict[str, type[Request]]] = {
    kind.__name__: kind
    for kind in (
        positions.Look,
        positions.List,
        positions.Commit,
        positions.Acquire,
        positions.Renew,
        positions.Release,
        positions.Reset,
        positions.Delete,
    )
}


class BadPositions(ValueError):
    """The bytes are no record of the log of positions, or of a later release."""


def encode_batch(batch: Batch) -> bytes:
    """A record's value."""
    document: dict[str, Any] = {"v": _VERSION}
    if batch.rows:
        document["rows"] = [
            (
                row.log,
                row.consumer,
                row.created,
                row.offset,
                row.version,
                row.token,
                row.holder,
                row.lease_ms,
                row.committed_ms,
            )
            for row in batch.rows
        ]
    if batch.gone:
        document["gone"] = batch.gone
    return orjson.dumps(document)


def decode_batch(data: bytes) -> Batch:
    """Raises: BadPositions."""
    try:
        document = orjson.loads(data)
        if document["v"] != _VERSION:
            raise BadPositions(f"is of version {document['v']}")
        rows = tuple(Position(*row) for row in document.get("rows", ()))
        return Batch(rows, tuple((log, name) for log, name in document.get("gone", ())))
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise BadPositions(f"is no record of positions: {error!r}") from error


def encode_requests(requests: Sequence[Request]) -> bytes:
    """Requests, as they travel between gateways."""
    return orjson.dumps([(type(request).__name__, asdict(request)) for request in requests])


def decode_requests(data: bytes) -> list[Request]:
    """Raises: BadPositions."""
    try:
        return [_REQUESTS[kind](**fields) for kind, fields in orjson.loads(data)]
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise BadPositions(f"is no list of requests: {error!r}") from error


def encode_answers(answers: Sequence[Answer]) -> dict[str, Any]:
    """Answers in the order of their requests, as a document."""
    return {"answers": [_encoded(answer) for answer in answers]}


def _encoded(answer: Answer) -> Any:
    if isinstance(answer, QuorumLogError):
        return to_document(answer)
    if isinstance(answer, Position):
        return astuple(answer)
    return [astuple(row) for row in answer]


def decode_answers(data: bytes) -> list[Answer]:
    """Raises: BadPositions."""
    try:
        return [_decoded(answer) for answer in orjson.loads(data)["answers"]]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise BadPositions(f"is no list of answers: {error!r}") from error


def _decoded(answer: Any) -> Answer:
    if isinstance(answer, dict):
        return from_document(answer)
    if answer and isinstance(answer[0], str):
        return Position(*answer)
    return tuple(Position(*row) for row in answer)
