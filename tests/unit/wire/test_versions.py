"""What peers say of the versions that they speak."""

import pytest

from quorumlog.wire.versions import upgrades, versions_in


def test_the_versions_that_are_spoken_are_offered_the_highest_first_and_are_understood() -> None:
    assert upgrades(range(2, 4)) == ("quorumlog-channel/3", "quorumlog-channel/2")
    assert versions_in(upgrades(range(2, 4))) == [2, 3]


@pytest.mark.parametrize("said", ["", "x", "-2", "9" * 5000])
def test_a_name_without_a_version_is_passed_over(said: str) -> None:
    assert versions_in(["chat", f"quorumlog-channel/{said}", "quorumlog-channel/2"]) == [2]
