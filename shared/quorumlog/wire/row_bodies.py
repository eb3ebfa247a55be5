"""Formats of the cluster's internal logs of rows, and of gateways' requests about these rows.

A record of such a log is JSON: `{"v":1,"rows":[[field…]…],"gone":[[log, name]…],
"decided":[[token, content, answer]…]}`. An answer is the index of a row in `rows`, a whole row if
`rows` lacks it, or the code of a refusal. A value is encoded as the list of its fields in order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final, Generic, TypeVar, get_args, get_origin, get_type_hints

import orjson

from quorumlog.errors import QuorumLogError
from quorumlog.protocol.offset_set import Offsets
from quorumlog.protocol.rows import Batch, Decided, Row, Stamp
from quorumlog.wire.problems import from_document, to_document

R = TypeVar("R", bound=Row)
_VERSION: Final = 1
_Convert = Callable[[Any], Any] | None
"""A function that converts a value to or from JSON; None if no conversion is needed."""


class BadRows(ValueError):
    """The bytes are not a record of a log of rows, or are from a later release."""


class RowBodies(Generic[R]):
    """The formats of one log of rows."""

    def __init__(
        self,
        log: str,
        row: type[R],
        requests: Sequence[type[Any]],
        answers: Sequence[type[Any]] = (),
    ) -> None:
        """`log`: the log's reserved name. `answers`: types of answers besides rows and their lists."""
        self.log, self._row = log, row
        self._shapes = {kind: _Shape(kind) for kind in (row, *requests, *answers)}
        self._rows = self._shapes[row]
        self._requests = {kind.__name__: self._shapes[kind] for kind in requests}
        self._answers = {kind.__name__: self._shapes[kind] for kind in answers}

    def encode_batch(self, batch: Batch[R]) -> bytes:
        """Encode a batch as the value of a record in the log."""
        document: dict[str, Any] = {"v": _VERSION}
        if batch.rows:
            document["rows"] = [self._rows.encode(row) for row in batch.rows]
        if batch.gone:
            document["gone"] = batch.gone
        if batch.decided:
            at = {row: index for index, row in enumerate(batch.rows)}
            document["decided"] = [
                (one.token, one.content, self._encoded_decision(one.answer, at))
                for one in batch.decided
            ]
        return orjson.dumps(document)

    def decode_batch(self, data: bytes) -> Batch[R]:
        """Decode the value of a record in the log. Raises: BadRows."""
        try:
            document = orjson.loads(data)
            if document["v"] != _VERSION:
                raise BadRows(f"has version {document['v']}, which this release can't read")
            rows = tuple(self._rows.decode(row) for row in document.get("rows", ()))
            gone = tuple((log, name) for log, name in document.get("gone", ()))
            decided = tuple(
                Decided(token, content, self._decision(answer, rows))
                for token, content, answer in document.get("decided", ())
            )
            return Batch(rows, gone, decided)
        except (orjson.JSONDecodeError, KeyError, TypeError, IndexError) as error:
            raise BadRows(f"is not a record of {self.log}: {error!r}") from error

    def _encoded_decision(self, answer: R | str, at: Mapping[R, int]) -> Any:
        if isinstance(answer, str):
            return answer
        return at[answer] if answer in at else self._rows.encode(answer)

    def _decision(self, answer: Any, rows: Sequence[R]) -> Any:
        if isinstance(answer, str):
            return answer
        return rows[answer] if isinstance(answer, int) else self._rows.decode(answer)

    def encode_requests(self, requests: Sequence[tuple[Any, Stamp | None]]) -> bytes:
        """Encode requests about rows, for another gateway."""
        return orjson.dumps(
            [
                (
                    type(request).__name__,
                    self._shapes[type(request)].encode(request),
                    stamp and (stamp.token, stamp.content, stamp.seen),
                )
                for request, stamp in requests
            ]
        )

    def decode_requests(self, data: bytes) -> list[tuple[Any, Stamp | None]]:
        """Decode another gateway's requests about rows. Raises: BadRows."""
        try:
            return [
                (self._requests[kind].decode(found), stamp and Stamp(*stamp))
                for kind, found, stamp in orjson.loads(data)
            ]
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise BadRows(f"is not a list of requests: {error!r}") from error

    def encode_answers(self, answers: Sequence[Any], version: int) -> dict[str, Any]:
        """Answers as a document, in the order of their requests, with a version for `Stamp.seen`."""
        return {"answers": [self._encoded(answer) for answer in answers], "version": version}

    def _encoded(self, answer: Any) -> Any:
        if isinstance(answer, QuorumLogError):
            return to_document(answer)
        if isinstance(answer, self._row):
            return self._rows.encode(answer)
        if isinstance(answer, tuple):
            return [self._rows.encode(row) for row in answer]
        return {type(answer).__name__: self._shapes[type(answer)].encode(answer)}

    def decode_answers(self, data: bytes) -> tuple[list[Any], int]:
        """Decode the answers, and a version for `Stamp.seen`. Raises: BadRows."""
        try:
            document = orjson.loads(data)
            return [self._answer(answer) for answer in document["answers"]], int(
                document["version"]
            )
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise BadRows(f"is not a list of answers: {error!r}") from error

    def _answer(self, answer: Any) -> Any:
        if isinstance(answer, dict):
            if "code" in answer:
                return from_document(answer)
            ((kind, found),) = answer.items()
            return self._answers[kind].decode(found)
        if answer and isinstance(answer[0], str):
            return self._rows.decode(answer)
        return tuple(self._rows.decode(row) for row in answer)


class _Shape:
    """Converts values of a dataclass to lists for JSON, and back."""

    def __init__(self, kind: type[Any]) -> None:
        hints = get_type_hints(kind)
        self._kind = kind
        self._names = [field.name for field in fields(kind)]
        converts = [_converts(hints[name]) for name in self._names]
        self._packs = [pack for pack, _ in converts]
        self._unpacks = [unpack for _, unpack in converts]
        self.is_flat = not any(self._packs)

    def encode(self, value: Any) -> Sequence[Any]:
        """The fields of a value. (`dataclasses.astuple` copies each, and is ten times slower.)"""
        found = [getattr(value, name) for name in self._names]
        if self.is_flat:
            return found
        packs = zip(found, self._packs, strict=True)
        return [each if pack is None else pack(each) for each, pack in packs]

    def decode(self, found: Sequence[Any]) -> Any:
        """The value with these fields. Fields that an earlier release lacked get their defaults."""
        if self.is_flat:
            return self._kind(*found)
        if len(found) > len(self._names):
            raise TypeError(f"{self._kind.__name__} has too many fields: a later release wrote it")
        unpacks = zip(found, self._unpacks, strict=False)
        return self._kind(*(each if unpack is None else unpack(each) for each, unpack in unpacks))


def _converts(hint: Any) -> tuple[_Convert, _Convert]:
    """The functions that pack and unpack values of a field's type."""
    if hint is Offsets:
        return Offsets.packed, Offsets.unpacked
    if is_dataclass(hint) and isinstance(hint, type):
        shape = _Shape(hint)
        return shape.encode, shape.decode
    if get_origin(hint) is not tuple:
        return None, None
    pairs = [_converts(each) for each in get_args(hint) if each is not Ellipsis]
    if Ellipsis in get_args(hint):
        ((pack, unpack),) = pairs
        return (
            lambda found: [each if pack is None else pack(each) for each in found],
            lambda found: tuple(each if unpack is None else unpack(each) for each in found),
        )
    return (
        lambda found: [
            each if pack is None else pack(each)
            for each, (pack, _) in zip(found, pairs, strict=True)
        ],
        lambda found: tuple(
            each if unpack is None else unpack(each)
            for each, (_, unpack) in zip(found, pairs, strict=True)
        ),
    )
