"""Copies and keys of a log's machines, from the values that their fields hold.

A ledger's machines derive both from the types of their fields (`protocol/keyed.py`), as the simulators
copy them too. A log's machines are copied by the explorer alone, and they share parts: one pending
append is in flight, and is known to the producer table. A copy by types would take such a part for
two, so this module follows the values, and the product needs no mark for it.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Final

from quorumlog.errors import QuorumLogError

_IMMUTABLE: Final[tuple[Any, ...]] = (
    int,
    str,
    bytes,
    float,
    Enum,
    QuorumLogError,
    type(None),
    Callable,
)


class _Kind(Enum):
    """How values of a class are copied."""

    SHARED = "shared"
    """They never change."""
    ERROR = "error"
    """The same; two errors of one class and outcome count as equal."""
    TUPLE = "tuple"
    SEQUENCE = "sequence"
    MAPPING = "mapping"
    PARTS = "parts"


@cache
def _kind(cls: Any) -> _Kind:
    parameters = getattr(cls, "__dataclass_params__", None)
    if issubclass(cls, QuorumLogError):
        return _Kind.ERROR
    if issubclass(cls, _IMMUTABLE) or (parameters is not None and parameters.frozen):
        return _Kind.SHARED
    if issubclass(cls, tuple):
        return _Kind.TUPLE if cls is tuple else _Kind.SHARED
    if issubclass(cls, deque | list):
        return _Kind.SEQUENCE
    return _Kind.MAPPING if issubclass(cls, OrderedDict | dict) else _Kind.PARTS


@cache
def _slots(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls)) if is_dataclass(cls) else ()


def _names(value: Any) -> Iterable[str]:
    """The fields of a dataclass, the attributes of any other object."""
    cls: Any = type(value)
    return _slots(cls) or vars(value)


def clone(value: Any, known: dict[int, Any] | None = None) -> Any:
    """An independent copy. Immutable values are shared, and a part that two others share stays one."""
    cls: Any = type(value)
    kind = _kind(cls)
    if kind in (_Kind.SHARED, _Kind.ERROR):
        return value
    known = {} if known is None else known
    if kind is _Kind.TUPLE:
        return tuple(clone(item, known) for item in value)
    if id(value) in known:
        return known[id(value)]
    made: Any = object.__new__(type(value)) if kind is _Kind.PARTS else type(value)()
    known[id(value)] = made
    match kind:
        case _Kind.SEQUENCE:
            made.extend(clone(item, known) for item in value)
        case _Kind.MAPPING:
            for key, item in value.items():
                made[key] = clone(item, known)
        case _:
            for name in _names(value):
                setattr(made, name, clone(getattr(value, name), known))
    return made


def snapshot(value: Any) -> Hashable:
    """All of a machine's state as a hashable value."""
    cls: Any = type(value)
    match _kind(cls):
        case _Kind.SHARED:
            return value  # type: ignore[no-any-return]
        case _Kind.ERROR:
            return (type(value), value.outcome)
        case _Kind.MAPPING:
            return tuple((key, snapshot(item)) for key, item in value.items())
        case _Kind.TUPLE | _Kind.SEQUENCE:
            return tuple(map(snapshot, value))
        case _:
            return (type(value), *(snapshot(getattr(value, name)) for name in _names(value)))
