"""Whether a directory is the data that a bookie's name stands for."""

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from quorumlog.wire.bodies import STAND_IN
from services.bookie.cookie import (
    PROCESSES_MAX,
    CookieRefused,
    Identity,
    Situation,
    awaits_rebuild,
    decide,
    identity_of,
    is_displaced,
)
from tests.unit.bookie.support import COOKIE

HERE = Identity(inode=7, born_ns=1_000)
LOCAL = COOKIE.model_copy(
    update={"incarnation": 2, "boots": 5, "identity": HERE, "processes": ("first", "last")}
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
    identity=HERE,
    process="this",
    log_end=100,
)


def test_a_matching_directory_keeps_its_incarnation_and_counts_starts() -> None:
    cookie, reason = decide(FOUND)

    assert reason == ""
    assert (cookie.member, cookie.instance, cookie.boots) == ("b1@2", "instance", 6)


def test_an_empty_directory_of_an_unknown_bookie_is_its_first_incarnation() -> None:
    cookie, reason = decide(replace(FOUND, local=None, remote=None, has_data=False))

    assert reason == ""
    assert (cookie.member, cookie.boots, cookie.registered) == ("b1@1", 1, False)


def test_an_incarnation_that_ledgers_name_is_no_new_directorys() -> None:
    """Rule 15b: metadata refused the first one. The directory wrote its cookie before that."""
    written = LOCAL.model_copy(update={"registered": False, "boots": 1, "incarnation": 1})
    refused = replace(FOUND, local=written, remote=None, has_data=False, named=4)

    with pytest.raises(CookieRefused, match="ledgers name b1@4"):
        decide(refused)
    cookie, reason = decide(replace(refused, may_fix=True))

    assert (cookie.member, cookie.boots) == ("b1@5", 1)
    assert "never registered as that incarnation" in reason


def test_an_incarnation_that_never_registered_did_not_however_often_it_was_started() -> None:
    """Rule 15b: only a directory that was a member may answer a rebuild as this member."""
    new = replace(FOUND, local=None, remote=None, has_data=False)
    first, _ = decide(new)
    second, _ = decide(replace(new, local=first))
    registered = second.model_copy(update={"registered": True})
    later, _ = decide(replace(new, local=registered, may_fix=True))

    found = [(one.boots, one.was_registered) for one in (first, second, registered, later)]

    assert found == [(1, False), (2, False), (2, True), (1, False)]


def test_a_directory_waits_for_a_rebuild_where_a_cookie_stands_in_for_it() -> None:
    stand_in = COOKIE.cookie.model_copy(update={"instance": STAND_IN, "incarnation": 2})
    later = stand_in.model_copy(update={"incarnation": 3})

    waits = [awaits_rebuild(LOCAL, found) for found in (None, stand_in, later, LOCAL.cookie)]

    assert waits == [True, True, False, False]


def test_a_first_start_interrupted_before_registration_resumes() -> None:
    local = LOCAL.model_copy(update={"registered": False, "boots": 1, "incarnation": 1})

    cookie, reason = decide(replace(FOUND, local=local, remote=None))

    assert (cookie.member, reason) == ("b1@1", "")


def test_a_new_incarnation_interrupted_before_registration_resumes() -> None:
    local = LOCAL.model_copy(update={"registered": False, "incarnation": 3, "instance": "new"})

    cookie, reason = decide(replace(FOUND, local=local))

    assert (cookie.member, cookie.instance, reason) == ("b1@3", "new", "")


OTHER_INSTANCE = LOCAL.model_copy(update={"instance": "another"}).cookie
LATER = LOCAL.model_copy(update={"incarnation": 3}).cookie
OTHER_PROCESS = LOCAL.cookie.model_copy(update={"process": "another"})
MORE_BOOTS = LOCAL.model_copy(update={"boots": 6}).cookie

LOSSES = {
    "the directory was wiped": replace(FOUND, local=None, has_data=False),
    "the cookie is gone and the log is not": replace(FOUND, local=None, remote=None),
    "the metadata service does not know it": replace(FOUND, remote=None),
    "another directory is registered": replace(FOUND, remote=OTHER_INSTANCE),
    "a later incarnation is registered": replace(FOUND, remote=LATER),
    "the directory is an old copy": replace(FOUND, remote=MORE_BOOTS),
    "the directory is a copy": replace(FOUND, identity=Identity(inode=8, born_ns=1_000)),
    "the inode is used again": replace(FOUND, identity=Identity(inode=7, born_ns=2_000)),
    "another process was registered": replace(FOUND, remote=OTHER_PROCESS),
    "the log went back": replace(FOUND, log_end_reported=101),
}


@pytest.mark.parametrize("found", LOSSES.values(), ids=LOSSES.keys())
def test_a_suspected_loss_refuses_the_start_with_instructions(found: Situation) -> None:
    with pytest.raises(CookieRefused, match="AUTO_FIX_COOKIES=1"):
        decide(found)


@pytest.mark.parametrize("found", LOSSES.values(), ids=LOSSES.keys())
def test_a_suspected_loss_makes_a_new_incarnation_if_allowed(found: Situation) -> None:
    cookie, reason = decide(replace(found, may_fix=True))

    assert reason
    known = [c.incarnation for c in (found.local, found.remote) if c is not None]
    assert cookie.incarnation == max(known, default=0) + 1
    assert cookie.instance not in {"instance", "another"}


def test_lost_deferred_syncs_make_a_new_incarnation_without_permission() -> None:
    cookie, reason = decide(replace(FOUND, lost_unsynced=True))

    assert (cookie.member, bool(reason)) == ("b1@3", True)


@pytest.mark.parametrize("may_fix", [False, True])
def test_the_data_of_another_bookie_or_cluster_is_never_taken(may_fix: bool) -> None:
    with pytest.raises(CookieRefused, match="BOOKIE_NAME"):
        decide(replace(FOUND, name="b2", may_fix=may_fix))
    with pytest.raises(CookieRefused, match="cluster other"):
        decide(replace(FOUND, cluster_id="other", may_fix=may_fix))


@pytest.mark.parametrize("found", LOSSES.values(), ids=LOSSES.keys())
@pytest.mark.parametrize("may_fix", [False, True])
def test_a_running_process_keeps_its_name(found: Situation, may_fix: bool) -> None:
    """Rule 15a: no leave makes a newcomer displace it, and no directory does."""
    for newcomer in (found, FOUND, replace(FOUND, lost_unsynced=True)):
        with pytest.raises(CookieRefused, match="stays"):
            decide(replace(newcomer, holder="http://b1 answers as bookie b1", may_fix=may_fix))


def test_a_copied_directory_that_also_lost_deferred_syncs_needs_permission() -> None:
    """Every copy of a running bookie looks like that."""
    copy = replace(FOUND, identity=Identity(inode=8), lost_unsynced=True)

    with pytest.raises(CookieRefused, match="is a copy"):
        decide(copy)


def test_a_salvaged_log_starts_a_new_incarnation_without_permission() -> None:
    local = LOCAL.model_copy(update={"salvaged": True})

    cookie, reason = decide(replace(FOUND, local=local, log_end=3, log_end_reported=100))

    assert (cookie.member, bool(reason)) == ("b1@3", True)


def test_a_start_interrupted_around_its_registration_is_no_suspected_loss() -> None:
    """One that ended between its cookie and its registration, before or after the row was changed."""
    cookie, _ = decide(FOUND)
    assert cookie.processes == ("first", "last", "this")
    again = replace(FOUND, local=cookie, process="next")

    for registered in (LOCAL.cookie, cookie.cookie):
        assert decide(replace(again, remote=registered))[1] == ""


def test_without_birth_times_the_inode_alone_identifies_a_directory() -> None:
    for unborn, born in ((Identity(7), HERE), (HERE, Identity(7)), (Identity(7), Identity(7))):
        local = LOCAL.model_copy(update={"identity": unborn})
        assert decide(replace(FOUND, local=local, identity=born))[1] == ""
    with pytest.raises(CookieRefused, match="is a copy"):
        decide(replace(FOUND, identity=Identity(8)))


def test_a_cookie_without_identity_and_processes_gets_them() -> None:
    local = LOCAL.model_copy(update={"identity": None, "processes": ()})

    cookie, reason = decide(replace(FOUND, local=local, remote=local.cookie))

    assert (reason, cookie.identity, cookie.processes) == ("", HERE, ("this",))


def test_only_a_later_process_displaces_one_and_a_restored_row_does_not() -> None:
    mine = LOCAL.cookie
    for later in ({"boots": 6}, {"incarnation": 3, "boots": 1}):
        assert is_displaced(mine, mine.model_copy(update={"process": "other", **later}))
    for older in ({"boots": 4}, {"incarnation": 1, "boots": 9}):
        assert not is_displaced(mine, mine.model_copy(update={"process": "other", **older}))
    assert not is_displaced(mine, mine.model_copy(update={"boots": 6}))


def test_a_moved_directory_keeps_its_identity_and_a_copy_does_not(tmp_path: Path) -> None:
    here, moved, copy = tmp_path / "here", tmp_path / "deep" / "moved", tmp_path / "copy"
    here.mkdir()
    first = identity_of(here)
    assert identity_of(here) == first
    shell = ["stat", "--format=%i %W", str(here / "marker")]
    inode, born = subprocess.run(shell, check=True, capture_output=True, text=True).stdout.split()
    assert first.inode == int(inode)
    assert (first.born_ns or 0) // 10**9 == int(born)

    moved.parent.mkdir()
    here.rename(moved)
    (moved / "marker").chmod(0o600)
    os.utime(moved / "marker", (0, 0))
    (moved / "marker").write_bytes(b"")
    assert identity_of(moved).is_same(first)

    subprocess.run(["cp", "-a", str(moved), str(copy)], check=True)
    assert not identity_of(copy).is_same(first)
    shutil.rmtree(copy)

    subprocess.run(["cp", "-al", str(moved), str(copy)], check=True)
    for either in (moved, copy):
        with pytest.raises(CookieRefused, match="copied by hard links"):
            identity_of(either)
    shutil.rmtree(copy)
    assert identity_of(moved).is_same(first)


def test_an_identity_needs_no_birth_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A C library without the call, and a kernel or sandbox that does not know it."""
    known = identity_of(tmp_path)
    libraries = (object(), SimpleNamespace(statx=lambda *_args: -1))
    for library in libraries:
        monkeypatch.setattr("ctypes.CDLL", lambda *_args, found=library, **_kwargs: found)
        assert identity_of(tmp_path) == Identity(known.inode)
        assert known.is_same(identity_of(tmp_path))


def test_a_process_beyond_those_that_a_cookie_remembers_is_told_as_such() -> None:
    """A database that went back names a process that ran here so many starts ago: nobody can tell."""
    local = LOCAL
    for number in range(PROCESSES_MAX):
        local, _ = decide(replace(FOUND, local=local, remote=local.cookie, process=f"p{number}"))
    assert len(local.processes) == PROCESSES_MAX
    decide(replace(FOUND, local=local, remote=LOCAL.cookie.model_copy(update={"process": "p0"})))

    local, _ = decide(replace(FOUND, local=local, remote=local.cookie, process="next"))
    with pytest.raises(CookieRefused, match=f"is not among the last {PROCESSES_MAX}"):
        decide(
            replace(FOUND, local=local, remote=LOCAL.cookie.model_copy(update={"process": "p0"}))
        )
