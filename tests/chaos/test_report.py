"""What a storm's last line says: for programs, so that every word counts."""

from collections import Counter

from tests.chaos.report import Report
from tests.support.history import Violation


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
