"""The release that a cluster is upgraded from: its files, and how its processes are run."""

import io
import shlex
import subprocess
import sys
import tarfile
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.local.config import ROOT

BUILD: Final = ROOT / "build" / "upgrade"
_RECORDED: Final = Path(__file__).parent / "from"
"""The commit to upgrade from while no release has a tag."""
_LOCK: Final = "requirements/run.lock"


def default_from() -> str:
    """The last tag before the present commit, else the recorded commit."""
    found = subprocess.run(
        ("git", "describe", "--tags", "--abbrev=0", "HEAD"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() if found.returncode == 0 else _RECORDED.read_text().strip()


@dataclass(frozen=True, slots=True)
class Release:
    """A release that is not the present one."""

    name: str
    commit: str
    folder: Path

    @property
    def command(self) -> str:
        """Runs the command behind it, which begins with a Python, by this release's Python and files."""
        return str(self.folder / "run")

    @property
    def has_internal_listeners(self) -> bool:
        """Whether a gateway answers other processes at a port of its own."""
        return (self.folder / "services/gateway/roles.py").exists()

    @property
    def has_secrets(self) -> bool:
        """Whether its services show each other a secret."""
        return (self.folder / "shared/quorumlog/wire/secret.py").exists()

    @property
    def accepts_later_tables(self) -> bool:
        """Whether its metadata service starts with tables that a later release has expanded."""
        text = (self.folder / "services/metadata/migrate.py").read_text()
        return "expand" in text


def checked_out(name: str) -> Release:
    """The files of a tag or commit below `build`, with what its processes need. Raises: CalledProcessError."""
    commit = _git("rev-parse", f"{name}^{{commit}}").decode().strip()
    folder = BUILD / commit[:12]
    if not (folder / "run").exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(_git("archive", "--format=tar", commit))) as archive:
            archive.extractall(folder, filter="data")
        _write_command(folder, _python_of(folder))
    return Release(name, commit, folder)


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
