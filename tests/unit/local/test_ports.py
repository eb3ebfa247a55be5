"""Leased ports."""

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.ports import free_ports
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
