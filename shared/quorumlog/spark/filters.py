"""Pruning: determines the logs, ranges and keys that a plan may omit because of a query's filters.

The plan applies two kinds of filters exactly: by offset (or a plain ledger's entry id), and by log.
Spark applies all other filters itself, even if they prune the plan.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from quorumlog.spark.plan import OFFSET_MAX, Pruning

T = TypeVar("T", int, str)

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_US: Final = timedelta(microseconds=1)


def pruning_of(filters: Sequence[Filter], *, of_logs: bool) -> tuple[Pruning, list[Filter]]:
    """Return the pruning for all filters, and the filters that Spark still has to apply.

    `of_logs`: the query reads logs. For plain ledgers, `offset` is the entry id, and `topic` null.
    """
    found, left = Pruning(), []
    never_null = [("offset",), ("entry",), ("ledger",), *([("topic",)] if of_logs else [])]
    for each in filters:
        column = getattr(each, "attribute", ())
        value = getattr(each, "value", None)
        if isinstance(each, IsNotNull) and column in never_null:
            # Spark adds IsNotNull to each comparison.
            continue
        if column == ("topic",) and of_logs:
            found, is_whole = _by_name(found, each, value)
        elif column == ("offset",) or (column == ("entry",) and not of_logs):
            low, high, is_whole = _bounds(each, value)
            found = replace(found, first=max(found.first, low), last=min(found.last, high))
        elif column == ("ledger",):
            found, is_whole = _by_ledger(found, each, value), False
        elif column == ("key",) and of_logs and isinstance(value, bytes | bytearray):
            found, is_whole = _by_key(found, each, bytes(value)), False
        elif column == ("timestamp",) and isinstance(value, datetime) and value.tzinfo:
            low, high, _ = _bounds(each, (value - _EPOCH) // _US)
            found = replace(found, from_us=max(found.from_us, low), to_us=min(found.to_us, high))
            is_whole = False
        else:
            is_whole = False
        if not is_whole:
            left.append(each)
    return found, left


def _by_name(found: Pruning, each: Filter, value: Any) -> tuple[Pruning, bool]:
    names = value if isinstance(each, In) else (value,)
    if not isinstance(each, EqualTo | EqualNullSafe | In) or not all(
        isinstance(name, str) for name in names
    ):
        return found, False
    return replace(found, names=_both(found.names, names)), True


def _by_ledger(found: Pruning, each: Filter, value: Any) -> Pruning:
    if isinstance(each, In) and _are_numbers(value):
        return replace(found, ledgers=_both(found.ledgers, value))
    low, high, _ = _bounds(each, value)
    return replace(
        found,
        ledger_first=max(found.ledger_first, low),
        ledger_last=min(found.ledger_last, high),
    )


def _by_key(found: Pruning, each: Filter, value: bytes) -> Pruning:
    match each:
        case EqualTo() | EqualNullSafe():
            return replace(found, key=value)
        case GreaterThan() | GreaterThanOrEqual():
            return replace(found, key_low=max(found.key_low, value))
        case LessThan() | LessThanOrEqual():
            value += b"" if isinstance(each, LessThan) else bytes(1)
            high = value if found.key_high is None else min(found.key_high, value)
            return replace(found, key_high=high)
        case _:
            return found


def _bounds(each: Filter, value: Any) -> tuple[int, int, bool]:
    """The smallest and largest number that pass a filter, and whether all numbers between pass."""
    if isinstance(each, In) and _are_numbers(value) and value:
        return min(value), max(value), False
    if not _are_numbers((value,)):
        return 0, OFFSET_MAX, False
    match each:
        case EqualTo() | EqualNullSafe():
            return value, value, True
        case GreaterThan():
            return value + 1, OFFSET_MAX, True
        case GreaterThanOrEqual():
            return value, OFFSET_MAX, True
        case LessThan():
            return 0, value - 1, True
        case LessThanOrEqual():
            return 0, value, True
        case _:
            return 0, OFFSET_MAX, False


def _both(known: tuple[T, ...] | None, more: Iterable[T]) -> tuple[T, ...]:
    """The intersection, sorted, so that equal prunings have equal text."""
    wanted = set(more)
    return tuple(sorted(wanted if known is None else wanted & set(known)))


def _are_numbers(values: Sequence[Any]) -> bool:
    """Whether all values are plain integers; booleans, decimals and null compare differently."""
    return all(type(value) is int for value in values)
