"""Formats of the log of positions (consumers' offsets), and of gateways' requests about positions.

A record of that log is JSON: `{"v":1,"rows":[[log, consumer, created, offset, version, token,
holder, lease_ms, committed_ms, used_ms, caller, started]…],"gone":[[log, consumer]…],
"decided":[[token, content, answer]…]}`. An answer is the index of a row in `rows`, a whole row if
`rows` lacks it, or the code of a refusal.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, get_args

import orjson

from quorumlog.errors import QuorumLogError
from quorumlog.protocol.positions import Answer, Batch, Decided, Position, Request, Stamp
from quorumlog.wire.problems import from_document, to_document

POSITIONS_LOG: Final = "quorumlog.positions"
"""A reserved name: no request of a client can name this log."""

_VERSION: Final = 1
_REQUESTS: Final[dict[str, type[Request]]] = {kind.__name__: kind for kind in get_args(Request)}


class BadPositions(ValueError):
    """The bytes are not a record of the log of positions, or are from a later release."""


def encode_batch(batch: Batch) -> bytes:
    """Encode a batch as the value of a record in the log of positions."""
    document: dict[str, Any] = {"v": _VERSION}
    if batch.rows:
        document["rows"] = [_fields(row) for row in batch.rows]
    if batch.gone:
        document["gone"] = batch.gone
    if batch.decided:
        at = {row: index for index, row in enumerate(batch.rows)}
        document["decided"] = [
            (one.token, one.content, _encoded_answer(one.answer, at)) for one in batch.decided
        ]
    return orjson.dumps(document)


def decode_batch(data: bytes) -> Batch:
    """Decode the value of a record in the log of positions. Raises: BadPositions."""
    try:
        document = orjson.loads(data)
        if document["v"] != _VERSION:
            raise BadPositions(f"is of version {document['v']}")
        rows = tuple(Position(*row) for row in document.get("rows", ()))
        gone = tuple((log, name) for log, name in document.get("gone", ()))
        decided = tuple(
            Decided(token, content, _decided(answer, rows))
            for token, content, answer in document.get("decided", ())
        )
        return Batch(rows, gone, decided)
    except (orjson.JSONDecodeError, KeyError, TypeError, IndexError) as error:
        raise BadPositions(f"is no record of positions: {error!r}") from error


def _encoded_answer(answer: Position | str, at: Mapping[Position, int]) -> Any:
    return answer if isinstance(answer, str) else at.get(answer, _fields(answer))


def _decided(answer: Any, rows: Sequence[Position]) -> Position | str:
    if isinstance(answer, str):
        return answer
    return rows[answer] if isinstance(answer, int) else Position(*answer)


def _fields(value: Any) -> tuple[Any, ...]:
    """The fields of a flat dataclass. `dataclasses.astuple` copies each and is ten times slower."""
    return tuple([getattr(value, name) for name in value.__slots__])


def encode_requests(requests: Sequence[tuple[Request, Stamp | None]]) -> bytes:
    """Encode requests about positions, for another gateway."""
    return orjson.dumps(
        [
            (type(request).__name__, _fields(request), stamp and _fields(stamp))
            for request, stamp in requests
        ]
    )


def decode_requests(data: bytes) -> list[tuple[Request, Stamp | None]]:
    """Decode another gateway's requests about positions. Raises: BadPositions."""
    try:
        return [
            (_REQUESTS[kind](*fields), stamp and Stamp(*stamp))
            for kind, fields, stamp in orjson.loads(data)
        ]
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise BadPositions(f"is no list of requests: {error!r}") from error


def encode_answers(answers: Sequence[Answer], version: int) -> dict[str, Any]:
    """Answers as a document, in the order of their requests, with a version for `Stamp.seen`."""
    return {"answers": [_encoded(answer) for answer in answers], "version": version}


def _encoded(answer: Answer) -> Any:
    if isinstance(answer, QuorumLogError):
        return to_document(answer)
    if isinstance(answer, Position):
        return _fields(answer)
    return [_fields(row) for row in answer]


def decode_answers(data: bytes) -> tuple[list[Answer], int]:
    """Decode the answers, and a version for `Stamp.seen`. Raises: BadPositions."""
    try:
        document = orjson.loads(data)
        return [_answer(answer) for answer in document["answers"]], int(document["version"])
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise BadPositions(f"is no list of answers: {error!r}") from error


def _answer(answer: Any) -> Answer:
    if isinstance(answer, dict):
        return from_document(answer)
    if answer and isinstance(answer[0], str):
        return Position(*answer)
    return tuple(Position(*row) for row in answer)
