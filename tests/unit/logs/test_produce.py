"""`make produce`, short: all kinds of processes are killed, and no record is lost, doubled or left unprocessed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.consumed import Consumed, Journal, Known, Lease, judge_consumer, read_leases
from loadtest.crowd import CrowdPlan
from loadtest.produce import Plan, Sent, judge, main, produce, value_of
from loadtest.stores import Stores
from loadtest.team import TeamPlan
from loadtest.worked import ANY, ATTEMPTS, KEY, Worked, judge_queues, read_journals

SENT = [Sent("a", 3, {0: 0, 1: 1, 2: 3}), Sent("b", 1, {0: 2})]
FOUND = [(n, value_of(*which)) for n, which in enumerate((("a", 0), ("a", 1), ("b", 0), ("a", 2)))]
RECORDS = [b"%d" % at for at in range(6)]


async def test_each_record_is_there_once_and_is_processed_while_all_kinds_of_processes_die(
    stores: Stores,
) -> None:
    crowd = CrowdPlan(consumers=1, workers=2, every_s=0.2, commit_every=20)
    team = TeamPlan(workers=4, lease_s=1.0, every_s=0.5)
    plan = Plan(1600, batch=8, every_s=0.2, down_s=0.2, pause_s=0.1, crowd=crowd, team=team)

    result = await produce(plan, stores=stores)

    assert result.is_good, result
    assert result.records == 1600
    assert result.kills > 0
    assert result.replaced > 0
    assert result.consumed.zombies > 0
    assert result.worked.given >= 2 * 1600
    assert result.worked.dead >= 16


def test_the_judge_sees_what_is_lost_doubled_elsewhere_or_out_of_order() -> None:
    good = judge(SENT, FOUND, 7)
    assert good.is_good
    consumed = Consumed(leases=3, again=2, bound=5, zombies=1)
    assert replace(good, replaced=2, consumed=consumed).line() == (
        "produce: 4 records, 7 deaths, 2 consumers replaced, 1 zombies refused, 0 lost, 0 duplicated,"
        " 0 misplaced, 2 processed again (bound 5), 0 commits back"
    )
    assert not replace(good, consumed=Consumed(back=1)).is_good

    lost = judge(SENT, FOUND[:3], 0)
    doubled = judge(SENT, [*FOUND, (4, value_of("a", 1))], 0)
    moved = judge([replace(SENT[0], offsets={0: 0, 1: 1, 2: 4}), SENT[1]], FOUND, 0)
    turned = judge(SENT, [(0, FOUND[1][1]), (1, FOUND[0][1]), *FOUND[2:]], 0)

    assert (lost.lost, lost.is_good) == (1, False)
    assert (doubled.duplicated, doubled.is_good) == (1, False)
    assert (moved.misplaced, moved.is_good) == (1, False)
    assert turned.problems == ("a is out of order",)
    assert judge(SENT, [*FOUND, (4, b"x")], 0).problems == ("1 records were never sent",)
    assert judge(SENT, [(n + 1, value) for n, value in FOUND], 0).problems


def lease(token: int, start: int, end: int, *commits: Known, at: int | None = None) -> Lease:
    """A lease with the records from `start` on; it was asked for and granted at the times `at` and `at + 1`."""
    at = 10 * token if at is None else at
    done = [(offset, RECORDS[offset]) for offset in range(start, end)]
    return Lease(token, Known(at, at + 1, start), done, list(commits))


def judged(*leases: Lease, looks: tuple[Known, ...] = ()) -> Consumed:
    return judge_consumer("c", leases, looks, RECORDS, commit_every=2)


FIRST = lease(1, 0, 4, Known(12, 13, 2))
SECOND = lease(2, 2, 6, Known(22, 23, 6))


def test_records_that_come_again_are_counted_and_bounded_by_what_was_not_committed() -> None:
    good = judged(FIRST, SECOND, looks=(Known(14, 15, 2), Known(24, 25, 6)))

    assert good.is_good, good
    assert (good.leases, good.again, good.bound) == (2, 2, 2)


def test_the_judge_of_consumers_sees_each_broken_promise() -> None:
    skipped = judged(FIRST, lease(2, 5, 6))
    assert (skipped.lost, skipped.is_good) == (1, False)
    back = judged(FIRST, lease(2, 1, 6, Known(22, 23, 6)))
    assert (back.back, back.is_good) == (2, False)  # by its token, and by its time
    assert judged(FIRST, SECOND, looks=(Known(24, 25, 5),)).back == 1
    late = replace(FIRST, commits=[Known(12, 13, 2), Known(22, 23, 2)])
    assert "after a higher token" in judged(late, SECOND).problems[0]
    assert "twice" in judged(FIRST, replace(SECOND, token=1)).problems[0]
    assert "before a lower one" in judged(FIRST, lease(2, 2, 6, at=1)).problems[0]
    torn = replace(SECOND, done=[*SECOND.done[:1], *SECOND.done[2:]])
    assert "not those from 2 on" in judged(FIRST, torn).problems[0]
    other = replace(FIRST, done=[(0, b"x"), *FIRST.done[1:]])
    assert "not those from 0 on" in judged(other, SECOND).problems[0]
    sunk = replace(SECOND, commits=[Known(22, 23, 6), Known(24, 25, 4)])
    assert "go back" in judged(FIRST, sunk).problems[0]
    assert "3 records" in judged(FIRST, lease(2, 2, 5)).problems[0]
    taken = replace(FIRST, zombies=["lease-lost", "taken"])
    assert judged(taken, SECOND).zombies == 1
    assert "were not refused: taken" in judged(taken, SECOND).problems[0]


def worked(tmp_path: Path, *lines: list[object], letters: tuple[int, ...] = ()) -> Worked:
    """The judgement of a log of two records with one key, both of which the queue `any` has done."""
    good = [
        [5, ANY, "given", 1, 4, [[0, 1], [1, 1]]],
        [6, ANY, "sent", "ack", 6, [[1, 0], [1, 1]]],
        [7, ANY, "done", "ack", 6, [[1, 0], [1, 1]]],
    ]
    path = tmp_path / "journal"
    path.write_text("".join(json.dumps(line) + "\n" for line in (*good, *lines)) + '[8, "any')
    journals = read_journals([path], lease_s=10e-9)
    return judge_queues(journals, [b"k", b"k"], letters)


def key(told: int, asked: int, token: int, at: int, *, done: bool = True) -> list[list[object]]:
    """A claim of one record of the queue `key`, and its acknowledgement."""
    pair = [[token, at]]
    given: list[object] = [told, KEY, "given", token, asked, [[at, 1]]]
    sent: list[object] = [told + 1, KEY, "sent", "ack", told, pair]
    return [given, sent, [told + 2, KEY, "done", "ack", told, pair]] if done else [given]


def test_the_judge_of_queues_sees_each_broken_promise(tmp_path: Path) -> None:
    first, second = key(1, 0, 1, 0), key(5, 4, 2, 1)
    good = worked(tmp_path, *first, *second)
    assert (good.is_good, good.given, good.acked) == (True, 4, 4), good

    assert worked(tmp_path, *first).lost == 1
    assert worked(tmp_path, *first, *second, *key(30, 30, 3, 0, done=False)).after == 1
    held = [*key(1, 0, 1, 0, done=False), *key(5, 4, 2, 0), *key(30, 29, 3, 1)]
    assert worked(tmp_path, *held).twice == 1
    late = [*key(1, 0, 1, 0, done=False), *key(11, 4, 2, 0), *key(30, 29, 3, 1)]
    assert worked(tmp_path, *late).is_good
    extended: list[object] = [9, KEY, "extended", "", 8, [[1, 0]]]
    assert worked(tmp_path, *late, extended).twice == 1
    assert worked(tmp_path, *key(1, 0, 2, 0), *key(5, 4, 1, 1)).turned == 1
    assert worked(tmp_path, *first, *second, letters=(1,)).doubled == 1
    often: list[object] = [40, ANY, "given", 0, 40, [[0, ATTEMPTS + 1]]]
    assert worked(tmp_path, *first, *second, often).problems


def test_a_journal_comes_back_as_it_was_written_without_a_line_that_is_cut_off(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    for token in (5, 7):
        journal.held(token, 1, 3)
        journal.done(token, 3, b"p0:3")
        journal.reported(token, 2, 4)
        journal.zombie(token, "lease-lost")
    journal.left(7)
    journal.close()
    with path.open("ab") as file:
        file.write(b"done 7 4 p0")

    first, second = read_leases(path)

    assert (first.token, second.token) == (5, 7)
    assert second.granted.offset == 3
    assert second.done == [(3, b"p0:3")]
    assert [commit.offset for commit in second.commits] == [4]
    assert second.zombies == ["lease-lost"]


@pytest.mark.parametrize("words", [["--workers", "1"], ["--consumers", "0"]])
def test_a_crowd_in_which_nobody_can_take_over_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)
