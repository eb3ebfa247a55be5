"""Which worker gets which test, on a toy suite run by a pytest of its own."""

import subprocess
import sys
from pathlib import Path

TOY = """
import os, pathlib, pytest
@pytest.mark.parametrize("number", range(6))
def test_it(number):
    with (pathlib.Path(__file__).parents[2] / "told").open("a") as told:
        told.write(f"{os.environ['PYTEST_XDIST_WORKER']} {pathlib.Path(__file__).stem}\\n")
"""
TESTS = ("tests/client/test_one.py", "tests/client/test_two.py", "tests/wire/test_three.py")


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
    told = [line.split() for line in (tmp_path / "told").read_text().splitlines()]
    assert len(told) == 18
    assert len({worker for worker, name in told if name in ("test_one", "test_two")}) == 1
    assert len({worker for worker, _ in told}) == 2
