"""Ports that are leased, and the environment that make sets up."""

import contextlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.ports import free_ports
from services.local.config import ROOT
from services.local.process import _lock, is_free


def test_two_leases_never_share_a_port() -> None:
    leases = [free_ports(12) for _ in range(3)] + [free_ports(1)]

    ports = [port for lease in leases for port in lease]

    assert len(set(ports)) == len(ports)
    assert all(10_000 <= port < 20_000 for port in ports)


def test_many_small_leases_share_a_descriptor_and_no_port() -> None:
    free_ports(1)
    before = len([*Path("/proc/self/fd").iterdir()])

    leased = [free_ports(1)[0] for _ in range(200)]

    assert len(set(leased)) == 200
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_a_lease_is_consecutive() -> None:
    ports = free_ports(25)

    assert ports == [*range(ports[0], ports[0] + 25)]


def test_another_process_can_not_lease_the_same_ports_until_this_one_ends() -> None:
    ports = free_ports(10)
    code = (
        f"from services.local.process import _lock; print(_lock(range({ports[9]}, {ports[9] + 2})))"
    )
    holder = (
        "from services.local.process import free_ports; print(*free_ports(1), flush=True); input()"
    )

    printed = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    other = subprocess.Popen(
        [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout
    theirs = int(other.stdout.readline())
    is_theirs = not _lock(range(theirs, theirs + 1))
    other.communicate("\n", timeout=60)

    assert printed.strip() == "False"
    assert is_theirs
    assert _lock(range(theirs, theirs + 1))


def test_a_port_on_which_somebody_listens_is_not_free() -> None:
    port = free_ports(1)[0]

    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
        server.listen()
        seen = is_free(port)

    assert not seen
    assert is_free(port)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm here")
def test_ports_are_leased_where_no_temporary_folder_can_be_written() -> None:
    code = (
        "import os, tempfile; from services.local.process import _folder\n"
        "tempfile._candidate_tempdir_list = lambda: ['/proc/none']\n"
        "print(_folder())"
    )

    printed = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    with contextlib.suppress(OSError):  # a cluster of a machine without such a folder uses it
        Path(printed.strip()).rmdir()

    assert printed.startswith("/dev/shm/")


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
