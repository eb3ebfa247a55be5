"""`quorumlog doctor` on this machine, with what a user may have got wrong."""

import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from loadtest.ports import free_ports
from tests.support.commands import quick


def doctor(*options: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit status, and what was found."""
    done = subprocess.run(
        quick("doctor", "--json", *options),
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def test_a_machine_that_runs_these_tests_has_no_problem(tmp_path: Path) -> None:
    (port,) = free_ports(1)

    status, findings = doctor("--data", str(tmp_path / "new"), "--port", str(port))

    # The port after it may be in use, by another test.
    problems = [each for each in findings if each["state"] == "problem"]
    assert all(each["found"].startswith(f"{port + 1}:") for each in problems)
    assert status == (1 if problems else 0)
    assert {each["check"] for each in findings} == {
        "Python", "system", "packages", "disk", "sync", "open files", "port", "clock",
    }  # fmt: skip
    assert all(each["advice"] for each in findings if each["state"] != "ok")


def test_a_used_port_is_a_problem_unless_the_cluster_of_this_folder_uses_it(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        alone, findings = doctor("--data", str(tmp_path), "--port", str(port))
        (tmp_path / "gateways").write_text(
            f"http://127.0.0.1:{port}\nhttp://127.0.0.1:{port + 1}\n"
        )
        beside, _ = doctor("--data", str(tmp_path), "--port", str(port))

    problems = [each for each in findings if each["state"] == "problem"]
    assert alone == 1
    assert problems[0]["check"] == "port"
    assert problems[0]["found"].startswith(f"{port}:")
    assert beside == 0


@pytest.mark.parametrize("folder", ["/proc/self/data", "/dev/null/data"])
def test_a_folder_that_cannot_be_written_is_a_problem(folder: str) -> None:
    status, findings = doctor("--data", folder)

    assert status == 1
    assert "disk" in [each["check"] for each in findings if each["state"] == "problem"]
