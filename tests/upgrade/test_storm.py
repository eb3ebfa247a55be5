"""What `make upgrade` does, without a cluster: the order, who goes back, the last line."""

from pathlib import Path

import pytest

from services.local.config import ROOT
from tests.upgrade.releases import Release
from tests.upgrade.storm import ORDER, Upgrade, events_of, names, reversible, steps

PRESENT = Release("present", "0" * 40, ROOT)


@pytest.fixture
def before(tmp_path: Path) -> Release:
    """A release without internal listeners, whose metadata service knows no kinds of migrations."""
    (tmp_path / "services/metadata").mkdir(parents=True)
    (tmp_path / "services/metadata/migrate.py").write_text("")
    return Release("before", "0" * 40, tmp_path)


def test_services_are_replaced_one_by_one_in_the_documented_order() -> None:
    found = steps(PRESENT, ORDER)

    assert found == [[name] for name in names(ORDER)]
    guide = (ROOT / "docs/guides/upgrades.md").read_text()
    listed = [
        guide.index(f"**{kind}") for kind in ("metadata", "bookies", "autorecovery", "gateways")
    ]
    assert listed == sorted(listed)


def test_all_services_go_back_to_a_release_that_works_with_later_tables() -> None:
    assert reversible(PRESENT) == ORDER


def test_gateways_without_internal_listeners_are_replaced_at_once(before: Release) -> None:
    assert steps(before, ORDER)[-1] == names(("gateway",))
    assert steps(before, tuple(reversed(ORDER)))[0] == names(("gateway",))
    assert reversible(before) == ORDER[1:]
    assert not before.has_secrets


def test_a_defect_in_a_log_is_found_by_its_event() -> None:
    log = 'Traceback\n{"event":"started"}\n{"event":"unhandled-error"}\n'

    assert list(events_of(log)) == ["started", "unhandled-error"]


def test_the_last_line_counts_what_was_done_and_lost() -> None:
    report = Upgrade(replaced=9, back=7)
    report.seen.acknowledged = 100

    assert report.last_line() == "upgrade: 9 services replaced, 7 back, 100 acknowledged, 0 lost"
    assert not report.has_failed
