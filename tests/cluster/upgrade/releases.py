"""The releases of an upgrade: their files, and how their processes are run."""

import io
import shlex
import shutil
import subprocess
import sys
import tarfile
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.local.config import ROOT

BUILD: Final = ROOT / "build" / "upgrade"
_LOCK: Final = "requirements/run.lock"
_NEXT: Final[tuple[tuple[str, str, str], ...]] = (
    ("shared/quorumlog/__init__.py", '__version__ = "', '__version__ = "9.'),
    (
        "shared/quorumlog/wire/versions.py",
        "CHANNEL: Final = range(1, 2)",
        "CHANNEL: Final = range(1, 3)",
    ),
    (
        "shared/quorumlog/wire/bodies.py",
        "    extra: dict[Text, Text] = Field(default_factory=dict)\n",
        "    extra: dict[Text, Text] = Field(default_factory=dict)\n    later: Text = 'later'\n",
    ),
    (
        "shared/quorumlog/wire/log_bodies.py",
        "    forgotten_end: Number = 0\n",
        "    forgotten_end: Number = 0\n    later: Text = 'later'\n",
    ),
)
"""What the next release may do, by file: another number, one more version of the channel, a new field in rows."""
_MIGRATION: Final = "services/metadata/migrations/9000_later.sql"
_EXPANDS: Final = "ALTER TABLE ledgers ADD COLUMN later text;\n"


def last_tag() -> str | None:
    """The last tag before the present commit; None while nothing was released."""
    found = subprocess.run(
        ("git", "describe", "--tags", "--abbrev=0", "HEAD"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() if found.returncode == 0 else None


@dataclass(frozen=True, slots=True)
class Release:
    """The files of a release, and how its processes are run."""

    name: str
    folder: Path

    @property
    def prefix(self) -> tuple[str, ...]:
        """Before a process's command, which begins with a Python: it runs this release's Python and files instead."""
        return () if self.folder == ROOT else (str(self.folder / "run"),)


PRESENT: Final = Release("the present release", ROOT)


def next_release() -> Release:
    """A release after the present one that does all that a next release may do (docs/guides/upgrades.md)."""
    present = checked_out("HEAD")
    folder = BUILD / "next"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(present.folder, folder)
    for name, before, after in _NEXT:
        path = folder / name
        text = path.read_text()
        if text.count(before) != 1:
            raise ValueError(
                f"{name} has {before!r} {text.count(before)} times: change tests/cluster/upgrade/releases.py"
            )
        path.write_text(text.replace(before, after))
    (folder / _MIGRATION).write_text(_EXPANDS)
    _write_command(folder, Path(sys.executable))
    return Release("the next release", folder)


def checked_out(name: str) -> Release:
    """The files of a tag or commit below `build`, with what its processes need. Raises: CalledProcessError."""
    commit = _git("rev-parse", f"{name}^{{commit}}").decode().strip()
    folder = BUILD / commit[:12]
    if not (folder / "run").exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(_git("archive", "--format=tar", commit))) as archive:
            archive.extractall(folder, filter="data")
        _write_command(folder, _python_of(folder))
    return Release(name, folder)


def _python_of(folder: Path) -> Path:
    """This Python where the present packages are those of the release, else one with its own."""
    if (folder / _LOCK).read_bytes() == (ROOT / _LOCK).read_bytes():
        return Path(sys.executable)
    made = folder / ".venv"
    venv.create(made, with_pip=True)
    python = made / "bin" / "python"
    install = ("-m", "pip", "install", "-q", "--require-hashes", "-r", str(folder / _LOCK))
    subprocess.run((python, *install), check=True)
    return python


def _write_command(folder: Path, python: Path) -> None:
    own = shlex.quote(str(folder))
    command = folder / "run.new"
    command.write_text(
        "#!/bin/sh\n"
        "shift\n"  # the present Python
        f"cd {own} || exit 1\n"
        f'PYTHONPATH={own}/shared:{own} exec {shlex.quote(str(python))} "$@"\n'
    )
    command.chmod(0o755)
    command.rename(folder / "run")


def _git(*arguments: str) -> bytes:
    return subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, check=True).stdout
