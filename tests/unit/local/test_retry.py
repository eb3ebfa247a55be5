"""The tests' own tools: the one retry that there is, ways of waiting, which worker gets which test."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import DeadlineMissed, until, until_sync

_ROOT = Path(__file__).resolve().parents[3]

_HEAD = """
import pathlib, pytest
from tests.support.waiting import DeadlineMissed
def is_first():
    mark = pathlib.Path(__file__).with_name("mark")
    if mark.exists():
        return False
    mark.touch()
    return True
"""

_FORGIVEN = {
    "a missed deadline": """
def test_it():
    if is_first():
        raise DeadlineMissed("it", None, 1)
""",
    "a group of missed deadlines": """
def test_it():
    if is_first():
        raise ExceptionGroup("", [DeadlineMissed("it", None, 1), DeadlineMissed("it", None, 1)])
""",
    "a fixture of the module": """
@pytest.fixture(scope="module")
def server():
    if is_first():
        raise DeadlineMissed("it", None, 1)
def test_it(server):
    pass
""",
}

_UNFORGIVEN = {
    "a wrong answer": """
def test_it():
    assert not is_first()
""",
    "a wrong answer beside a missed deadline": """
def test_it():
    if is_first():
        raise ExceptionGroup("", [DeadlineMissed("it", None, 1), AssertionError()])
""",
    "a wrong answer at the end of a fixture": """
@pytest.fixture
def server():
    first = is_first()
    yield first
    assert not first
def test_it(server):
    if server:
        raise DeadlineMissed("it", None, 1)
""",
    "a deadline missed twice": """
def test_it():
    raise DeadlineMissed("it", None, 1)
""",
}


def outcome(code: str, folder: Path) -> str:
    (folder / "test_toy.py").write_text(_HEAD + code)
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.support.retry", "-p", "no:cacheprovider"],
        cwd=folder,
        env={"PYTHONPATH": f"{_ROOT}:{_ROOT}/shared", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    ).stdout


@pytest.mark.parametrize("what", _FORGIVEN)
def test_is_run_once_more_and_named(what: str, tmp_path: Path) -> None:
    out = outcome(_FORGIVEN[what], tmp_path)

    assert re.search(r"=+ 1 passed in", out), out
    assert "run twice: test_toy.py::test_it: " in out


@pytest.mark.parametrize("what", _UNFORGIVEN)
def test_is_a_failure(what: str, tmp_path: Path) -> None:
    out = outcome(_UNFORGIVEN[what], tmp_path)

    assert re.search(r"=+ .*1 (failed|error).* in", out), out


# --- waiting -------------------------------------------------------------------------------------


async def test_until_returns_the_first_true_answer() -> None:
    answers = iter([0, None, 7])

    assert await until(lambda: next(answers), "seven") == 7


async def test_a_predicate_that_hangs_misses_the_deadline() -> None:
    with pytest.raises(DeadlineMissed, match="the end of time"):
        await until(asyncio.Event().wait, "the end of time", 0.05)


async def test_passing_errors_count_as_not_yet() -> None:
    failures = [TimeoutError()]

    async def ask() -> bool:
        if failures:
            raise failures.pop()
        return True

    assert await until(ask, "an answer", passing=(TimeoutError,))


async def test_an_unexpected_error_ends_the_wait() -> None:
    def ask() -> bool:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await until(ask, "never")


def test_the_deadline_says_what_was_seen_last() -> None:
    with pytest.raises(DeadlineMissed, match="seen last: 0"):
        until_sync(lambda: 0, "a one", 0.01)


# --- which worker gets which test ----------------------------------------------------------------


TOY = """
import os, pathlib, pytest
@pytest.mark.parametrize("number", range(6))
def test_it(number):
    with (pathlib.Path(__file__).parents[3] / "told").open("a") as told:
        told.write(f"{os.environ['PYTEST_XDIST_WORKER']} {pathlib.Path(__file__).stem}\\n")
"""
TESTS = (
    "tests/unit/client/test_one.py",
    "tests/unit/client/test_two.py",
    "tests/unit/wire/test_three.py",
)


def test_tests_that_share_a_cluster_run_on_one_worker(tmp_path: Path) -> None:
    for name in TESTS:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TOY)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "-p", "tests.support.scheduling",
         "-p", "no:cacheprovider", "--import-mode=importlib"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    reported = [line.split() for line in (tmp_path / "told").read_text().splitlines()]
    assert len(reported) == 18
    assert len({worker for worker, name in reported if name in ("test_one", "test_two")}) == 1
    assert len({worker for worker, _ in reported}) == 2
