"""Makes .venv with the packages of a lock, for the Makefile: `python3 requirements/venv.py run`.

Runs on Python 3.6 and later, so that a Python that is too old is named in a sentence. A .venv that an interrupted first
try left half-made is made anew: it is whole only once it has the file `made`, which is written last. So is a .venv of
another Python, where the caller named one (`--asked`); `--differs` says by the exit status whether that is so.
"""  # noqa: INP001

import os
import re
import subprocess
import sys
from pathlib import Path

OLDEST, NEWEST = (3, 11), (3, 14)
VENV = Path(".venv")
PYTHON = VENV / "bin" / "python"
LOCKS = Path(__file__).resolve().parent


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run(*words: str, **more: int) -> bool:
    """Run a program. Returns whether it did its work."""
    try:
        return subprocess.call(words, **more) == 0  # noqa: S603
    except OSError:
        return False


def dotted(version: "tuple[int, ...]") -> str:
    """A version as people write it."""
    return ".".join(map(str, version))


def version_of_venv() -> "tuple[int, ...] | None":
    """The Python of a whole .venv, such as (3, 11); None where there is none."""
    is_whole = (VENV / "made").exists() or any(VENV.glob("installed-*"))
    if not is_whole or not os.access(str(PYTHON), os.X_OK):
        return None
    found = re.search(
        r"^version\w* *= *(\d+)\.(\d+)", (VENV / "pyvenv.cfg").read_text(), re.MULTILINE
    )
    return (int(found.group(1)), int(found.group(2))) if found else None


def make_venv(*, is_asked: bool) -> None:
    """Make .venv, unless it is there, whole, and of the Python that was asked for."""
    version, own = version_of_venv(), tuple(sys.version_info[:2])
    if version and (not is_asked or version == own):
        return
    if not OLDEST <= own <= NEWEST:
        sys.exit(
            f"quorumlog needs Python {dotted(OLDEST)} to {dotted(NEWEST)}; {sys.executable} is"
            f" {dotted(sys.version_info[:3])}. Name another one: make run PYTHON=python3.12"
        )
    if VENV.exists():
        say(
            f"making {VENV} anew: it {f'has Python {dotted(version)}' if version else 'is not whole'}"
        )
    if not run(sys.executable, "-m", "venv", "--clear", str(VENV)):
        sys.exit(1)  # venv has said why
    (VENV / "made").touch()


def install(lock: str) -> None:
    """Install what a lock lists, by uv where there is one, because it is faster, else by pip."""
    file = LOCKS / f"{lock}.lock"
    count = len(re.findall(r"^\w.*==(?!.*win32)", file.read_text(), re.MULTILINE))
    say(f"installing {count} packages into {VENV}, once: this takes a minute or more")
    pip = (str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q")
    wanted = ("--require-hashes", "-r", str(file))
    uv = ("uv", "pip", "install", "-q", "--python", str(PYTHON))
    is_done = run(*uv, *wanted, stderr=subprocess.DEVNULL) or run(*pip, *wanted)
    if not (is_done and run(*pip, "--no-deps", "--no-build-isolation", "--no-index", "-e", ".")):
        sys.exit(1)
    size = sum(path.lstat().st_size for path in VENV.rglob("*"))
    say(f"installed: {VENV} has {size >> 20} MB")


if __name__ == "__main__":
    if sys.argv[1] == "--differs":
        sys.exit(0 if version_of_venv() not in (None, sys.version_info[:2]) else 1)
    make_venv(is_asked="--asked" in sys.argv)
    install(sys.argv[1])
