"""Copies and keys of a machine from its fields, none of which can be forgotten."""

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from quorumlog.errors import QuorumLogError


def clone(value: Any, known: dict[int, Any] | None = None) -> Any:
    """An independent copy. What can't change is shared; what is shared in it stays shared."""
    known = {} if known is None else known
    if _is_fixed(value):
        return value
    if id(value) in known:
        return known[id(value)]
    made: Any
    if isinstance(value, OrderedDict | dict):
        made = known[id(value)] = type(value)()
        for key, item in value.items():
            made[key] = clone(item, known)
    elif isinstance(value, deque | list):
        made = known[id(value)] = type(value)()
        made.extend(clone(item, known) for item in value)
    elif isinstance(value, tuple):
        made = tuple(clone(item, known) for item in value)
    else:
        made = known[id(value)] = object.__new__(type(value))
        for name in _names(value):
            setattr(made, name, clone(getattr(value, name), known))
    return made


def snapshot(value: Any) -> Hashable:
    """All of a machine's state, hashable."""
    if isinstance(value, QuorumLogError):
        return (type(value), value.outcome)
    if _is_fixed(value):
        return value  # type: ignore[no-any-return]
    if isinstance(value, OrderedDict | dict):
        return tuple((key, snapshot(item)) for key, item in value.items())
    if isinstance(value, deque | list | tuple):
        return tuple(map(snapshot, value))
    return (type(value).__name__, *(snapshot(getattr(value, name)) for name in _names(value)))


def _is_fixed(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    if hasattr(value, "__dataclass_params__"):
        return bool(value.__dataclass_params__.frozen)
    return (
        value is None
        or callable(value)
        or isinstance(value, int | str | bytes | float | Enum | QuorumLogError)
    )


def _names(value: Any) -> Iterator[str]:
    if is_dataclass(value):
        yield from (field.name for field in fields(value))
    else:
        yield from vars(value)
