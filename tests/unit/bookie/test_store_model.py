"""The store against a dictionary, with restarts and crashes at any place of unsynced bytes."""

import asyncio
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from loadtest.stores import scratch
from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.messages import Status
from quorumlog.protocol.record import Run
from quorumlog.protocol.replica import AddAsked, FenceAsked
from services.bookie.space import Space
from tests.unit.bookie.support import (
    KEY,
    ME,
    add,
    assert_right,
    fence,
    ids_of,
    image,
    lose_unsynced,
    opened,
    read,
    read_lac,
    run_of,
    started,
    write_lac,
)

LEDGERS = st.sampled_from([3, 4])
HIGHEST = 60
IDS = st.one_of(
    st.tuples(st.integers(0, 40), st.integers(1, 20)).map(lambda t: range(t[0], t[0] + t[1])),
    st.tuples(st.integers(0, 20), st.integers(2, 3), st.integers(1, 10)).map(
        lambda t: range(t[0], t[0] + t[1] * t[2], t[1])
    ),
)


class StoreAgainstDictionary(RuleBasedStateMachine):
    """What was answered holds, through every restart and crash."""

    def __init__(self) -> None:
        super().__init__()
        self._scratch = scratch("ql-model-")
        self._root = self._scratch.__enter__()
        self._images = 0
        self._runner = asyncio.Runner()
        self._store = self._runner.run(self._start(self._root / "0"))
        self._held: dict[int, set[int]] = {3: set(), 4: set()}
        self._fenced: set[int] = set()
        self._lac = {3: NO_ENTRY, 4: NO_ENTRY}

    async def _start(self, directory: Path) -> Any:
        return started(directory)

    def teardown(self) -> None:
        self._runner.run(self._store.stop())
        self._runner.close()
        self._scratch.__exit__(None, None, None)

    @rule(ledger=LEDGERS, ids=IDS, recovery=st.booleans())
    def add(self, ledger: int, ids: range, recovery: bool) -> None:
        verdict = self._runner.run(add(self._store, run_of(ledger, ids), recovery=recovery))

        if ledger in self._fenced and not recovery:
            assert verdict.status is Status.FENCED
        else:
            assert verdict.status is Status.OK
            self._held[ledger] |= set(ids)
            self._lac[ledger] = max(self._lac[ledger], max(ids) - 1)

    @rule(ledger=LEDGERS, ids=IDS)
    def add_other_bytes(self, ledger: int, ids: range) -> None:
        if not set(ids) & self._held[ledger]:
            return
        run = run_of(ledger, ids, "other")

        verdict = self._runner.run(add(self._store, run, recovery=True))

        assert verdict.status is Status.CONFLICT

    @rule(ledger=LEDGERS)
    def fence(self, ledger: int) -> None:
        verdict = self._runner.run(fence(self._store, ledger))

        assert verdict.status is Status.OK
        assert verdict.last_add_confirmed == self._lac[ledger]
        self._fenced.add(ledger)

    @rule(ledger=LEDGERS, lac=st.integers(0, HIGHEST))
    def tell_lac(self, ledger: int, lac: int) -> None:
        assert self._runner.run(write_lac(self._store, ledger, lac)).status is Status.OK
        self._lac[ledger] = max(self._lac[ledger], lac)

    @rule(
        ledger=LEDGERS,
        first=st.integers(0, HIGHEST),
        span=st.integers(0, HIGHEST),
        bytes_max=st.sampled_from([1, 500, 1 << 20]),
    )
    def read(self, ledger: int, first: int, span: int, bytes_max: int) -> None:
        last = first + span

        answer = self._runner.run(read(self._store, ledger, first, last, bytes_max=bytes_max))

        assert_right(answer, ledger)
        wanted = sorted(e for e in self._held[ledger] if first <= e <= last)
        found = ids_of(answer)
        assert found == wanted[: len(found)]
        assert bool(found) == bool(wanted)
        absent = {e for low, high in answer.absent for e in range(low, high + 1)}
        assert not absent & self._held[ledger]
        if bytes_max == 1 << 20:
            assert found == wanted
            assert absent == set(range(first, last + 1)) - set(wanted)

    @rule()
    def checkpoint(self) -> None:
        self._runner.run(self._store.checkpoint())

    @rule()
    def restart(self) -> None:
        directory = self._store.directory
        self._runner.run(self._store.stop())
        self._store = self._runner.run(self._start(directory))

        assert self._store.replayed.was_clean

    @rule()
    def move_all_old_segments(self) -> None:
        space = Space(self._store, live_share_min=1.0)
        self._runner.run(space.free())
        position = self._store.index.checkpoint()

        assert position is not None
        assert min(self._store.segments.numbers()) >= position.segment - 1

    @rule()
    def lose_the_index(self) -> None:
        directory = self._store.directory
        self._runner.run(self._store.stop())
        shutil.rmtree(directory / "index")
        self._store = self._runner.run(self._start(directory))

    @rule(
        pending=st.lists(st.tuples(LEDGERS, IDS), max_size=4),
        fences=st.lists(LEDGERS, max_size=1),
        seed=st.integers(0, 2**32),
    )
    def crash(self, pending: list[tuple[int, range]], fences: list[int], seed: int) -> None:
        """Power is cut before anybody hears what became of what is pending."""
        synced = self._store.position
        maybe: dict[int, set[int]] = {3: set(), 4: set()}

        async def submit() -> None:
            answered = asyncio.Semaphore(0)
            for ledger, ids in pending:
                asked = AddAsked(ME, run_of(ledger, ids), KEY, True)
                self._store.add(asked, lambda _: answered.release())
                maybe[ledger] |= set(ids)
            for ledger in fences:
                self._store.ask(ledger, FenceAsked(ME, KEY), lambda _: answered.release())
            for _ in range(len(pending) + len(fences)):
                await answered.acquire()

        self._runner.run(submit())
        self._images += 1
        crashed = image(self._store, self._root / str(self._images))
        lose_unsynced(crashed, synced, random.Random(seed))
        self._runner.run(self._store.stop())
        self._store = self._runner.run(self._start(crashed))

        for ledger in (3, 4):
            answer = self._runner.run(read(self._store, ledger, 0, HIGHEST * 2))
            assert_right(answer, ledger)
            present = set(ids_of(answer))
            assert self._held[ledger] <= present <= self._held[ledger] | maybe[ledger]
            self._held[ledger] = present
            state = self._store.holdings.row(ledger)
            is_fenced = state is not None and state.is_fenced
            assert is_fenced or ledger not in self._fenced
            if is_fenced:
                assert ledger in self._fenced or ledger in fences
                self._fenced.add(ledger)
            lac = self._runner.run(read_lac(self._store, ledger)).last_add_confirmed
            assert lac >= self._lac[ledger]
            self._lac[ledger] = lac

    @invariant()
    def nothing_is_queued_between_steps(self) -> None:
        assert self._store.pending.bytes == 0


TestStoreAgainstDictionary = StoreAgainstDictionary.TestCase
TestStoreAgainstDictionary.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_wide_runs_with_holes_are_stored_in_pieces() -> None:
    with scratch("ql-wide-") as root:

        async def scenario() -> None:
            store = started(root / "d")
            ids = [0, 1, 2, 9_000, 20_001, 20_002]
            assert (await add(store, run_of(7, ids))).status is Status.OK
            assert (await add(store, run_of(7, ids))).status is Status.OK
            await store.checkpoint()

            answer = await read(store, 7, 0, 30_000)

            assert ids_of(answer) == ids
            assert Run(answer.run or b"").count == 6
            await store.stop()

        asyncio.run(scenario())


def test_a_directory_without_a_lock_can_be_opened_again() -> None:
    with tempfile.TemporaryDirectory() as root:
        opened(Path(root)).close()
        opened(Path(root)).close()
