"""Bookies that lose state, and what they do about it: a new incarnation, limbo, and its end.

The rules are the shipped ones (`protocol/limbo.py`, `Replica.enter_limbo`), and each step is judged by
a count of our own (I27).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quorumlog.protocol import limbo
from quorumlog.protocol.ids import member_incarnation, member_name
from quorumlog.protocol.messages import (
    AddAnswered,
    Event,
    MissedRange,
    SendAdd,
    SendFence,
    SendRead,
    SendRow,
)
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.protocol.rebuild import Held
from quorumlog.protocol.repair import FragmentRange, fragment_ranges
from quorumlog.protocol.replica import RowKept
from quorumlog.protocol.row_copy import RowName
from tests.model.sim.bookie import Answer, SimBookie, faultless
from tests.support import invariants
from tests.support.replicas import memory_replica

if TYPE_CHECKING:
    from tests.model.sim.world import World


class LosingBookie(SimBookie):
    """A bookie that marks what it may have lost before it serves again."""

    world: "World"

    def __init__(self, name: str, world: "World") -> None:
        super().__init__(name, world)
        self._registered = self.incarnation
        self._is_waiting = False
        self._is_emptied = False
        """Nothing is left of the directory, its cookie included."""

    def be(self, incarnation: int) -> None:
        super().be(incarnation)
        self._registered = incarnation
        self.world.store.put_cookie(self.name, incarnation)

    def fall(self, kind: str) -> None:
        super().fall(kind)
        self._is_emptied |= kind == "wipe"

    def restart(self) -> None:
        """Start again; phase one needs the metadata service."""
        if self.is_up:
            return
        if self.world.store.is_down and not self._is_early:
            self._is_waiting = True
            self.world.after(100_000, self.restart)
            return
        self._is_waiting = False
        if self._is_early:
            # Rule 15b, clause 3, is for histories that nobody who lives knows of: a writer would send its metadata to
            # the new directory, which would pass for the old one (docs/internals/not-covered.md; seed 410905).
            self.world.restores.restart_who_knows()
        self._register()
        super().restart()
        self._registered = self.incarnation
        self._enter_limbo()

    @property
    def _is_early(self) -> bool:
        """Whether an empty directory registers with a store that went back before anybody knows of that."""
        world = self.world
        return self._is_emptied and world.restores.is_unnoticed and not world.store.is_away

    def _register(self) -> None:
        """As a new incarnation where something may be lost: all that counts then is what the store knows (rule 15b)."""
        store = self.world.store
        if self.may_lack:
            known = 0 if self._is_emptied else self._registered
            self.incarnation = store.register(self.name, known, self.world.now)
            self._is_emptied = False
        store.put_cookie(self.name, self.incarnation)

    # --- what a rebuild is told (rule 18d) ------------------------------------------------------

    @property
    def is_telling(self) -> bool:
        """Whether it answers a rebuild. A bookie that waits for its cluster does, unless its disk is a new one."""
        return self.is_up or (self._is_waiting and (bool(self.log) or not self.may_lack))

    @property
    def may_lack(self) -> bool:
        """Whether it may have lost what it acknowledged, and metadata has not heard of that."""
        return self.incarnation != self._registered

    def held(self, rows: Mapping[RowName, LedgerMetadata]) -> Iterator[Held]:
        """What it holds of the ledger, on its disk or deferred; nothing where it has not heard of it. `rows`: what
        copies are of.
        """
        is_all_held = not self.is_up or self.replica.is_deferred
        records = self.log if is_all_held else self.log[: self.synced]
        if records:
            keys = (getattr(record, "ledger_key", b"") for record in records)
            copies = {record.row.name for record in records if isinstance(record, RowKept)}
            yield Held(
                self.member,
                next(filter(None, keys), b""),
                rows=tuple(replace(rows[name], ledger_key=b"") for name in sorted(copies)),
                is_limbo=self.replica.is_limbo,
            )

    def _enter_limbo(self) -> None:
        row = self.world.store.row
        if limbo.older_members(row, self.member):
            is_fenced = row.state is not State.OPEN
            verdict = self.replica.enter_limbo(row.ledger_key, is_fenced=is_fenced)
            self.log.extend(verdict.records)
            self.synced = len(self.log)
            self.replica.synced(self.synced - self._base)
        is_marked = self.replica.is_limbo and (self.replica.is_fenced or row.state is State.OPEN)
        faultless(
            invariants.limbo_is_marked(
                self.member, may_have_lost=self._may_have_lost(), is_marked=is_marked
            )
        )

    def _may_have_lost(self) -> bool:
        """Whether metadata places something at an older incarnation: a look of our own."""
        return any(
            member_name(member) == self.name and member_incarnation(member) < self.incarnation
            for fragment in self.world.store.row.fragments
            for member in fragment.bookies
        )

    def try_to_end_limbo(self) -> None:
        """Leave limbo if all is here that should be."""
        row = self.world.store.row
        if not self.is_up or not self.replica.is_limbo or limbo.older_members(row, self.member):
            return
        if any(self._lacking()):
            return
        verdict = self.replica.set_limbo(limbo=False)
        self.log.extend(verdict.records)
        self._sync()
        self.world.note(self.member, "leaves limbo")
        lacking = [
            entry_id
            for entry_id in range(self._end() + 1)
            for _, member in row.members_of(entry_id)
            if member == self.member and entry_id not in self._held.entries
        ]
        is_older_named = self._may_have_lost()
        faultless(invariants.limbo_ends_whole(self.member, lacking, is_older_named=is_older_named))

    def _end(self) -> int:
        """The last entry of closed fragments."""
        row = self.world.store.row
        return row.last_fragment.first_entry - 1 if row.last_entry is None else row.last_entry

    def _lacking(self) -> Iterator[tuple[int, int]]:
        row = self.world.store.row
        for position, first, last in limbo.expected(row, self.member):
            if first <= last:
                held = self._held.present(first, last)
                yield from limbo.lacking(row, position, first, last, held)

    def wanted(self) -> Iterator[tuple[str, str, FragmentRange]]:
        """What repair has to do so that limbo can end: leaving member, target, and where."""
        row = self.world.store.row
        if not self.replica.is_limbo:
            return
        for member in limbo.older_members(row, self.member):
            for index, fragment in enumerate(row.fragments):
                if member in fragment.bookies:
                    last = row.fragment_last(index)
                    assert last is not None, "L1 was judged"
                    yield member, self.member, FragmentRange(fragment.first_entry, 0, last)
            return
        for first, last in self._lacking():
            for part in fragment_ranges(row, MissedRange(self.member, first, last)):
                yield self.member, self.member, part


class DeferringBookie(LosingBookie):
    """A bookie that acknowledges entries before they are synced (rule 31): any stop that is not in
    order makes a new incarnation. Who is killed loses what was queued, as without power.
    """

    def __init__(self, name: str, world: "World") -> None:
        super().__init__(name, world)
        self.replica = memory_replica(self.member, is_deferred=True)

    def receive(self, asked: SendAdd | SendFence | SendRead | SendRow, answer: Answer) -> None:
        """What is acknowledged counts as held from then on."""
        known = len(self.log)
        super().receive(asked, answer)
        self._report(self.log[known:])  # before anybody hears: every answer takes its time

    def crash(self, kind: str) -> None:
        """Each crash may lose copies: no more of them than an ack quorum survives."""
        if (kind != "wipe" and not self.is_up) or not self.world.may_lose_a_copy():
            return
        if kind != "wipe":
            del self.log[self.world.rng.randint(self.synced, len(self.log)) :]
            self.incarnation += 1
            kind = "kill"
        self.fall(kind)

    def restart(self) -> None:
        """What is left of the log is the new incarnation's."""
        was_up = self.is_up
        super().restart()
        if self.is_up and not was_up:
            self.replica.is_deferred = True
            damaged = set(self.damaged)
            self._report(self.log)
            self.damaged = damaged

    def _check_answer(self, event: Event, *rest: Any) -> None:
        if not isinstance(event, AddAnswered):
            super()._check_answer(event, *rest)
