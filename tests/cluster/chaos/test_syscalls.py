"""Sites are what a recording shows, and a site fails the call that it names: strace, on a process."""

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.cluster.chaos.machine import Unusable
from tests.cluster.chaos.syscalls import (
    AHEAD,
    Recorder,
    Recording,
    Site,
    Tracer,
    breaks_the_log,
    usable,
)

PROGRAM: Final = """
import os, sys, threading
folder = sys.argv[1]

def write(number):
    new = f"{folder}/log/{number:012d}.new"
    fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.write(fd, b"head")
    os.fsync(fd)
    os.rename(new, f"{folder}/log/{number:012d}.log")
    os.close(fd)

def work():
    for number in range(first, first + 3):
        try:
            write(number)
        except OSError as error:
            print(error.errno)

first = 1 + max((int(name[:12]) for name in os.listdir(f"{folder}/log")), default=0)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
"""Segments, made by a thread as a bookie makes them; tells the errors that it got."""

_ERRNO: Final = {"EIO": "5", "ENOSPC": "28"}


def recorded(folder: Path, *lines: str) -> Recording:
    recording = Recording(folder)
    for line in lines:
        recording.take(line)
    return recording


def test_a_site_is_a_kind_of_file_a_call_and_a_phase() -> None:
    recording = recorded(
        Path("/data/bookie-1"),
        '7  openat(AT_FDCWD</>, "/data/bookie-1/log/000000000003.new", O_RDWR|O_CREAT, 0640) = 5',
        "7  fsync(5</data/bookie-1/log/000000000003.new>) = 0",
        "8  fsync(6</data/bookie-1> <unfinished ...>",
        "8  <... fsync resumed>)               = 0",
        '7  rename("/data/bookie-1/log/000000000003.new", "/data/bookie-1/log/000000000003.log") = 0',
    )
    recording.phase = "running"
    recording.take("7  fdatasync(5</data/bookie-1/log/000000000003.log>) = 0")

    assert [str(site) for site in recording.sites()] == [
        "running fdatasync log/N.log EIO",
        "running fdatasync log/N.log ENOSPC",
        "start fsync . EIO",
        "start fsync log/N.new EIO",
        "start openat log/N.new ENOSPC",
        "start rename log/N.new EIO",
    ]


def test_what_is_not_the_bookies_or_opens_what_is_there_is_no_site() -> None:
    recording = recorded(
        Path("/data/bookie-1"),
        '7  openat(AT_FDCWD</>, "/data/bookie-1/log/000000000003.log", O_RDONLY) = 5',
        "7  fsync(5</data/bookie-10/cookie.json.new>) = 0",
        '7  write(1<pipe:[77]>, "x", 1) = 1',
        "7  exit_group(0)                       = ?",
    )

    assert recording.sites() == []
    assert recording.calls == 0


def test_calls_that_a_start_makes_twice_are_two_sites_and_threads_count_apart() -> None:
    folder = Path("/b")
    both = recorded(
        folder, "7  fsync(5</b/cookie.json.new>) = 0", "7  fsync(5</b/cookie.json.new>) = 0"
    )
    apart = recorded(folder, "7  fsync(5</b/log>) = 0", "8  fsync(5</b/log>) = 0")

    assert [site.nth for site in both.sites()] == [1, 2]
    assert [site.nth for site in apart.sites()] == [1]


def test_a_recording_is_quiet_while_it_sees_nothing_new() -> None:
    fsync, fdatasync = "7  fsync(5</b/log>) = 0", "7  fdatasync(5</b/log/000000000001.log>) = 0"

    assert recorded(Path("/b"), fsync, fsync, fsync).quiet == 2
    assert recorded(Path("/b"), fsync, fsync, fdatasync).quiet == 0


def test_numbers_of_files_are_those_that_are_there_and_the_next_ones(tmp_path: Path) -> None:
    """A time in a name is no number: with it all that comes next was looked for far beyond."""
    (tmp_path / "index").mkdir()
    for name in ("000007.sst", "MANIFEST-000009", "LOG.old.1700000000000000"):
        (tmp_path / "index" / name).touch()

    paths = Site("start", "fsync", "index/N.sst")._paths(tmp_path)

    assert [path.name for path in paths[:3]] == ["000007.sst", "000009.sst", "000010.sst"]
    assert len(paths) == 2 + AHEAD
    assert Site("start", "fsync", ".")._paths(tmp_path) == [tmp_path]


@pytest.mark.parametrize(
    ("call", "file", "error", "is_broken"),
    [
        ("fdatasync", "log/000000000003.log", "EIO", True),
        ("fdatasync", "log/000000000003.log", "ENOSPC", True),
        ("fsync", "log/000000000004.new", "EIO", True),
        ("fsync", "log/000000000004.new", "ENOSPC", False),
        ("fsync", "log/first.new", "EIO", False),
        ("pwritev2", "log/000000000003.log", "EIO", False),
    ],
)
def test_after_a_failed_sync_of_its_log_a_bookie_must_end(
    call: str, file: str, error: str, is_broken: bool
) -> None:
    line = f"7  {call}(5</b/{file}>) = -1 {error} (words) (INJECTED)"

    assert breaks_the_log(line) == is_broken


def test_each_site_of_a_recording_comes_and_only_that_call_fails(tmp_path: Path) -> None:
    try:
        usable()
    except Unusable as error:
        pytest.skip(f"no failing call: {error}")
    (tmp_path / "log").mkdir()
    recorder = Recorder(tmp_path, tmp_path / "recorded")

    def reported(*prefix: str) -> str:
        argv = [*prefix, sys.executable, "-c", PROGRAM, str(tmp_path)]
        return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout

    assert reported(*recorder.prefix) == ""
    sites = recorder.read().sites()

    assert {(site.call, site.file, site.nth) for site in sites} == {
        (call, file, nth)
        for call, file in (
            ("openat", "log/N.new"),
            ("write", "log/N.new"),
            ("fsync", "log/N.new"),
            ("rename", "log/N.new"),
        )
        for nth in (1, 2)
    }
    for site in sites:
        tracer = Tracer(site, tmp_path, tmp_path / "traced")
        errors = reported(*tracer.prefix).split()
        assert errors == [_ERRNO[site.error]], site
        assert len(tracer.failed()) == 1
        assert tracer.has_broken_the_log() == (site.call == "fsync")
