"""Positions and leases, a request at a time: what each changes, and what it is refused for."""

from dataclasses import replace
from typing import Any, TypeVar

import orjson
import pytest

from quorumlog import errors
from quorumlog.errors import UNKNOWN, QuorumLogError, QuorumTimeout
from quorumlog.protocol import offset_store, positions, rows
from quorumlog.protocol.offset_store import (
    AppendBatch,
    Appended,
    Asked,
    BatchesRead,
    Failed,
    OffsetStore,
    Overtaken,
    Pause,
    ReadLog,
    Reported,
    Truncate,
)
from quorumlog.protocol.positions import (
    Acquire,
    Answer,
    Commit,
    Delete,
    Look,
    Position,
    Release,
    Renew,
    Request,
    Reset,
)
from quorumlog.protocol.rows import CHANGES_MAX, Batch, Decided, FreeLog, List, Stamp
from quorumlog.wire.position_bodies import POSITION_BODIES
from quorumlog.wire.row_bodies import BadRows

E = TypeVar("E", bound=QuorumLogError)
LEASE_S = 10.0
EXPIRY_MS = 30 * positions.USE_STEP_MS


class Log:
    """One keeper whose appends are acknowledged at once, and its clock."""

    def __init__(self, batches: list[Batch[Position]] | None = None, now_s: float = 100.0) -> None:
        self.batches = batches or []
        self.now_s = now_s
        self.machine = OffsetStore(EXPIRY_MS)
        self.truncated = self.database_ms = 0

    def ask(self, *requests: Request, stamp: Stamp | None = None) -> list[Answer]:
        reported: dict[Any, Answer] = {}
        events: list[Any] = [Asked(at, request, stamp) for at, request in enumerate(requests)]
        while events:
            event = events.pop(0)
            for effect in self.machine.step(event, self.now_s, 5000, self.database_ms):
                match effect:
                    case Reported(key, answer):
                        reported[key] = answer
                    case ReadLog(start):
                        found = self.batches[start or 0 :]
                        batches = tuple(enumerate(found, start or 0))
                        events.append(BatchesRead(batches, len(self.batches)))
                    case AppendBatch(expect, batch):
                        if expect == len(self.batches):
                            self.batches.append(batch)
                            events.append(Appended())
                        else:
                            events.append(Overtaken(is_owner=True))
                    case Truncate(before):
                        self.truncated = before
                    case Pause():
                        raise AssertionError("nobody else appends meanwhile")
        return [reported[at] for at in range(len(requests))]

    def stamp(self, token: str) -> Stamp:
        """Of a change that is sent now for the first time."""
        return Stamp(token, "", len(self.batches) * CHANGES_MAX)

    def done(self, request: Request, stamp: Stamp | None = None) -> Position:
        (answer,) = self.ask(request, stamp=stamp)
        assert isinstance(answer, Position), answer
        return answer

    def refused(self, kind: type[E], request: Request, stamp: Stamp | None = None) -> E:
        (answer,) = self.ask(request, stamp=stamp)
        assert isinstance(answer, kind), answer
        assert (self.batches[-1].rows, self.batches[-1].gone) == ((), ())
        return answer


def acquire(holder: str, *, created: str = "1", offset: int = 0, first: int = 0) -> Acquire:
    return Acquire("log", "c", created, holder, int(LEASE_S * 1000), offset, first)


def commit(offset: int, token: int | None = None, **more: Any) -> Commit:
    return Commit("log", "c", more.pop("created", "1"), offset, token, **more)


def test_a_lease_is_granted_to_another_only_after_a_whole_lease_without_a_word() -> None:
    log = Log()
    held = log.done(acquire("w1"))
    log.now_s += LEASE_S - 1
    assert log.refused(errors.LeaseHeld, acquire("w2")).members["expires_in_ms"] == 1000
    log.done(Renew("log", "c", "1", held.token))
    log.now_s += LEASE_S - 1
    log.done(commit(0, held.token))  # moves nothing, and holds on
    log.now_s += LEASE_S - 1
    log.refused(errors.LeaseHeld, acquire("w2"))
    log.now_s += 1
    assert log.done(acquire("w2")).token > held.token
    log.refused(errors.LeaseLost, commit(5, held.token))
    log.refused(errors.LeaseLost, Renew("log", "c", "1", held.token))
    log.refused(errors.LeaseLost, Release("log", "c", held.token))


def test_a_lease_beyond_its_time_counts_until_another_has_it() -> None:
    log = Log()
    held = log.done(acquire("w1"))
    log.now_s += 100 * LEASE_S
    assert log.done(commit(5, held.token)).offset == 5
    log.refused(errors.LeaseHeld, acquire("w2"))  # the commit was a sign of life


def test_a_commit_without_a_token_fences_a_lease_that_is_over_and_is_refused_before() -> None:
    log = Log()
    held = log.done(acquire("w1"))
    log.refused(errors.LeaseHeld, commit(5, version=held.version))
    log.now_s += LEASE_S
    log.done(commit(5, version=held.version))
    log.refused(errors.LeaseLost, commit(6, held.token))


def test_a_later_start_of_the_same_holder_gets_the_lease_at_once_with_a_higher_token() -> None:
    log = Log()
    first = log.done(acquire("w1"))
    second = log.done(replace(acquire("w1"), started=1))
    assert second.token > first.token
    log.refused(errors.LeaseLost, commit(1, first.token))
    assert log.done(commit(1, second.token)).offset == 1


def test_the_older_of_two_workers_with_one_name_waits_as_any_other_does() -> None:
    log = Log()
    older, later = acquire("w"), replace(acquire("w"), started=2)
    old = log.done(replace(older, started=1))
    new = log.done(later)
    log.refused(errors.LeaseLost, commit(1, old.token))
    log.refused(errors.LeaseHeld, replace(older, started=1))
    log.refused(errors.LeaseHeld, older)  # does not say when it was started
    log.done(commit(1, new.token))
    log.refused(errors.LeaseHeld, later)  # another worker of the same process
    log.now_s += LEASE_S
    assert log.done(replace(older, started=1)).token > new.token


def test_a_new_keeper_waits_a_whole_lease_before_it_grants_one_that_may_be_held() -> None:
    old = Log()
    held = old.done(acquire("w1"))
    old.now_s += 1000 * LEASE_S
    new = Log(old.batches, now_s=7.0)  # another process, another clock
    new.refused(errors.LeaseHeld, acquire("w2"))
    new.now_s += LEASE_S - 0.001
    new.refused(errors.LeaseHeld, acquire("w2"))
    new.now_s += 0.001
    new.done(acquire("w2"))
    old.refused(errors.LeaseLost, commit(1, held.token))  # it was overtaken, and reads


def test_who_was_overtaken_waits_a_whole_lease_too() -> None:
    mine = Log()
    held = mine.done(acquire("w1"))
    other = Log(mine.batches)
    mine.now_s = other.now_s = mine.now_s + LEASE_S - 1
    other.done(Renew("log", "c", "1", held.token))  # which leaves no row
    mine.now_s += 2
    mine.refused(errors.LeaseHeld, acquire("w2"))
    mine.now_s += LEASE_S
    mine.done(acquire("w2"))


def test_a_position_goes_back_by_a_reset_only_which_raises_the_token() -> None:
    log = Log()
    held = log.done(acquire("w1"))
    log.done(commit(5, held.token))
    assert log.refused(errors.PositionBehind, commit(4, held.token)).members["offset"] == 5
    reset = log.done(Reset("log", "c", "1", 2))
    assert (reset.offset, reset.holder) == (2, "")
    assert reset.token > held.token
    log.refused(errors.LeaseLost, commit(6, held.token))


def test_versions_and_tokens_rise_over_a_deletion() -> None:
    log = Log()
    held = log.done(acquire("w1"))
    log.refused(errors.LeaseHeld, Delete("log", "c"))
    log.done(Release("log", "c", held.token))
    log.done(Delete("log", "c"))
    log.refused(errors.NoSuchConsumer, Look("log", "c"))
    again = log.done(acquire("w2", offset=9))
    assert (again.offset, again.token > held.token) == (9, True)
    log.refused(errors.LeaseLost, commit(10, held.token))


def test_a_position_is_of_one_creation_of_its_log() -> None:
    log = Log()
    held = log.done(acquire("w1"))
    for request in (
        commit(1, held.token, created="2"),
        acquire("w1", created="2"),
        Renew("log", "c", "2", held.token),
    ):
        log.refused(errors.LogReplaced, request)
    assert log.done(Reset("log", "c", "2", 0)).created == "2"
    log.done(acquire("w1", created="2"))


def test_a_lease_below_the_logs_beginning_is_refused_until_a_reset() -> None:
    log = Log()
    log.done(commit(3, is_new=True))
    reported = log.refused(errors.OffsetTruncated, acquire("w1", first=4))
    assert reported.members["first_offset"] == 4
    log.done(Reset("log", "c", "1", 4))
    log.done(acquire("w1", first=4))
    log.refused(errors.OffsetTruncated, Acquire("log", "new", "1", "w1", 1000, 3, 4))
    log.refused(errors.NoSuchConsumer, Look("log", "new"))


def test_a_commit_needs_the_version_that_it_names() -> None:
    log = Log()
    log.refused(errors.NoSuchConsumer, commit(1, version=1))
    made = log.done(commit(1, is_new=True))
    log.refused(errors.VersionConflict, commit(1, is_new=True))
    moved = log.done(commit(2, version=made.version))
    current = log.refused(errors.VersionConflict, commit(3, version=made.version)).members
    assert current["current"] == {"offset": 2, "version": moved.version}
    log.refused(errors.VersionConflict, Reset("log", "c", "1", 0, made.version))
    log.refused(errors.VersionConflict, Delete("log", "c", made.version))


def test_requests_of_one_batch_are_decided_one_after_the_other() -> None:
    log = Log()
    log.done(commit(0, is_new=True))
    before = len(log.batches)
    log.machine.step(Asked("x", Look("log", "c")), log.now_s, 0)  # an append is under way
    for holder in ("w1", "w2"):
        log.machine.step(Asked(holder, acquire(holder)), log.now_s, 0)
    log.batches.append(Batch())
    effects = log.machine.step(Appended(), log.now_s, 0)
    (append,) = (effect for effect in effects if isinstance(effect, AppendBatch))
    log.batches.append(append.batch)
    reported = log.machine.step(Appended(), log.now_s, 0)
    answers = {effect.key: effect.answer for effect in reported if isinstance(effect, Reported)}
    assert isinstance(answers["w1"], Position)
    assert isinstance(answers["w2"], errors.LeaseHeld)
    assert len(log.batches) == before + 2


def test_an_append_of_an_unknown_outcome_is_told_as_such_and_found_by_the_next_one() -> None:
    log = Log()
    log.done(commit(0, is_new=True))
    effects = log.machine.step(Asked("x", acquire("w1")), log.now_s, 0)
    (append,) = effects
    assert isinstance(append, AppendBatch)
    log.batches.append(append.batch)  # it is there; the answer is lost
    (reported,) = log.machine.step(Failed(QuorumTimeout("", outcome=UNKNOWN)), log.now_s, 0)
    assert isinstance(reported, Reported)
    assert isinstance(reported.answer, QuorumLogError)
    assert reported.answer.outcome == UNKNOWN
    log.refused(errors.LeaseHeld, acquire("w2"))


def test_a_request_that_is_overtaken_all_the_time_is_refused_as_not_done() -> None:
    log = Log()
    log.done(commit(0, is_new=True))
    effects = log.machine.step(Asked("x", Look("log", "c")), log.now_s, 0)
    rounds = 0
    while not (reported := [effect for effect in effects if isinstance(effect, Reported)]):
        (effect,) = effects
        event: Any = Overtaken(is_owner=True)
        if isinstance(effect, ReadLog):
            event = BatchesRead((), log.machine.end or 0)
        elif not isinstance(effect, AppendBatch):
            event = offset_store.Paused()
        effects = log.machine.step(event, log.now_s, 0)
        rounds += 1
        assert rounds < 1000
    assert isinstance(reported[0].answer, errors.EntryUnavailable)


def test_one_consumer_more_than_the_most_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "CONSUMERS_MAX", 2)
    log = Log()
    for name in ("a", "b"):
        log.done(Commit("log", name, "1", 0, is_new=True))
    log.refused(errors.TooManyConsumers, acquire("w1"))
    log.refused(errors.TooManyConsumers, commit(0, is_new=True))
    log.done(Delete("log", "a"))
    log.done(acquire("w1"))


def test_one_log_or_caller_does_not_take_all_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "LOG_CONSUMERS_MAX", 2)
    monkeypatch.setattr(positions, "CALLER_CONSUMERS_MAX", 3)
    log = Log()

    def new(name: str, consumer: str, caller: str = "") -> Commit:
        return Commit(name, consumer, "1", 0, is_new=True, caller=caller)

    log.done(new("full", "a", "greedy"))
    log.done(new("full", "b", "greedy"))
    full = log.refused(errors.TooManyConsumers, new("full", "c", "other"))
    assert "the log full" in full.detail
    log.done(new("log", "a", "greedy"))
    share = log.refused(errors.TooManyConsumers, new("log", "b", "greedy"))
    assert "this caller" in share.detail
    log.done(new("log", "b", "other"))
    log.done(Delete("full", "a"))
    log.done(new("third", "c", "greedy"))
    log.refused(errors.TooManyConsumers, Acquire("third", "d", "1", "w", 1, 0, 0, "greedy"))
    for number in range(2):
        log.done(new(f"open{number}", "a"))
        log.done(new(f"open{number}", "b"))


def test_the_consumers_of_a_deleted_log_are_freed_and_a_namesakes_are_not() -> None:
    log = Log()
    log.done(commit(0, is_new=True))
    log.done(Commit("log", "new", "2", 0, is_new=True))
    log.done(acquire("w1"))
    assert log.ask(FreeLog("log", "1")) == [()]
    log.refused(errors.NoSuchConsumer, Look("log", "c"))
    log.done(Look("log", "new"))


def expire(log: Log) -> None:
    assert log.ask(positions.Expire("log", "c")) == [()]


def test_a_consumer_expires_once_nobody_has_used_it_for_long_unless_its_lease_is_held() -> None:
    log = Log()
    log.database_ms = 1000
    made = log.done(commit(0, is_new=True))
    log.now_s += positions.GRACE_S
    assert made.used_ms == 1000
    log.database_ms += EXPIRY_MS - 1
    expire(log)
    moved = log.done(commit(1, version=made.version))
    log.database_ms += EXPIRY_MS - 1
    expire(log)
    assert log.done(Look("log", "c")) == moved
    log.done(acquire("w1"))
    log.database_ms += EXPIRY_MS
    expire(log)
    assert log.done(Look("log", "c")).used_ms == log.database_ms
    log.now_s += 2 * LEASE_S
    expire(log)
    log.done(Look("log", "c"))
    log.database_ms += EXPIRY_MS
    expire(log)
    log.refused(errors.NoSuchConsumer, Look("log", "c"))


def test_nothing_expires_while_the_databases_time_is_in_doubt() -> None:
    log = Log()
    log.database_ms = EXPIRY_MS
    log.done(commit(0, is_new=True))
    log.now_s += positions.GRACE_S
    log.database_ms = 0
    expire(log)
    log.done(Look("log", "c"))


@pytest.mark.parametrize("what", ["commit", "renewal"])
def test_a_use_counts_however_long_the_databases_time_was_in_doubt(what: str) -> None:
    log = Log()
    log.database_ms = EXPIRY_MS
    held = log.done(acquire("w1"))
    log.now_s += positions.GRACE_S
    log.database_ms = 0
    if what == "commit":
        log.done(commit(5, held.token))
    else:
        log.done(Renew("log", "c", "1", held.token))
    log.now_s += 2 * LEASE_S
    log.database_ms = 2 * EXPIRY_MS
    expire(log)
    assert log.done(Look("log", "c")).used_ms == log.database_ms


def test_after_a_standstill_of_the_cluster_users_have_an_hour_to_come_back() -> None:
    log = Log()
    log.database_ms = 1000
    made = log.done(commit(0, is_new=True))
    log.now_s += positions.GRACE_S
    later = Log(log.batches)  # after a restart
    later.database_ms = log.database_ms + 1000 * positions.USE_STEP_MS
    expire(later)
    assert later.done(Look("log", "c")) == made
    later.now_s += positions.GRACE_S
    expire(later)
    later.refused(errors.NoSuchConsumer, Look("log", "c"))


def test_a_consumer_whose_last_use_is_not_known_counts_as_used_when_that_is_asked() -> None:
    log = Log()
    made = log.done(commit(0, is_new=True))
    log.now_s += positions.GRACE_S
    assert made.used_ms == 0
    log.database_ms = 5000
    expire(log)
    assert log.done(Look("log", "c")).used_ms == 5000


def test_renewals_and_commits_that_move_nothing_are_uses() -> None:
    log = Log()
    log.database_ms = positions.USE_STEP_MS
    held = log.done(acquire("w1"))
    log.database_ms += positions.USE_STEP_MS
    assert log.done(Renew("log", "c", "1", held.token)) == held
    log.database_ms += 1
    renewed = log.done(Renew("log", "c", "1", held.token))
    assert renewed.used_ms == log.database_ms
    log.database_ms += positions.USE_STEP_MS + 1
    assert log.done(commit(0, held.token)).used_ms == log.database_ms


def test_consumers_of_all_logs_are_listed_in_pages() -> None:
    log = Log()
    for name, consumer in (("b", "x"), ("a", "y"), ("a-b", "z"), ("a", "x")):
        log.done(Commit(name, consumer, "1", 0, is_new=True))
    log.done(Delete("a-b", "z"))

    def page(after: str, limit: int) -> list[str]:
        (rows,) = log.ask(List("", after, limit))
        assert isinstance(rows, tuple)
        return ["/".join(row.key) for row in rows]

    assert page("", 9) == ["a/x", "a/y", "b/x"]
    assert page("a/x", 1) == ["a/y"]
    assert page("a/y", 9) == ["b/x"]


def test_more_requests_than_a_batch_has_go_into_the_next_one() -> None:
    log = Log()
    log.done(commit(0, is_new=True))
    (_,) = log.machine.step(Asked("x", Look("log", "c")), log.now_s, 0)
    count = CHANGES_MAX + 1
    for at in range(count):
        request = Commit("log", f"c{at}", "1", 0, is_new=True)
        assert log.machine.step(Asked(at, request), log.now_s, 0) == []
    log.batches.append(Batch())
    sizes = []
    effects = log.machine.step(Appended(), log.now_s, 0)
    while appends := [effect for effect in effects if isinstance(effect, AppendBatch)]:
        sizes.append(len(appends[0].batch.rows))
        effects = log.machine.step(Appended(), log.now_s, 0)
    assert sizes == [count - 1, 1]
    assert len({row.version for row in log.machine.state.rows.values()}) == count + 1


def test_a_log_of_many_commits_is_kept_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offset_store, "_SLACK", 50)
    monkeypatch.setattr(offset_store, "_CARRIED", 4)
    monkeypatch.setattr(offset_store, "_TRUNCATE_EVERY", 10)
    monkeypatch.setattr(offset_store, "_KEPT_RECORDS", 20)
    log = Log()
    for at in range(20):
        log.done(Commit("log", f"idle{at}", "1", 7, is_new=True))
    busy = log.done(commit(0, is_new=True))
    for offset in range(1, 500):
        busy = log.done(commit(offset, version=busy.version))
    assert len(log.batches) - log.truncated < 150
    fresh = positions.Positions()
    for offset, batch in enumerate(log.batches):
        if offset >= log.truncated:
            fresh.fold(offset, batch)
    assert dict(fresh.rows) == dict(log.machine.state.rows)


def test_batches_requests_and_answers_come_back_as_they_were() -> None:
    row = Position("log", "c", "2026", 5, 7, 6, "w", 1000, 99)
    decided: tuple[Decided[Position], ...] = (
        Decided("t1", "c", row),
        Decided("t2", "c", replace(row, version=6)),
        Decided("t3", "c", "lease-held"),
    )
    batch = Batch((row,), (("log", "d"),), decided)
    assert POSITION_BODIES.decode_batch(POSITION_BODIES.encode_batch(batch)) == batch
    assert POSITION_BODIES.decode_batch(POSITION_BODIES.encode_batch(Batch())) == Batch()
    requests: list[Request] = [
        Look("log", "c"),
        List("log", "", 9),
        commit(1, 2, version=3),
        acquire("w"),
        Renew("log", "c", "1", 4),
        Release("log", "c", 4),
        Reset("log", "c", "1", 0),
        Delete("log", "c", 1),
    ]
    stamped = [(request, Stamp("t", "c", 5)) for request in requests]
    assert POSITION_BODIES.decode_requests(POSITION_BODIES.encode_requests(stamped)) == stamped
    plain = [(request, None) for request in requests]
    assert POSITION_BODIES.decode_requests(POSITION_BODIES.encode_requests(plain)) == plain
    refusal = errors.LeaseHeld("no", log="log", expires_in_ms=5)
    document = POSITION_BODIES.encode_answers([row, (row,), (), refusal], 17)
    (one, some, none, error), version = POSITION_BODIES.decode_answers(orjson.dumps(document))
    assert version == 17
    assert (one, some, none) == (row, (row,), ())
    assert isinstance(error, errors.LeaseHeld)
    assert error.members["expires_in_ms"] == 5


@pytest.mark.parametrize(
    "data", [b"", b"1", b"{}", b'{"v":2}', b'{"v":1,"rows":[[1]]}', b'{"v":1,"gone":[1]}']
)
def test_a_record_that_is_none_of_ours_is_told(data: bytes) -> None:
    with pytest.raises(BadRows):
        POSITION_BODIES.decode_batch(data)


# --- changes that count once (rule 32) ------------------------------------------------------------


def test_a_copy_of_a_change_gets_the_first_answer_though_other_changes_came_between() -> None:
    log = Log()
    log.done(commit(0, is_new=True))
    first, other = log.stamp("first"), log.stamp("other")
    a = log.done(Reset("log", "c", "1", 3), first)
    b = log.done(Reset("log", "c", "1", 7), other)
    assert log.done(Reset("log", "c", "1", 3), first) == a
    assert log.done(Look("log", "c")) == b
    fresh = Log(log.batches)
    assert fresh.done(Reset("log", "c", "1", 3), first) == a
    assert fresh.done(Look("log", "c")) == b


def test_a_late_copy_of_a_grant_does_not_fence_its_holder() -> None:
    log = Log()
    log.done(commit(0, is_new=True))
    stamp = log.stamp("w1")
    held = log.done(acquire("w1"), stamp)
    assert log.done(acquire("w1"), stamp) == held
    log.done(commit(5, held.token))
    assert log.done(acquire("w1"), stamp).token == held.token
    log.done(commit(6, held.token))


def test_a_copy_of_a_request_that_was_refused_is_refused_too() -> None:
    log = Log()
    log.done(acquire("w1"))
    stamp = log.stamp("w2")
    log.refused(errors.LeaseHeld, acquire("w2"), stamp)
    log.now_s += LEASE_S
    (again,) = log.ask(acquire("w2"), stamp=stamp)
    assert isinstance(again, errors.LeaseHeld)
    assert log.done(Look("log", "c")).holder == "w1"


def test_a_consumer_that_was_made_again_is_not_deleted_by_a_late_copy() -> None:
    log = Log()
    log.done(commit(0, is_new=True))
    stamp = log.stamp("gone")
    log.done(Delete("log", "c"), stamp)
    made = log.done(commit(4, is_new=True), log.stamp("new"))
    log.done(Delete("log", "c"), stamp)
    assert log.done(Look("log", "c")) == made


def test_a_change_whose_sender_knows_no_version_is_refused_with_one_and_was_never_done() -> None:
    log = Log()
    reported = log.ask(acquire("w1"), stamp=Stamp("t", "", 0))[0]
    assert isinstance(reported, errors.RequestOutdated)
    assert reported.outcome == errors.NOT_DONE
    log.done(acquire("w1"), Stamp("t", "", reported.members["version"]))
    ahead = log.ask(acquire("w1"), stamp=Stamp("t2", "", 1 << 40))[0]
    assert isinstance(ahead, errors.RequestOutdated)


def test_a_forgotten_change_is_refused_and_a_newer_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "REMEMBERED_MAX", 2)
    log = Log()
    log.done(commit(0, is_new=True))
    stamp = log.stamp("old")
    done = log.done(Reset("log", "c", "1", 1), stamp)
    for number in (2, 3):
        assert log.done(Reset("log", "c", "1", number), log.stamp(str(number))).offset == number
    reported = log.ask(Reset("log", "c", "1", 1), stamp=stamp)[0]
    assert isinstance(reported, errors.RequestOutdated)
    assert reported.outcome == UNKNOWN
    assert reported.members["version"] > done.version
    fresh = Log(log.batches)
    assert isinstance(fresh.ask(Reset("log", "c", "1", 1), stamp=stamp)[0], errors.RequestOutdated)
    assert fresh.done(Look("log", "c")).offset == 3


def test_a_key_of_another_request_is_refused() -> None:
    log = Log()
    log.done(commit(0, is_new=True))
    stamp = log.stamp("key")
    log.done(Reset("log", "c", "1", 3), stamp)
    other = log.ask(Reset("log", "c", "1", 4), stamp=replace(stamp, content="other"))[0]
    assert isinstance(other, errors.InvalidRequest)


def test_who_was_overtaken_and_is_not_the_owner_hands_everything_back() -> None:
    log = Log()
    log.done(commit(0, is_new=True))
    log.machine.step(Asked("first", Reset("log", "c", "1", 3)), log.now_s, 0)
    log.machine.step(Asked("queued", Reset("log", "c", "1", 4)), log.now_s, 0)
    reported = log.machine.step(Overtaken(), log.now_s, 0)
    assert [effect.key for effect in reported if isinstance(effect, Reported)] == [
        "first",
        "queued",
    ]
    for effect in reported:
        assert isinstance(effect, Reported)
        assert isinstance(effect.answer, errors.NotTheOwner)
        assert effect.answer.outcome == errors.NOT_DONE
