"""Services that tests fork are processes as those that are executed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from loadtest import forked
from loadtest.ports import free_ports
from services.local.config import ROOT
from services.local.process import Program
from tests.support.waiting import until_sync


def program(folder: Path, **settings: str) -> Program:
    """An autorecovery, whose metadata service is away."""
    environment = {"PORT": str(free_ports(1)[0]), "METADATA_URLS": "http://127.0.0.1:1", **settings}
    return Program("toy", (sys.executable, "-m", "services.autorecovery"), environment, folder)


def test_a_forked_service_has_a_session_a_folder_a_log_and_an_end_of_its_own(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    process = forked.start(program(tmp_path), log)
    until_sync(lambda: '"started"' in log.read_text(), "it has started")

    assert process.poll() is process.returncode is None
    assert os.getsid(process.pid) == process.pid
    assert Path(f"/proc/{process.pid}/cwd").readlink() == tmp_path
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.kill()
    assert process.wait(60) == process.poll() == -signal.SIGKILL
    process.send_signal(signal.SIGTERM)  # to nobody


def test_a_forked_service_reads_its_own_environment_and_ends_with_its_own_status(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    assert forked.start(program(ROOT, PORT="none"), log).wait(60) == 2
    assert log.read_text() == "PORT = 'none': must be a whole number from 1 to 65535\n"


_PARENT = """
import sys, time
from pathlib import Path
from loadtest import forked
from tests.unit.local.test_forked import program
print(forked.start(program(Path(sys.argv[1])), Path(sys.argv[1], "log")).pid, flush=True)
time.sleep(3600)
"""


def test_a_forked_service_ends_with_a_process_that_was_killed(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", _PARENT, str(tmp_path)]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        log = tmp_path / "log"
        until_sync(lambda: '"started"' in log.read_text(), "it has started")

        parent.kill()

    def is_gone() -> bool:
        try:
            return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True

    until_sync(is_gone, "it is gone")
