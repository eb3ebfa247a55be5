"""What a query's filters say of where its rows are: by that its plan leaves logs and ranges out.

Bounds of offsets (and of the entries of plain ledgers) and the logs' names are kept exactly; what
else prunes, stays with Spark all the same.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

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


def pruning_of(filters: Sequence[Filter], *, of_logs: bool) -> tuple[Pruning, list[Filter]]:
    """What all of the filters together keep, and those that Spark still has to apply.

    `of_logs`: logs are read, and not plain ledgers, whose `offset` is the entry's id and whose
    `topic` is null.
    """
    found, left = Pruning(), []
    never_null = [("offset",), ("entry",), ("ledger",), *([("topic",)] if of_logs else [])]
    for each in filters:
        column = getattr(each, "attribute", ())
        value = getattr(each, "value", None)
        if isinstance(each, IsNotNull) and column in never_null:
            # Comes with each comparison.
            continue
        if column == ("topic",) and of_logs:
            found, is_whole = _by_name(found, each, value)
        elif column == ("offset",) or (column == ("entry",) and not of_logs):
            low, high, is_whole = _bounds(each, value)
            found = replace(found, first=max(found.first, low), last=min(found.last, high))
        elif column == ("ledger",):
            found, is_whole = _by_ledger(found, each, value), False
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


def _bounds(each: Filter, value: Any) -> tuple[int, int, bool]:
    """The least and the greatest number that pass, and whether all between them do."""
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
    """What is in both, in one order: equal prunings are written alike."""
    wanted = set(more)
    return tuple(sorted(wanted if known is None else wanted & set(known)))


def _are_numbers(values: Sequence[Any]) -> bool:
    """Not booleans, decimals or null, which Spark compares in its own ways."""
    return all(type(value) is int for value in values)
