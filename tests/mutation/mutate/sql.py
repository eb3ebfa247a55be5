"""Conditions and locks of an SQL text, taken out one by one.

A condition becomes `(condition OR TRUE)` rather than nothing: what it binds stays bound, so that a
mutant fails by what it does and not by a parameter that has no type.
"""

import ast
import re
from collections.abc import Iterator
from typing import Final

_STARTS: Final = re.compile(r"\b(WHERE|AND|OR|ON|HAVING)\s+", re.IGNORECASE)
_ENDS: Final = re.compile(
    r"\s(AND|OR|ORDER|GROUP|LIMIT|RETURNING|FOR|UNION|JOIN|LEFT|INNER|CROSS|HAVING|WHERE|DO|SET|THEN)\b|\Z",
    re.IGNORECASE,
)
_LOCK: Final = re.compile(
    r"\s+FOR (?:NO KEY )?(?:UPDATE|SHARE|KEY SHARE)(?: OF \w+)?(?: SKIP LOCKED)?"
)
_IS_SQL: Final = re.compile(r"\b(SELECT|UPDATE|DELETE FROM|INSERT INTO|WHERE)\b")


def without(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Each condition and lock of the text, and the text without it. Nothing where it is no SQL."""
    text, holes = _flat(node)
    if not _IS_SQL.search(text):
        return
    for first, last in (*_conditions(text), *_locks(text)):
        clause = text[first:last]
        new = "" if _LOCK.fullmatch(clause) else f"({clause} OR TRUE)"
        yield _reported(clause.strip(), holes), _made(text[:first] + new + text[last:], holes, node)


def _conditions(text: str) -> Iterator[tuple[int, int]]:
    for found in _STARTS.finditer(text):
        word, first = found[1].upper(), found.end()
        if word == "ON" and text[first:].upper().startswith("CONFLICT"):
            continue
        if _is_between(text[: found.start()]):
            continue
        last = _end_of(text, first)
        if last > first:
            yield first, last


def _is_between(before: str) -> bool:
    tail = before.upper().rpartition(" BETWEEN ")
    return bool(tail[1]) and not re.search(r"\b(AND|OR)\b", tail[2])


def _end_of(text: str, first: int) -> int:
    """Where a condition ends: at the next word of its own depth that begins another part."""
    depth, at, spans = 0, first, False
    while at < len(text):
        if text[at] == "(":
            depth += 1
        elif text[at] == ")":
            depth -= 1
            if depth < 0:
                return at
        elif text[at] == ";" and not depth:
            return at
        elif not depth and (end := _ENDS.match(text, at)):
            if not (spans and end[1].upper() == "AND"):
                return at
            spans = False
        elif not depth and text[at:].upper().startswith(" BETWEEN "):
            spans = True
        at += 1
    return at


def _locks(text: str) -> Iterator[tuple[int, int]]:
    for found in _LOCK.finditer(text):
        yield found.start(), found.end()


def _flat(node: ast.expr) -> tuple[str, list[ast.expr]]:
    """The text, with a mark for each value that is formatted into it."""
    if isinstance(node, ast.Constant):
        return (node.value, []) if isinstance(node.value, str) else ("", [])
    assert isinstance(node, ast.JoinedStr)
    text = ""
    holes: list[ast.expr] = []
    for value in node.values:
        if isinstance(value, ast.Constant):
            text += str(value.value)
        else:
            text += f"\x00{len(holes)}\x00"
            holes.append(value)
    return text, holes


def _reported(text: str, holes: list[ast.expr]) -> str:
    def hole(found: re.Match[str]) -> str:
        value = holes[int(found[1])]
        return "{" + ast.unparse(getattr(value, "value", value)) + "}"

    return " ".join(re.sub(r"\x00(\d+)\x00", hole, text).split())


def _made(text: str, holes: list[ast.expr], like: ast.expr) -> ast.expr:
    if not holes:
        return ast.copy_location(ast.Constant(value=text), like)
    parts: list[ast.expr] = []
    for number, piece in enumerate(re.split(r"\x00(\d+)\x00", text)):
        if number % 2:
            parts.append(holes[int(piece)])
        elif piece:
            parts.append(ast.Constant(value=piece))
    return ast.fix_missing_locations(ast.copy_location(ast.JoinedStr(values=parts), like))
