"""Puts a mutant into this process: its functions get the code of the changed tree.

That is done in a forked child only, which ends with the mutant. Nothing is imported anew and no file is
written, so a mutant costs a fork and the tests that reach it. What is not a function of a module or of a
class (a constant of the module, that is) is computed again, and put wherever it was imported.
"""

import ast
import gc
import sys
import types
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from tests.mutation.mutate.places import Place, Source


class Unfit(Exception):
    """The mutant can't be put into a running process."""


class Functions:
    """The functions of this process, by file and name: found once, for all children."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[types.FunctionType]] = defaultdict(list)
        for each in gc.get_objects():
            if isinstance(each, types.FunctionType):
                code = each.__code__
                self._found[code.co_filename, code.co_qualname].append(each)

    def put(self, place: Place) -> None:
        """Take a guard out of the running code, and out of the tree that it is from. Raises: Unfit."""
        if not place.function:
            _put_constant(place.source, place)
            return
        path = str(place.source.path)
        place.apply()
        tree = ast.fix_missing_locations(place.source.tree)
        code = compile(tree, path, "exec", dont_inherit=True)
        mutated = {
            each.co_firstlineno: each for each in _codes(code) if each.co_qualname == place.outer
        }
        count = 0
        for function in self._found.get((path, place.outer), ()):
            new = mutated.get(function.__code__.co_firstlineno)
            if new is None:
                continue
            if new.co_freevars != function.__code__.co_freevars:
                raise Unfit("the change takes a closure away")
            function.__code__ = new
            count += 1
        if not count:
            raise Unfit("no such function in this process")


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _put_constant(source: Source, place: Place) -> None:
    module = next(
        (each for each in _modules() if getattr(each, "__file__", None) == str(source.path)), None
    )
    if module is None:
        raise Unfit("the module is not imported")
    place.apply()
    changed: dict[str, Any] = {}
    for statement in source.tree.body:
        target = _target(statement)
        if target is None or not isinstance(module.__dict__.get(target), str):
            continue
        assert isinstance(statement, ast.Assign | ast.AnnAssign)
        assert statement.value is not None
        expression = ast.fix_missing_locations(ast.Expression(statement.value))
        names = module.__dict__ | changed
        value = eval(compile(expression, str(source.path), "eval"), names)
        if value != module.__dict__[target]:
            changed[target] = value
    if not changed:
        raise Unfit("the constant is not known by its name")
    for target, value in changed.items():
        old = module.__dict__[target]
        for each in _modules():
            if each.__dict__.get(target) is old:
                each.__dict__[target] = value


def _target(statement: ast.stmt) -> str | None:
    match statement:
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
            return name
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name
        case _:
            return None


def _modules() -> list[types.ModuleType]:
    return list(sys.modules.values())
