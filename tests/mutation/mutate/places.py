"""The places of a source file at which a guard can be taken out, and the tree without it.

A place is named by its file, its function and the text of the guard, so that a name survives moves of
lines: names stand in `equivalent.toml` and in the results of earlier runs.
"""

import ast
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.mutation.mutate import sql

SILENT: Final = ("log", "logger", "_log", "LOG", "metrics", "_metrics")
"""Calls on these tell what happened, and guard nothing."""

LOCKS: Final = ("lock", "_one", "mutex", "semaphore", "turn")
"""Words by which a context manager is known to keep others out."""

HELPERS: Final = ("check", "key")
"""Methods of the protocol's machines that assert its invariants and name its states for the explorer."""

_BOUNDS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
}  # fmt: skip

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(slots=True)
class Place:
    """One guard: where it stands, and what stands in for it. `apply` changes the tree it is from."""

    path: str
    function: str
    """Its qualified name; empty where a constant of the module is changed."""
    change: str
    """What is done, and the text of the guard."""
    first_line: int
    last_line: int
    """A test reaches the place when it runs one of these lines."""
    digest: str
    """Of the function's text: a result counts as long as that stays the same."""
    source: "Source"
    holder: ast.AST
    field: str
    index: int | None
    new: object

    @property
    def name(self) -> str:
        """What it is called in lists and results."""
        return f"{self.path}::{self.function}: {self.change}"

    @property
    def outer(self) -> str:
        """The outermost function around it: its code holds that of all within."""
        return self.function.partition(".<locals>")[0]

    def apply(self) -> None:
        """Take the guard out of the tree."""
        if self.index is None:
            setattr(self.holder, self.field, self.new)
        else:
            getattr(self.holder, self.field)[self.index] = self.new


@dataclass(frozen=True, slots=True)
class Source:
    """A file's tree. It is good for one mutant, which changes it: mutants are put in in forked children."""

    path: Path
    name: str
    tree: ast.Module

    @classmethod
    def read(cls, path: Path, root: Path) -> "Source":
        """Parse a file."""
        text = path.read_text(encoding="utf-8")
        return cls(path, str(path.relative_to(root)), ast.parse(text, str(path)))

    def places(self) -> list[Place]:
        """The guards, in the order of the file. Those of one text in one function are numbered."""
        found = list(_Walk(self).module())
        counts: Counter[str] = Counter()
        for place in found:
            counts[place.name] += 1
            if counts[place.name] > 1:
                place.change += f" #{counts[place.name]}"
        return found


def files(root: Path, paths: list[str]) -> list[Path]:
    """The Python files of folders and files."""
    found: list[Path] = []
    for name in paths:
        path = root / name
        if not path.exists():
            raise SystemExit(f"there is no {name}")
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return found


def line(node: ast.AST, limit: int = 160) -> str:
    """A node's text in one line, however it is laid out."""
    text = " ".join(ast.unparse(node).split())
    if len(text) <= limit:
        return text
    return f"{text[:limit]}… {hashlib.sha256(text.encode()).hexdigest()[:8]}"


class _Walk:
    """Finds the places of one module."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._function = ""
        self._digest = ""
        self._lines = (0, 0)

    def module(self) -> Iterator[Place]:
        """All of them, in the order of the file."""
        for statement in self._source.tree.body:
            yield from self._top(statement, "")

    def _top(self, statement: ast.stmt, prefix: str) -> Iterator[Place]:
        match statement:
            case ast.ClassDef():
                for inner in statement.body:
                    yield from self._top(inner, f"{prefix}{statement.name}.")
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from self._of_function(statement, prefix)
            case ast.Assign() | ast.AnnAssign() if not prefix and statement.value is not None:
                self._function, self._digest = "", _digest(ast.unparse(statement))
                self._lines = (0, 0)
                yield from self._of_texts(statement)
            case _:
                return

    def _of_function(self, function: _Function, prefix: str) -> Iterator[Place]:
        if function.name in HELPERS:
            return
        kept = self._function, self._digest
        self._function = f"{prefix}{function.name}"
        if not kept[0]:
            self._digest = _digest(ast.unparse(function))
        yield from self._block(function, "body", is_top=True)
        self._function, self._digest = kept

    def _block(self, holder: ast.AST, field: str, *, is_top: bool = False) -> Iterator[Place]:
        """The statements of a body. `is_top`: a return at its end is no early one."""
        body = getattr(holder, field)
        is_sole_guard = isinstance(holder, ast.If) and len(body) == 1 and not holder.orelse
        for index, statement in enumerate(body):
            # `if x: return` without its body is `if x` that never holds: one place, not two.
            if not is_sole_guard and not (is_top and index == len(body) - 1):
                yield from self._dropped(statement, holder, field, index)
            yield from self._statement(statement, holder, field, index)

    def _dropped(
        self, statement: ast.stmt, holder: ast.AST, field: str, index: int
    ) -> Iterator[Place]:
        match statement:
            case (
                ast.Raise(exc=ast.Call(func=ast.Name(id="AssertionError")))
                | ast.Expr(value=ast.Call(func=ast.Name(id="assert_never")))
            ):
                return  # for what never happens
            case ast.Return() | ast.Raise() | ast.Continue() | ast.Break():
                pass
            case ast.Expr(value=(ast.Call() | ast.Await()) as value) if not _is_silent(value):
                pass
            case _:
                return
        self._lines = (statement.lineno, statement.end_lineno or statement.lineno)
        new = ast.copy_location(ast.Pass(), statement)
        yield self._place(f"without `{line(statement)}`", holder, field, index, new)

    def _statement(
        self, statement: ast.stmt, holder: ast.AST, field: str, index: int
    ) -> Iterator[Place]:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from self._of_function(statement, f"{self._function}.<locals>.")
                return
            case ast.ClassDef() | ast.Assert() | ast.Raise():
                return  # what an error says is no guard; nor is an assertion that never fails
            case ast.With() | ast.AsyncWith():
                yield from self._unlocked(statement, holder, field, index)
            case ast.If() | ast.While():
                self._lines = _lines(statement.test)
                yield from self._condition(
                    statement.test,
                    statement,
                    "test",
                    None,
                    is_loop=isinstance(statement, ast.While),
                )
            case _:
                pass  # what is in it is looked at below
        for name, value in ast.iter_fields(statement):
            if name in ("body", "orelse", "finalbody"):
                yield from self._block(statement, name)
            elif name in ("handlers", "cases"):
                for part in value:
                    if isinstance(part, ast.match_case) and part.guard is not None:
                        self._lines = _lines(part.guard)
                        yield from self._condition(part.guard, part, "guard", None)
                    yield from self._block(part, "body")
            else:
                parts = value if isinstance(value, list) else [value]
                for node in parts:
                    if isinstance(node, ast.AST):
                        self._lines = _lines(node) if hasattr(node, "lineno") else self._lines
                        yield from self._expressions(node)
        yield from self._of_texts(statement, is_shallow=True)

    def _unlocked(
        self, statement: ast.With | ast.AsyncWith, holder: ast.AST, field: str, index: int
    ) -> Iterator[Place]:
        texts = [line(item.context_expr) for item in statement.items]
        locks = [text for text in texts if any(word in text.lower() for word in LOCKS)]
        if not locks or any(item.optional_vars for item in statement.items):
            return
        self._lines = _lines(statement.items[0].context_expr)
        new = ast.If(test=ast.Constant(value=True), body=statement.body, orelse=[])
        ast.copy_location(new, statement)
        yield self._place(f"unlocked `{', '.join(texts)}`", holder, field, index, new)

    def _condition(
        self,
        test: ast.expr,
        holder: ast.AST,
        field: str,
        index: int | None,
        *,
        is_loop: bool = False,
    ) -> Iterator[Place]:
        """A condition taken as false, and as true; a loop's is not taken as true: it has no end."""
        if isinstance(test, ast.Constant):
            return
        for value, word in ((False, "never"), (True, "always")):
            if not (is_loop and value):
                new = _fixed(test, value=value)
                yield self._place(f"{word} `{line(test)}`", holder, field, index, new)

    def _expressions(self, root: ast.AST) -> Iterator[Place]:
        for node in ast.walk(root):
            match node:
                case ast.IfExp():
                    yield from self._condition(node.test, node, "test", None)
                case ast.comprehension():
                    for index, test in enumerate(node.ifs):
                        new = _fixed(test, value=True)
                        yield self._place(f"always `{line(test)}`", node, "ifs", index, new)
                case ast.BoolOp():
                    for index, operand in enumerate(node.values):
                        if isinstance(operand, ast.Constant):
                            continue
                        new = _fixed(operand, value=isinstance(node.op, ast.And))
                        text = f"without `{line(operand)}` in `{line(node)}`"
                        yield self._place(text, node, "values", index, new)
                case ast.Compare(ops=ops):
                    for index, op in enumerate(ops):
                        if type(op) in _BOUNDS:
                            other = _BOUNDS[type(op)]()
                            yield self._place(f"bound `{line(node)}`", node, "ops", index, other)
                case ast.Call(func=ast.Name(id="min" | "max" as name)):
                    new = ast.copy_location(
                        ast.Name(id="max" if name == "min" else "min", ctx=ast.Load()), node.func
                    )
                    yield self._place(f"not {name} `{line(node)}`", node, "func", None, new)
                case _:
                    continue

    def _of_texts(self, statement: ast.stmt, *, is_shallow: bool = False) -> Iterator[Place]:
        """Clauses of SQL. `is_shallow`: the statements within are asked by themselves."""
        for holder, field, index, node in _texts(statement, is_shallow=is_shallow):
            for clause, new in sql.without(node):
                if statement.lineno and self._function:
                    self._lines = _lines(node)
                yield self._place(f"SQL without `{clause}`", holder, field, index, new)

    def _place(
        self, change: str, holder: ast.AST, field: str, index: int | None, new: object
    ) -> Place:
        first, last = self._lines
        return Place(
            self._source.name, self._function, change, first, last, self._digest, self._source,
            holder, field, index, new,
        )  # fmt: skip


def _texts(
    statement: ast.stmt, *, is_shallow: bool
) -> Iterator[tuple[ast.AST, str, int | None, ast.expr]]:
    todo: list[ast.AST] = [statement]
    while todo:
        holder = todo.pop(0)
        for field, value in ast.iter_fields(holder):
            parts = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
            for index, node in parts:
                if isinstance(node, ast.Constant | ast.JoinedStr):
                    yield holder, field, index, node
                elif isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
                    if not is_shallow:
                        todo.append(node)
                elif isinstance(node, ast.AST):
                    todo.append(node)


def _fixed(test: ast.expr, *, value: bool) -> ast.expr:
    """What is true or false whatever the test says. A name that the test binds stays bound."""
    constant = ast.copy_location(ast.Constant(value=value), test)
    if not any(isinstance(node, ast.NamedExpr) for node in ast.walk(test)):
        return constant
    op = ast.Or() if value else ast.And()
    return ast.copy_location(ast.BoolOp(op=op, values=[test, constant]), test)


def _lines(node: ast.AST) -> tuple[int, int]:
    first: int = getattr(node, "lineno", 0)
    last: int = getattr(node, "end_lineno", None) or first
    return first, last


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _is_silent(value: ast.expr) -> bool:
    call = value.value if isinstance(value, ast.Await) else value
    if not isinstance(call, ast.Call):
        return False
    names = ast.unparse(call.func).split(".")
    return any(name in SILENT for name in names[:-1])
