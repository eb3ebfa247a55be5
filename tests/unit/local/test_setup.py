"""The first `make`: a .venv that is half-made, of another Python, or can't be made."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from services.local.config import ROOT


def make_venv(folder: Path, *, is_asked: bool = False, before: str = "") -> str:
    """Call the script's function in a folder; what it says, or its last words."""
    program = (
        f"{before}\nimport runpy\nscript = runpy.run_path({str(ROOT / 'requirements/venv.py')!r})\n"
    )
    program += f"script['make_venv'](is_asked={is_asked})"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def has_pip(folder: Path) -> bool:
    return (
        subprocess.run(
            [".venv/bin/python", "-m", "pip", "--version"],
            cwd=folder,
            capture_output=True,
            check=False,
        ).returncode
        == 0
    )


@pytest.fixture
def half_made(tmp_path: Path) -> Path:
    """As Ctrl-C, or a Debian without python3-venv, leaves it."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", ".venv"], cwd=tmp_path, check=True
    )
    return tmp_path


def test_a_half_made_environment_is_made_anew_and_then_kept(half_made: Path) -> None:
    assert not has_pip(half_made)

    reported = make_venv(half_made)

    assert "it is not whole" in reported
    assert has_pip(half_made)
    (half_made / ".venv" / "kept").touch()
    assert make_venv(half_made) == ""
    assert make_venv(half_made, is_asked=True) == ""
    assert (half_made / ".venv" / "kept").exists()


def test_an_environment_of_another_python_is_made_anew_where_one_is_named(half_made: Path) -> None:
    (half_made / ".venv" / "made").touch()
    cfg = half_made / ".venv" / "pyvenv.cfg"
    cfg.write_text(re.sub(r"(?m)^version.*", "version = 3.10.13", cfg.read_text()))

    assert make_venv(half_made) == ""
    assert "it has Python 3.10" in make_venv(half_made, is_asked=True)
    assert has_pip(half_made)


@pytest.mark.parametrize("version", [(3, 9, 18), (3, 10, 13), (3, 15, 0)])
def test_a_python_that_does_not_do_is_named_in_a_sentence_and_leaves_nothing(
    tmp_path: Path, version: tuple[int, ...]
) -> None:
    reported = make_venv(tmp_path, before=f"import sys; sys.version_info = {version}")

    text = ".".join(map(str, version))
    assert reported == (
        f"quorumlog needs Python 3.11 to 3.14; {sys.executable} is {text}."
        " Name another one: make run PYTHON=python3.12\n"
    )
    assert not (tmp_path / ".venv").exists()
