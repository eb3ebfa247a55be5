"""Which tests run which lines, and how long they take: recorded once, and anew where a file changed.

The record of a test file holds as long as the file is the same, and every file of the product that its
tests reach. The tests' own helpers count for nothing here: a record that is a little old picks a test
too many or too few, and `--fresh` makes it anew.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import orjson

from tests.mutation.mutate.child import Child
from tests.mutation.mutate.suite import Suite

SLOWEST_S: Final = 600.0
"""Of a test while it is recorded."""


@dataclass(slots=True)
class Reach:
    """What was recorded: `tests[nodeid]` and, the other way round, `at[path][line]`."""

    tests: dict[str, float] = field(default_factory=dict)
    """Seconds that a test takes. Those that don't pass in the code as it ships are not here."""
    at: dict[str, dict[int, set[str]]] = field(default_factory=dict)

    def add(self, record: dict[str, Any]) -> None:
        """Take one test's record in."""
        if not record["passes"]:
            return
        nodeid = record["test"]
        self.tests[nodeid] = record["seconds"]
        for path, lines in record["lines"].items():
            at = self.at.setdefault(path, {})
            for number in lines:
                at.setdefault(number, set()).add(nodeid)

    def reaching(self, path: str, first: int, last: int) -> list[str]:
        """The tests that run one of the lines, fastest first. A constant's lines are 0: any of the file."""
        at = self.at.get(path, {})
        lines: Iterable[int] = range(first, last + 1) if first else at
        found = {nodeid for number in lines for nodeid in at.get(number, ())}
        return sorted(found, key=lambda nodeid: (self.tests[nodeid], nodeid))


def recorded(
    suite: Suite, cache: Path, sources: list[Path], notify: Callable[[str], None]
) -> Reach:
    """The record of what all tests of the suite run of the sources, from the cache where it still holds."""
    now = {str(path.relative_to(suite.root)): _digest(path) for path in sources}
    kept: dict[str, Any] = orjson.loads(cache.read_bytes()) if cache.exists() else {}
    reach = Reach()
    for name, group in groupby(suite.items, key=lambda nodeid: nodeid.partition("::")[0]):
        nodeids = list(group)
        digest = _digest(suite.root / name)
        held = kept.get(name)
        if held is None or held["digest"] != digest or not held["reached"].items() <= now.items():
            notify(f"recording what {name} reaches: {len(nodeids)} tests")
            tests = _record(suite, nodeids, sources)
            reached = {path for test in tests for path in test["lines"]}
            held = {
                "digest": digest,
                "tests": tests,
                "reached": {path: now[path] for path in reached},
            }
            kept[name] = held
            cache.parent.mkdir(parents=True, exist_ok=True)
            cache.write_bytes(orjson.dumps(kept))
        for record in held["tests"]:
            reach.add(record)
    return reach


def _record(suite: Suite, nodeids: list[str], sources: list[Path]) -> list[Any]:
    include = [str(path) for path in sources]

    def work(notify: Callable[[Any], None]) -> None:
        suite.be_ready()
        suite.recorded(nodeids, include, notify)

    child = Child(work)
    found = []
    child.watch.again(SLOWEST_S, SLOWEST_S, 0.0)
    for reported in child.reported():
        if "test" in reported:
            found.append(reported)
            child.watch.again(SLOWEST_S, SLOWEST_S, child.used_s())
    suite.clean_up()
    return found


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
