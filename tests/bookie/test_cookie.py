"""Whether a directory is the data that a bookie's name stands for."""

from dataclasses import replace

import pytest

from services.bookie.cookie import CookieRefused, LocalCookie, Situation, decide

LOCAL = LocalCookie(
    name="b1",
    incarnation=2,
    cluster_id="cluster",
    instance="instance",
    directories=("/data",),
    boots=5,
    registered=True,
)
FOUND = Situation(
    name="b1",
    directory="/data",
    cluster_id="cluster",
    durability="fsync",
    local=LOCAL,
    remote=LOCAL.cookie,
    has_data=True,
    lost_unsynced=False,
    may_fix=False,
)


def test_a_directory_that_matches_starts_again_and_counts_its_starts() -> None:
    cookie, reason = decide(FOUND)

    assert reason == ""
    assert (cookie.member, cookie.instance, cookie.boots) == ("b1@2", "instance", 6)


def test_an_empty_directory_of_an_unknown_bookie_is_its_first_incarnation() -> None:
    cookie, reason = decide(replace(FOUND, local=None, remote=None, has_data=False))

    assert reason == ""
    assert (cookie.member, cookie.boots, cookie.registered) == ("b1@1", 1, False)


def test_a_first_start_that_ended_before_it_was_registered_goes_on() -> None:
    local = LOCAL.model_copy(update={"registered": False, "boots": 1, "incarnation": 1})

    cookie, reason = decide(replace(FOUND, local=local, remote=None))

    assert (cookie.member, reason) == ("b1@1", "")


def test_a_new_incarnation_that_was_not_registered_yet_goes_on() -> None:
    local = LOCAL.model_copy(update={"registered": False, "incarnation": 3, "instance": "new"})

    cookie, reason = decide(replace(FOUND, local=local))

    assert (cookie.member, cookie.instance, reason) == ("b1@3", "new", "")


OTHER_INSTANCE = LOCAL.model_copy(update={"instance": "another"}).cookie
LATER = LOCAL.model_copy(update={"incarnation": 3}).cookie
MORE_BOOTS = LOCAL.model_copy(update={"boots": 6}).cookie

LOSSES = {
    "the directory was wiped": replace(FOUND, local=None, has_data=False),
    "the cookie is gone and the log is not": replace(FOUND, local=None, remote=None),
    "the metadata service does not know it": replace(FOUND, remote=None),
    "another directory is registered": replace(FOUND, remote=OTHER_INSTANCE),
    "a later incarnation is registered": replace(FOUND, remote=LATER),
    "the directory is an old copy": replace(FOUND, remote=MORE_BOOTS),
}


@pytest.mark.parametrize("found", LOSSES.values(), ids=LOSSES.keys())
def test_suspected_loss_refuses_and_says_what_to_do(found: Situation) -> None:
    with pytest.raises(CookieRefused, match="AUTO_FIX_COOKIES=1"):
        decide(found)


@pytest.mark.parametrize("found", LOSSES.values(), ids=LOSSES.keys())
def test_suspected_loss_makes_a_new_incarnation_where_that_is_allowed(found: Situation) -> None:
    cookie, reason = decide(replace(found, may_fix=True))

    assert reason
    known = [c.incarnation for c in (found.local, found.remote) if c is not None]
    assert cookie.incarnation == max(known, default=0) + 1
    assert cookie.instance not in {"instance", "another"}


def test_deferred_syncs_that_were_lost_make_a_new_incarnation_by_themselves() -> None:
    cookie, reason = decide(replace(FOUND, lost_unsynced=True))

    assert (cookie.member, bool(reason)) == ("b1@3", True)


@pytest.mark.parametrize("may_fix", [False, True])
def test_the_data_of_another_bookie_or_cluster_is_never_taken(may_fix: bool) -> None:
    with pytest.raises(CookieRefused, match="BOOKIE_NAME"):
        decide(replace(FOUND, name="b2", may_fix=may_fix))
    with pytest.raises(CookieRefused, match="cluster other"):
        decide(replace(FOUND, cluster_id="other", may_fix=may_fix))
