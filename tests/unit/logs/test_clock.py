"""The time for logs: what a gateway's own clock may decide, and what it may not."""

import pytest

from quorumlog.protocol.log.clock import SLACK_MS, Now

NOW = 1_800_000_000_000
DAY_MS = 24 * 3600 * 1000


def clock(wall_ms: int, database_ms: int | None = NOW) -> Now:
    return Now(wall_ms, database_ms)


@pytest.mark.parametrize(
    ("wall_ms", "stamp"),
    [
        (NOW, NOW),
        (NOW + 7, NOW + 7),
        (NOW + 400 * DAY_MS, NOW + SLACK_MS),
        (NOW - 400 * DAY_MS, NOW - SLACK_MS),
    ],
)
def test_stamps_stay_beside_the_databases_clock(wall_ms: int, stamp: int) -> None:
    assert clock(wall_ms).stamp_ms(0) == stamp


def test_stamps_never_go_back() -> None:
    assert clock(NOW - 5).stamp_ms(NOW) == NOW
    assert clock(NOW, database_ms=None).stamp_ms(NOW + DAY_MS) == NOW + DAY_MS


def test_a_ledgers_age_counts_by_the_databases_clock() -> None:
    assert clock(NOW - DAY_MS).sealed_ms() == NOW
    assert clock(NOW - DAY_MS, database_ms=None).sealed_ms() == NOW - DAY_MS


def test_nothing_expires_before_the_database_says_that_its_time_has_come() -> None:
    assert clock(NOW + DAY_MS).expiry_ms(NOW - 5) == NOW - 5
    assert clock(NOW + DAY_MS).expiry_ms(NOW + DAY_MS) == NOW
    assert clock(NOW + DAY_MS, database_ms=None).expiry_ms(NOW) == 0
