"""The one retry that there is, on toy suites run by a pytest of their own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]

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
