"""Budgets: what there is of one thing, and that one peer can't have all of it while others need some."""

import pytest

from quorumlog.errors import Overloaded
from quorumlog.net.budget import Budget, peer_of


def budget(limit: int = 800, share: int = 100) -> Budget:
    return Budget("bytes", "BYTES_MAX", limit, share)


def test_one_peer_alone_may_use_all_but_the_part_that_is_kept_for_others() -> None:
    bytes_ = budget()

    bytes_.take("a", 700)
    with pytest.raises(Overloaded, match=r"its share is 100 \(PEER_BYTES_MAX\)"):
        bytes_.take("a", 1)

    bytes_.take("b", 100)
    assert (bytes_.used, bytes_.of("a"), bytes_.of("b")) == (800, 700, 100)
    with pytest.raises(Overloaded, match=r"the limit is 800 \(BYTES_MAX\)"):
        bytes_.take("c", 1)


def test_a_peer_below_its_share_gets_no_more_than_its_share_while_it_is_tight() -> None:
    bytes_ = budget(share=50)
    bytes_.take("a", 700)

    bytes_.take("b", 30)
    with pytest.raises(Overloaded, match="PEER_BYTES_MAX"):
        bytes_.take("b", 30)

    bytes_.give("a", 100)
    bytes_.take("b", 30)
    assert bytes_.of("b") == 60


def test_what_is_refused_takes_nothing_and_what_is_given_back_is_free() -> None:
    bytes_ = budget(limit=10)

    bytes_.take("a", 6)
    with pytest.raises(Overloaded):
        bytes_.take("b", 6)
    assert (bytes_.used, bytes_.of("b")) == (6, 0)
    bytes_.give("a", 6)

    bytes_.take("b", 6)
    assert (bytes_.used, bytes_.of("a")) == (6, 0)


def test_one_of_any_size_is_taken_when_nothing_else_is() -> None:
    bytes_ = budget(limit=10, share=5)

    bytes_.take("a", 50)

    with pytest.raises(Overloaded):
        bytes_.take("b", 1)


def test_an_ipv6_host_is_one_peer_and_a_mapped_address_is_the_ipv4_one() -> None:
    assert peer_of("2001:db8:1:2::1") == peer_of("2001:db8:1:2:ffff::9%eth0")
    assert peer_of("2001:db8:1:2::1") != peer_of("2001:db8:1:3::1")
    assert peer_of("::ffff:192.0.2.1") == peer_of("192.0.2.1") == "192.0.2.1"
    assert peer_of(None) == ""
