"""A short storm over a whole cluster: nothing acknowledged is lost, nothing is there twice."""

import re
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from services.local.process import Become, in_child
from tests.cluster.chaos.report import Report
from tests.support.history import Violation
from tests.support.waiting import DeadlineMissed

SEED: Final = 1
KILLS: Final = 6
POWER_CUTS: Final = 2
PARTITIONS: Final = 1
FAILOVERS: Final = 1
MISSED_STATUS: Final = 3
LAST_LINE: Final = re.compile(
    r"chaos: (?P<kills>\d+) kills, (?P<power_cuts>\d+) power cuts, (?P<partitions>\d+) partitions,"
    r" (?P<metadata_cuts>\d+) metadata cuts, (?P<failovers>\d+) failovers,"
    r" (?P<acknowledged>\d+) acknowledged, (?P<lost>\d+) lost, (?P<duplicated>\d+) duplicated,"
    r" (?P<skipped>\d+) skipped(, broken off)?"
)


@dataclass(frozen=True, slots=True)
class Reported:
    """What `make chaos` has told."""

    status: int
    output: str

    def number(self, name: str) -> int:
        """From the last line."""
        found = LAST_LINE.fullmatch(self.output.splitlines()[-1])
        assert found is not None, self.output[-20_000:]
        return int(found[name])

    def skip_without(self, what: str) -> None:
        """Skip a claim about what this machine does not allow."""
        for line in self.output.splitlines():
            if line.startswith(f"no {what}: "):
                pytest.skip(line)


def stormed(build: Path, *options: str) -> Reported:
    """One storm. It is a process of its own, because it takes mounts and a network of its own."""
    argv = [sys.executable, "-m", "tests.cluster.chaos", "--seed", str(SEED), "--build", str(build)]
    done = subprocess.run(
        [*argv, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        preexec_fn=in_child(Become.SELF, signal.SIGKILL),
    )
    return Reported(done.returncode, done.stdout)


def test_nothing_acknowledged_is_lost_or_doubled(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """One test with several claims, not several tests with one storm: workers would run it each."""
    counts = {
        "--kills": KILLS,
        "--power-cuts": POWER_CUTS,
        "--partitions": PARTITIONS,
        "--failovers": FAILOVERS,
    }
    options = [word for name, count in counts.items() for word in (name, str(count))]
    reported = stormed(tmp_path, "--durability", "synced", *options)
    if reported.status == MISSED_STATUS:
        raise DeadlineMissed("the storm goes on", reported.output[-20_000:], 0)

    assert reported.status == 0, reported.output[-20_000:]
    assert reported.number("acknowledged") > 0
    assert reported.number("kills") >= KILLS
    assert reported.number("failovers") >= FAILOVERS
    assert reported.number("lost") == 0
    assert reported.number("duplicated") == 0
    with subtests.test("power was cut"):
        reported.skip_without("power cut")
        assert reported.number("power_cuts") >= POWER_CUTS
    with subtests.test("the network was parted"):
        reported.skip_without("partition")
        assert reported.number("partitions") >= PARTITIONS
    with subtests.test("how far it is is told without a terminal"):
        assert "synced, a cluster starts: 0 kills" in reported.output


def test_a_storm_that_breaks_off_tells_what_it_did_and_claims_nothing(tmp_path: Path) -> None:
    reported = stormed(
        tmp_path, "--durability", "deferred", "--only", "processes", "--patience", "0"
    )

    assert reported.status == MISSED_STATUS, reported.output[-20_000:]
    assert "deferred, a cluster starts: 0 kills" in reported.output
    assert (
        "BROKEN OFF while storm: not within 0 s: appends are acknowledged again" in reported.output
    )
    assert reported.number("lost") == 0
    assert reported.output.splitlines()[-1].endswith(", broken off")
    assert (tmp_path / f"chaos-{SEED}.json").is_file()


# --- what the last line says ---------------------------------------------------------------------


def test_the_last_line_counts_what_was_done_found_and_skipped() -> None:
    report = Report(kills=3, power_cuts=2, partitions=1, metadata_cuts=5, failovers=6)
    report.acknowledged = 7
    report.skipped["partition: needs root"] += 4
    report.violations += [Violation("lost", 1, 0, ""), Violation("gone", 1, 1, "")]
    report.violations += [Violation("duplicate", 1, 2, ""), Violation("lac", 1, 3, "")]

    assert report.last_line() == (
        "chaos: 3 kills, 2 power cuts, 1 partitions, 5 metadata cuts, 6 failovers,"
        " 7 acknowledged, 2 lost, 1 duplicated, 4 skipped"
    )
    assert report.has_failed


def test_two_storms_are_one_report_and_an_end_by_hand_is_told() -> None:
    first = Report(kills=3, known_sites=2, sites=Counter({"start fsync . EIO": 1}))
    second = Report(kills=4, is_interrupted=True, durability="deferred")

    first.add(second)

    assert first.kills == 7
    assert first.last_line().endswith(" 0 skipped, interrupted")
    assert not first.has_failed


def test_every_site_has_come_when_each_failed_or_was_waited_for_in_vain() -> None:
    report = Report()

    assert not report.has_every_site, "no recording, no claim"
    report.known_sites = 2
    report.sites["start fsync . EIO"] += 5
    assert not report.has_every_site
    report.not_made.add("stop fsync index EIO")
    assert report.has_every_site
