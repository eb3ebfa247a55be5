"""The SDK's sync face is made of its async one: a method for each, and no logic of its own.

`python -m tests.client` writes `shared/quorumlog/client/sync.py` anew.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

CLIENT: Final = Path(__file__).resolve().parents[2] / "shared" / "quorumlog" / "client"
FACE: Final = CLIENT / "sync.py"

_MODULES: Final = ("producer", "ledger", "consumer", "log", "transaction", "client")
_CLASSES: Final = (
    "Producer",
    "Ledger",
    "Consumer",
    "Log",
    "TransactionLedger",
    "Transaction",
    "Client",
)
"""What the face wraps; every other name in `quorumlog.client` is a value, the same for both."""

_HEAD: Final = '''"""The SDK for code without an event loop: the names of `quorumlog.client`, each of which waits.

Made of that by `python -m tests.client`; do not edit. One client may be used by many threads, and
their appends travel together.

with Client("http://127.0.0.1:8080", "http://127.0.0.1:8081") as client:
    ledger = client.create_ledger()
    ledger.append(b"hello")
    for entry in ledger.entries():
        print(entry.entry_id, entry.payload)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self

from quorumlog import client as _async
from quorumlog.client import (
    {names},
)
from quorumlog.client.portal import Face, Portal

__all__ = [
    {listed},
]
'''


def made() -> str:
    """The text of the module."""
    public = _public()
    values = sorted(set(public) - set(_CLASSES) - {"Paged"})
    text = _HEAD.replace("{names}", ",\n    ".join(values)).replace(
        "{listed}", ",\n    ".join(f'"{name}"' for name in sorted({*values, *_CLASSES}))
    )
    parts = [text]
    for name in _MODULES:
        tree = ast.parse((CLIENT / f"{name}.py").read_text())
        parts += [
            "\n".join(_class(node))
            for node in tree.body
            if isinstance(node, ast.ClassDef) and node.name in _CLASSES
        ]
    return _formatted("\n\n\n".join(parts) + "\n")


def _public() -> list[str]:
    tree = ast.parse((CLIENT / "__init__.py").read_text())
    return [
        alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    ]


def _class(node: ast.ClassDef) -> Iterator[str]:
    bases = "" if node.name == "Client" else f"(Face[_async.{node.name}])"
    yield f"class {node.name}{bases}:"
    yield f'    """{ast.get_docstring(node, clean=False)}"""\n'
    if node.name == "Client":
        yield from _client(node)
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            name = item.target.id
            yield f"    @property\n    def {name}(self) -> {ast.unparse(item.annotation)}:"
            yield f'        """The async one\'s `{name}`."""'
            yield f"        return self._inner.{name}\n"
        if isinstance(item, ast.AsyncFunctionDef | ast.FunctionDef) and item.name[0] != "_":
            if any(ast.unparse(each) == "property" for each in item.decorator_list):
                yield "    @property"
            yield from _method(item)
    if node.name == "Consumer":
        yield from _consumer(node)


def _consumer(node: ast.ClassDef) -> Iterator[str]:
    """A consumer's lease, and its loop: what the loop has not given out yet is no part of a commit."""
    said = {item.name: item for item in node.body if isinstance(item, ast.AsyncFunctionDef)}
    yield "    def __enter__(self) -> Self:"
    yield f'        """{ast.get_docstring(said["__aenter__"], clean=False)}"""'
    yield "        self._portal.run(self._inner.__aenter__())"
    yield "        return self\n"
    yield "    def __exit__(self, *reason: object) -> None:"
    yield f'        """{ast.get_docstring(said["__aexit__"], clean=False)}"""'
    yield "        self._portal.run(self._inner.__aexit__(*reason))\n"
    yield "    def __iter__(self) -> Iterator[LogRecord]:"
    yield f'        """{ast.get_docstring(said["__aiter__"], clean=False)}"""'
    yield "        for record in self._portal.iterate(self._inner.records()):"
    yield "            if not self._inner.is_held:"
    yield "                self._portal.run(self._inner.check())"
    yield "            self._inner.taken(record)"
    yield "            yield record\n"


def _client(node: ast.ClassDef) -> Iterator[str]:
    """The client's life: it brings the thread."""
    (init,) = (n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    yield f"    def __init__({ast.unparse(init.args)}) -> None:"
    yield f'        """{ast.get_docstring(init, clean=False)}"""'
    yield f"        self._inner = _async.Client({_passed(init.args)})"
    yield "        self._portal = Portal()\n"
    yield "    def __enter__(self) -> Self:"
    yield "        self._portal.open(self._inner)"
    yield "        return self\n"
    yield "    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:"
    yield "        self._portal.close(kind, *rest)\n"


def _method(item: ast.AsyncFunctionDef | ast.FunctionDef) -> Iterator[str]:
    assert item.returns is not None, item.name
    given = ast.unparse(item.returns).strip("'")
    call = f"self._inner.{item.name}({_passed(item.args)})"
    if item.decorator_list:
        call = f"self._inner.{item.name}"
    if isinstance(item, ast.AsyncFunctionDef):
        call = f"self._portal.run({call})"
    if given.startswith("Paged["):
        given, call = f"Iterator[{given[6:-1]}]", f"self._portal.iterate({call})"
    elif given.startswith("asyncio.Future["):
        given = given.removeprefix("asyncio.")
        call = f"self._portal.submit(self._inner.batcher, {_payloads(item.args)})"
    elif given in _CLASSES:
        call = f"{given}(self._portal, {call})"
    given = given.replace("Shown", "dict[str, Any]")
    yield f"    def {item.name}({ast.unparse(item.args)}) -> {given}:"
    yield f'        """{ast.get_docstring(item, clean=False)}"""'
    yield f"        {'' if given == 'None' else 'return '}{call}\n"


def _payloads(args: ast.arguments) -> str:
    """All that a call submits, as a sequence."""
    return args.vararg.arg if args.vararg else f"({args.args[1].arg},)"


def _passed(args: ast.arguments) -> str:
    passed = [arg.arg for arg in args.args if arg.arg != "self"]
    if args.vararg:
        passed.append(f"*{args.vararg.arg}")
    passed += [f"{arg.arg}={arg.arg}" for arg in args.kwonlyargs]
    return ", ".join(passed)


def _formatted(text: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "-q", "--stdin-filename", str(FACE), "-"],
        input=text,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout
