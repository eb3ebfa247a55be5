"""What peers say of the versions that they speak."""

import pytest

from quorumlog.wire.versions import has_common, subprotocols, versions_in


def test_the_versions_that_are_spoken_are_offered_the_highest_first_and_are_understood() -> None:
    assert subprotocols(range(1, 4)) == ("quorumlog.3", "quorumlog.2", "quorumlog.1")
    assert versions_in(subprotocols(range(1, 4))) == [1, 2, 3]
    assert has_common(["quorumlog.3", "quorumlog.2"], range(1, 3))
    assert not has_common(["quorumlog.3"], range(1, 3))


@pytest.mark.parametrize(
    "name", ["", "chat", "quorumlog.", "quorumlog.x", "quorumlog.-2", "quorumlog." + "9" * 5000]
)
def test_a_peer_that_names_no_version_speaks_the_first_one(name: str) -> None:
    assert versions_in([name]) == [1]
