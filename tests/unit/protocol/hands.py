"""A machine driven by hand: one event at a time, its invariants checked after each."""

from typing import Protocol, TypeVar

from quorumlog.protocol.messages import (
    AddAnswered,
    Effect,
    Event,
    ReadAnswered,
    SendAdd,
    SendRead,
    Status,
    UpdateMetadata,
)
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata, State
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.record import Codec, Run, make

CODEC = Codec(DigestKind.CRC32C)
B1, B2, B3, B4, B5 = (f"b{n}@1" for n in range(1, 6))
E = TypeVar("E")


class Machine(Protocol):
    def step(self, event: Event) -> list[Effect]: ...
    def check(self) -> None: ...
    def key(self) -> tuple[object, ...]: ...


def ledger(
    e: int = 3,
    qw: int = 3,
    qa: int = 2,
    *,
    fragments: tuple[tuple[int, tuple[str, ...]], ...] | None = None,
    state: State = State.OPEN,
    last_entry: int | None = None,
    length: int | None = None,
    version: int = 1,
    declared_lost: tuple[str, ...] = (),
) -> LedgerMetadata:
    given = fragments or ((0, (B1, B2, B3, B4, B5)[:e]),)
    return LedgerMetadata(
        ledger_id=7,
        quorum=Quorum(e, qw, qa),
        digest=DigestKind.CRC32C,
        fragments=tuple(Fragment(first, bookies) for first, bookies in given),
        version=version,
        state=state,
        last_entry=last_entry,
        length=length,
        declared_lost=declared_lost,
    )


def run_of(*payloads: bytes, first: int = 0, lac: int = -1, before: int = 0) -> Run:
    return make(
        ledger_id=7,
        first_entry=first,
        last_add_confirmed=lac,
        length_before=before,
        payloads=payloads,
        codec=CODEC,
    )


class Hand:
    """Steps a machine; keeps what the last step asked for, and in `keep` what tests need of it later."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.out: list[Effect] = []

    def do(self, event: Event) -> list[Effect]:
        self.out = self.machine.step(event)
        self.machine.check()
        hash(self.machine.key())
        self.keep()
        return self.out

    def keep(self) -> None:
        """Nothing, unless a test's hand overrides it."""

    def all(self, kind: type[E]) -> list[E]:
        return [effect for effect in self.out if isinstance(effect, kind)]

    def one(self, kind: type[E]) -> E:
        found = self.all(kind)
        assert len(found) == 1, f"one {kind.__name__} expected in {self.out}"
        return found[0]

    def none(self, *kinds: type) -> None:
        assert not [effect for effect in self.out if isinstance(effect, kinds)], self.out


def answer(add: SendAdd, status: Status = Status.OK) -> AddAnswered:
    return AddAnswered(
        add.position, add.member, add.generation, add.run.first, add.run.last, status
    )


def reply(
    read: SendRead, run: Run | None = None, *absent: int, status: Status = Status.OK
) -> ReadAnswered:
    ranges = tuple((entry_id, entry_id) for entry_id in absent)
    return ReadAnswered(read.position, read.member, read.first, read.last, status, run, ranges)


def applied(update: UpdateMetadata) -> LedgerMetadata:
    """The row after a compare-and-swap succeeded."""
    from dataclasses import replace

    return replace(update.metadata, version=update.metadata.version + 1)
