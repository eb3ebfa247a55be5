"""The mutator finds what its tests find, tells what they do not, and goes on where it ended."""

import ast
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.mutation.mutate import sql
from tests.mutation.mutate.hunt import root
from tests.mutation.mutate.listed import equivalent, stale
from tests.mutation.mutate.places import Source

SAMPLE = "tests/mutation/mutate/sample.py"
CASES = "tests/mutation/mutate/sample_cases.py"


def mutated(build: Path, *options: str) -> tuple[int, str, dict[str, str]]:
    """Status, last line and verdicts of a campaign over the sample."""
    command = [sys.executable, "-m", "tests.mutation.mutate", "--paths", SAMPLE, "--tests", CASES]
    report = build / "report.json"
    done = subprocess.run(
        [*command, "--build", str(build), "--json", str(report), *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=root(),
        timeout=300,
    )
    assert report.exists(), done.stderr
    rows: list[dict[str, Any]] = orjson.loads(report.read_bytes())["mutants"]
    verdicts = {row["name"].partition("::")[2]: row["verdict"] for row in rows}
    return done.returncode, done.stdout.splitlines()[-1], verdicts


def test_a_campaign_finds_skips_tells_and_goes_on(tmp_path: Path) -> None:
    status, last, verdicts = mutated(tmp_path, "--match", "withdraw: never")
    assert (status, last) == (
        1,
        "mutate: 2 mutants, 1 found, 1 unnoticed, 0 equivalent, 0 left",
    )
    first = (tmp_path / "results.jsonl").read_bytes()

    status, last, verdicts = mutated(tmp_path, "--resume")

    assert verdicts == {
        "Account.withdraw: never `amount < 0`": "unnoticed",
        "Account.withdraw: always `amount < 0`": "found",
        "Account.withdraw: bound `amount < 0`": "unnoticed",
        "Account.withdraw: never `amount > self.balance`": "found",
        "Account.withdraw: always `amount > self.balance`": "found",
        "Account.withdraw: bound `amount > self.balance`": "equivalent",
        "Account.withdraw: without `return amount`": "found",
        "Account.close: never `self.balance`": "unreached",
        "Account.close: always `self.balance`": "unreached",
    }
    assert status == 1
    assert last == "mutate: 9 mutants, 4 found, 4 unnoticed, 1 equivalent, 0 left"
    results = (tmp_path / "results.jsonl").read_bytes()
    assert results.startswith(first)
    assert len(results.splitlines()) == 8


def test_what_is_listed_is_there() -> None:
    listed = equivalent()
    sources = [
        Source.read(root() / name, root()) for name in {name.partition("::")[0] for name in listed}
    ]

    known = [place.name for source in sources for place in source.places()]

    assert stale(listed, (source.name for source in sources), known) == []


def test_a_guard_that_the_code_no_longer_has_is_stale() -> None:
    assert stale(
        ["a.py::f: never `x`", "b.py::g: never `y`"], ["a.py"], ["a.py::f: never `z`"]
    ) == ["a.py::f: never `x`"]


CHANGES = {
    "if a:\n    return 1": ["never `a`", "always `a`"],
    "if a:\n    b()\n    return 1": [
        "without `b()`",
        "without `return 1`",
        "never `a`",
        "always `a`",
    ],
    "while a:\n    continue": ["never `a`", "without `continue`"],
    "async with self._lock:\n    x = 1": ["unlocked `self._lock`"],
    "async with session:\n    x = 1": [],
    "await self.sync()": ["without `await self.sync()`"],
    "_log.info('x')": [],
    "x = a and b": ["without `a` in `a and b`", "without `b` in `a and b`"],
    "x = a < b": ["bound `a < b`"],
    "x = [a for a in b if c]": ["always `c`"],
    "x = max(a, b)": ["not max `max(a, b)`"],
    "match a:\n    case b if c:\n        x = 1": ["never `c`", "always `c`"],
    "raise Error('x' if a else 'y')": [],
}


@pytest.mark.parametrize("text", CHANGES)
def test_each_kind_of_guard_has_its_changes(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.py"
    body = textwrap.indent(text, "    ")
    # Two statements behind it: what ends a function is no early end of it.
    path.write_text(f"async def f(self):\n{body}\n    return 0\n")

    places = Source.read(path, tmp_path).places()

    assert sorted(place.change for place in places) == sorted(
        CHANGES[text]
        if not text.startswith("raise")
        else ["without `raise Error('x' if a else 'y')`"]
    )
    for place in Source.read(path, tmp_path).places():
        source = Source.read(path, tmp_path)
        again = next(each for each in source.places() if each.name == place.name)
        again.apply()
        compile(ast.fix_missing_locations(source.tree), "m.py", "exec")
        assert ast.unparse(source.tree) != path.read_text().strip()


QUERIES = {
    "SELECT a FROM t WHERE b = $1 AND c = $2 FOR UPDATE": [
        "SELECT a FROM t WHERE (b = $1 OR TRUE) AND c = $2 FOR UPDATE",
        "SELECT a FROM t WHERE b = $1 AND (c = $2 OR TRUE) FOR UPDATE",
        "SELECT a FROM t WHERE b = $1 AND c = $2",
    ],
    "UPDATE t SET a = 1 WHERE b IN (SELECT c FROM u WHERE d) RETURNING a": [
        "UPDATE t SET a = 1 WHERE (b IN (SELECT c FROM u WHERE d) OR TRUE) RETURNING a",
        "UPDATE t SET a = 1 WHERE b IN (SELECT c FROM u WHERE (d OR TRUE)) RETURNING a",
    ],
    "INSERT INTO t VALUES (1) ON CONFLICT (a) DO NOTHING": [],
    "SELECT a FROM t WHERE b BETWEEN 1 AND 2 AND c": [
        "SELECT a FROM t WHERE (b BETWEEN 1 AND 2 OR TRUE) AND c",
        "SELECT a FROM t WHERE b BETWEEN 1 AND 2 AND (c OR TRUE)",
    ],
    "come and go": [],
}


@pytest.mark.parametrize("text", QUERIES)
def test_each_condition_and_lock_of_a_query_is_taken_out(text: str) -> None:
    made = [new for _, new in sql.without(ast.Constant(value=text))]

    assert [new.value for new in made if isinstance(new, ast.Constant)] == QUERIES[text]
