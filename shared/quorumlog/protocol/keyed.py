"""Generates the methods `copy` and `key` of state machines, once for each class, from its fields.

The explorer treats machines with equal keys as one state, so a key that lacks a field would hide
states. A new field is therefore part of the key, unless its annotation gives a reason to leave it
out (`Out`). A field whose type is neither immutable nor `Keyed` raises TypeError.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from operator import attrgetter
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Final,
    NamedTuple,
    Self,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)


@dataclass(frozen=True, slots=True)
class Out:
    """Leaves a field out of `key`: `Annotated[list[Effect], Out("empty between steps")]`."""

    reason: str


class IsKeyed:
    """Marks a field whose values have `copy` and `key`, although their type is not `Keyed`."""


class Keyed:
    """Base of machines and of the parts that they own. A subclass is a dataclass with eq=False."""

    __slots__ = ()

    def copy(self) -> Self:
        """An independent copy, which shares immutable values."""
        cls: Any = type(self)
        copied: Self = _made(cls).copy(self)
        return copied

    def key(self) -> tuple[object, ...]:
        """The state as a hashable value; equal states have equal keys."""
        cls: Any = type(self)
        return _made(cls).key(self)


class _Made(NamedTuple):
    copy: Callable[[Any], Any]
    key: Callable[[Any], tuple[object, ...]]


class _Way(NamedTuple):
    """The functions that copy a value of one type, and represent the value in a key."""

    copy: Callable[[Any], Any]
    key: Callable[[Any], object]


_PART: Final = _Way(lambda part: part and part.copy(), lambda part: part and part.key())
_LIST: Final = _Way(list, tuple)
_DICT: Final = _Way(dict, lambda values: frozenset(values.items()))
_DICT_OF_PARTS: Final = _Way(
    lambda parts: {name: part.copy() for name, part in parts.items()},
    lambda parts: frozenset((name, part.key()) for name, part in parts.items()),
)


@cache
def _made(cls: Any) -> _Made:
    """Generate the functions `copy` and `key` of a class."""
    hints = get_type_hints(cls, include_extras=True)
    ways = {one.name: _way(hints[one.name]) for one in fields(cls)}
    shared = [name for name, way in ways.items() if way is None]
    owned = [(name, way) for name, way in ways.items() if way is not None]
    in_key = {name for name in ways if left_out(hints[name]) is None}
    plain = attrgetter("__class__", *[name for name in shared if name in in_key])
    parts = [(attrgetter(name), way.key) for name, way in owned if name in in_key]

    def copy(self: Any) -> Any:
        other: Any = object.__new__(cls)
        for name in shared:
            setattr(other, name, getattr(self, name))
        for name, way in owned:
            setattr(other, name, way.copy(getattr(self, name)))
        return other

    def key(self: Any) -> tuple[object, ...]:
        return (*plain(self), *[part(get(self)) for get, part in parts])

    return _Made(copy, key)


def left_out(hint: Any) -> str | None:
    """The reason why a field with this annotation is left out of the key; None if it is not."""
    marks = hint.__metadata__ if get_origin(hint) is Annotated else ()
    return next((mark.reason for mark in marks if isinstance(mark, Out)), None)


def _way(hint: Any) -> _Way | None:
    """The copy and key functions for a field of this type; None if its values are immutable."""
    if get_origin(hint) is Annotated:
        return _PART if IsKeyed in hint.__metadata__ else _way(hint.__origin__)
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        ways = [way for way in map(_way, args) if way is not None]
        if any(way is not _PART for way in ways):
            raise TypeError(f"{hint}: only an immutable value or a `Keyed` part may be optional")
        return _PART if ways else None
    if origin in (list, dict):
        value = _way(args[-1])
        if value is _PART and origin is dict:
            return _DICT_OF_PARTS
        if value is None:
            return _LIST if origin is list else _DICT
    elif origin in (tuple, frozenset):
        if all(one is ... or _way(one) is None for one in args):
            return None
    elif isinstance(hint, type) and issubclass(hint, Keyed):
        return _PART
    elif isinstance(hint, type) and _is_value(hint):
        return None
    raise TypeError(
        f"{hint}: fields must be immutable, lists or dicts of immutable values, or `Keyed`"
    )


def _is_value(cls: Any) -> bool:
    """Whether instances of a class are hashed by value, and so count as immutable."""
    return cls is NoneType or cls.__hash__ not in (None, object.__hash__)
