"""What `make upgrade` does, without a cluster: the order, the last line."""

from services.local.config import ROOT
from tests.cluster.upgrade.storm import Upgrade, events_of


def test_the_order_is_that_of_the_guide() -> None:
    guide = (ROOT / "docs/guides/upgrades.md").read_text()
    listed = [
        guide.index(f"**{kind}") for kind in ("metadata", "bookies", "autorecovery", "gateways")
    ]

    assert listed == sorted(listed)


def test_a_defect_in_a_log_is_found_by_its_event() -> None:
    log = 'Traceback\n{"event":"started"}\n{"event":"unhandled-error"}\n'

    assert list(events_of(log)) == ["started", "unhandled-error"]


def test_the_last_line_counts_what_was_done_and_lost() -> None:
    report = Upgrade(replaced=9, back=7)
    report.seen.acknowledged = 100

    assert report.last_line() == "upgrade: 9 services replaced, 7 back, 100 acknowledged, 0 lost"
    assert not report.has_failed
