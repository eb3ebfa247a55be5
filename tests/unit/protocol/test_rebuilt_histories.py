"""Logs made again after random histories, by what bookies hold of their ledgers' rows (rule 18f).

A log's row changes as owners, takeovers, publications and truncations change it, by the shipped transforms; each change
that gives a place also gives the ledger's row its lineage. Then the database loses the row, or goes back to an older
one. Bookies may be silent about some ledgers.
"""

import random
from dataclasses import dataclass, field, replace

import pytest

from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.log import LogMetadata, LogSettings
from quorumlog.protocol.metadata import DigestKind, Lineage
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.rebuild import Action
from quorumlog.protocol.rebuild_log import LedgerPlace, LogDecision, decide_log

QUORUM = Quorum(3, 3, 2)
CUSTOM = (("durable-stream.content-type", "text/plain"),)
SEEDS = range(1500)


@dataclass
class History:
    """What the store did, and what the ledgers' members have heard of it."""

    rng: random.Random
    row: LogMetadata = field(
        default_factory=lambda: LogMetadata(
            "events", LogSettings(QUORUM, custom=CUSTOM), created_at="2026-01-01T00:00:00Z"
        )
    )
    rows: list[LogMetadata] = field(default_factory=list)
    """Each state of the log's row."""
    places: dict[int, tuple[int, Lineage]] = field(default_factory=dict)
    records: dict[int, int] = field(default_factory=dict)
    """Of each ledger, each an entry of its own."""
    closed: set[int] = field(default_factory=set)
    published: dict[int, int] = field(default_factory=dict)
    let_go: list[int] = field(default_factory=list)
    replaced: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """By ledger, those that it has replaced (rule 27c)."""
    seq_before_last: str | None = None
    seq: int = 0
    next_id: int = 0
    now_ms: int = 100

    def ledger(self, records: int = 0) -> int:
        """The id of another ledger; ids are no order."""
        self.next_id += 1
        made = self.next_id * 7919 % 10007
        self.records[made] = records
        return made

    def commit(self, row: LogMetadata) -> None:
        """A compare-and-swap of the log's row, and what it gives to ledgers' rows."""
        named = {item.ledger_id for item in row.items}
        self.let_go += [item.ledger_id for item in self.row.items if item.ledger_id not in named]
        row = replace(row, version=row.version + 1, attempt=f"change {row.version}")
        row.check()
        fresh = {
            item.ledger_id: item.first_offset
            for item in row.items
            if item.first_offset is not None and item.ledger_id not in self.places
        }
        for ledger_id, lineage in row.lineages(fresh.keys(), self.replaced).items():
            self.places[ledger_id] = (fresh[ledger_id], lineage)
        self.row = row
        self.rows.append(row)

    def _sealed(self) -> LogMetadata:
        """The row once all its ledgers are CLOSED."""
        unsealed = [item.ledger_id for item in self.row.unsealed]
        self.closed |= set(unsealed)
        wrote = any(self.records[ledger_id] for ledger_id in unsealed)
        return self.row.with_ends(
            {ledger_id: (self.records[ledger_id], 10) for ledger_id in unsealed},
            producers=(),
            now_ms=self.now_ms,
            appended_ms=self.now_ms,
            stream_seq=f"{self.seq:04}" if self.seq and wrote else None,
        )

    def _with_next(self, row: LogMetadata) -> LogMetadata:
        """The row with a new last ledger, placed: whoever begins it knows the end before it."""
        row = row.with_ledger(self.ledger()).with_ends({}, producers=(), now_ms=self.now_ms)
        self.seq_before_last = row.stream_seq
        return row

    def append(self) -> None:
        last = self.row.last_item
        if last is not None and last.first_offset is not None and last.last_offset is None:
            self.records[last.ledger_id] += self.rng.randint(1, 5)
            self.seq += self.rng.randint(0, 1)

    def take_over(self) -> None:
        self.commit(self._with_next(self._sealed()))

    def roll(self) -> None:
        """Named ahead, then placed."""
        if self.row.last_item is None or self.row.last_item.first_offset is None:
            return
        self.commit(self.row.with_ledger(self.ledger()))
        if self.rng.random() < 0.8:
            self.append_before_last()
            last = self.row.items[-1].ledger_id
            closed = [item.ledger_id for item in self.row.unsealed if item.ledger_id != last]
            self.closed |= set(closed)
            self.commit(
                self.row.with_ends(
                    {ledger_id: (self.records[ledger_id], 10) for ledger_id in closed},
                    producers=(),
                    now_ms=self.now_ms,
                    stream_seq=f"{self.seq:04}" if self.seq else None,
                )
            )
            self.seq_before_last = self.row.stream_seq

    def append_before_last(self) -> None:
        """An append while the next ledger is only named."""
        self.records[self.row.items[-2].ledger_id] += self.rng.randint(0, 3)

    def publish(self) -> None:
        ledgers = [self.ledger(self.rng.randint(0, 4)) for _ in range(self.rng.randint(1, 3))]
        self.closed |= set(ledgers)
        row = self._sealed().with_published(
            [(ledger_id, self.records[ledger_id], 10) for ledger_id in ledgers],
            now_ms=self.now_ms,
            published_ms=self.now_ms,
        )
        self.published |= {
            item.ledger_id: item.published_ms for item in row.items if item.published_ms
        }
        self.commit(self._with_next(row))

    def truncate(self) -> None:
        row = self.row.truncated(self.rng.randint(0, self.row.known_end + 1))
        if row != self.row:
            self.commit(row)

    def rewrite(self) -> None:
        """Some adjacent ledgers, which may be rewrites."""
        may = [item for item in self.row.items if self.row.names_sealed((item,))]
        first = self.rng.randrange(len(may)) if may else 0
        items = may[first : first + self.rng.randint(1, 4)]
        if items:
            made = self.ledger(sum(self.records[item.ledger_id] for item in items))
            self.closed.add(made)
            found: list[tuple[int, int]] = []
            for item in items:
                found += self.replaced.get(item.ledger_id, ())
                found.append((item.ledger_id, item.first_offset or 0))
            self.replaced[made] = tuple(found)
            self.commit(self.row.rewritten(items, made, 10))

    def live(self) -> None:
        self.commit(self.row)
        steps = (self.append, self.append, self.take_over, self.roll, self.publish, self.truncate)
        is_rewritten = self.rng.random() < 0.5
        for _ in range(self.rng.randint(1, 30 if is_rewritten else 14)):
            self.now_ms += 10
            self.rng.choice((*steps, self.rewrite) if is_rewritten else steps)()

    def held(self, silent: set[int]) -> list[LedgerPlace]:
        """What the bookies that answer hold: nobody sent a copy of an open ledger before it had its place."""
        return [
            LedgerPlace(
                ledger_id,
                self.places[ledger_id][0] if ledger_id in self.places else None,
                (records - 1 if records else NO_ENTRY) if ledger_id in self.closed else None,
                10,
                QUORUM,
                DigestKind.CRC32C,
                self.places[ledger_id][1] if ledger_id in self.places else None,
                custom=None if ledger_id in self.published else CUSTOM,
                hides_next=bool(self.replaced) and bool(silent),
            )
            for ledger_id, records in self.records.items()
            if ledger_id not in silent and (ledger_id in self.places or ledger_id in self.closed)
        ]


def lived(seed: int) -> History:
    history = History(random.Random(f"rebuilt {seed}"))
    history.live()
    return history


def judge(history: History, decision: LogDecision, silent: set[int], gone: set[int]) -> None:
    """What is written gives no record's offset to another, and nothing is passed over."""
    true = history.row
    solid = [item for item in true.items if item.first_offset is not None]
    if not silent:
        assert decision.action in {Action.WRITE, Action.SAME, Action.WAIT}, decision.why
        assert decision.action is not Action.WAIT or not [
            one for one in solid if one.ledger_id not in gone
        ]
    row = decision.row
    if row is None:
        return
    row.check()
    names = [item.ledger_id for item in row.items]
    for item in row.items:
        if item.first_offset is not None:
            assert item.first_offset == history.places[item.ledger_id][0]
    assert row.forgotten_end >= row.known_end, "rule 26a"
    for item in solid[:-1]:
        # Each record that the log has keeps its ledger, or has an offset below what is written.
        assert item.last_offset is not None
        for offset in range(item.first_offset or 0, item.last_offset + 1):
            found = row.item_at(offset)
            is_beyond = offset >= row.known_end
            assert found is not None or offset < row.first_offset or is_beyond
            same = {item.ledger_id}
            if silent:
                # Where nobody who answers has it, what it has replaced has the same records.
                same |= {ledger_id for ledger_id, _ in history.replaced.get(item.ledger_id, ())}
            assert found is None or found.ledger_id in same - gone or is_beyond
            is_lost = item.ledger_id in history.replaced and offset < row.first_offset
            assert not is_lost, f"{offset} is taken for released"
            assert not is_beyond or silent, f"{offset} is beyond {names}"
    if silent or not solid:
        return
    assert row.first_offset <= (solid[0].first_offset or 0), "only what was let go of may come back"
    # An older row may name another ledger ahead, which is empty: who takes over closes both.
    placed = [item.ledger_id for item in row.items if item.first_offset is not None]
    assert placed[-1] == solid[-1].ledger_id
    for item in row.items:
        assert item.published_ms == history.published.get(item.ledger_id, 0), "rule 26b"
    assert row.stream_seq == history.seq_before_last, "rule 25a"
    assert row.settings.custom == CUSTOM or set(names) <= history.published.keys()


def rebuild(seed: int, *, hides: bool) -> tuple[History, LogDecision]:
    """One history and what is made of it. `hides`: nobody who answers holds some of the ledgers."""
    history = lived(seed)
    rng = history.rng
    known = rng.choice([None, *history.rows])
    silent = {one for one in history.records if hides and rng.random() < 0.2}
    # A log lets go of its first ledgers, and they are deleted in this order.
    gone = set(history.let_go[: rng.randint(0, len(history.let_go))])
    held = [one for one in history.held(silent) if one.ledger_id not in gone]
    count = QUORUM.ack_quorum if silent else 0
    decision = decide_log("events", known, held, gone, now_ms=10_000, token=1_000_000, silent=count)
    judge(history, decision, silent, gone)
    return history, decision


@pytest.mark.parametrize("hides", [False, True])
def test_a_rebuilt_log_gives_no_offset_to_another_record(*, hides: bool) -> None:
    done = dict.fromkeys(Action, 0)
    for seed in SEEDS:
        try:
            _, decision = rebuild(seed, hides=hides)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        done[decision.action] += 1

    assert done[Action.WRITE] > len(SEEDS) // 4, done
    assert not hides or done[Action.CONFLICT] + done[Action.WAIT], "some are told"


def test_these_histories_have_what_they_are_judged_for() -> None:
    histories = [lived(seed) for seed in range(200)]

    assert any(history.published for history in histories)
    assert any(history.let_go for history in histories)
    assert sum(bool(history.replaced) for history in histories) > 40
    assert any(len(each) > 4 for history in histories for each in history.replaced.values())
    assert any(history.seq_before_last for history in histories)
    assert any(item.first_offset is None for h in histories for item in h.row.items)
    # Empty ledgers are dropped from logs.
    assert any(not h.records[one] for h in histories for one in h.let_go if one in h.places)
