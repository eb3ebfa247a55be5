"""A bookie of the explored world: the replica that ships on a disk that syncs at once."""

from typing import assert_never

from quorumlog.protocol.ids import member_of
from quorumlog.protocol.messages import (
    AddAnswered,
    Event,
    FenceAnswered,
    ReadAnswered,
    RowAnswered,
    SendAdd,
    SendFence,
    SendRead,
    SendRow,
)
from quorumlog.protocol.replica import FenceAsked, ReadAsked, Replica, Verdict
from tests.support.replicas import HeldEntries, add_asked, ask, memory_replica, row_told


class ModelBookie:
    """One bookie. `held` are the ids that it ever held, lost ones included."""

    def __init__(self, name: str, incarnation: int, replica: Replica, held: frozenset[int]) -> None:
        self.name = name
        self.incarnation = incarnation
        self.replica = replica
        self.held = held

    @classmethod
    def new(cls, name: str) -> "ModelBookie":
        """A bookie that has never seen the ledger."""
        return cls(name, 1, memory_replica(member_of(name, 1)), frozenset())

    def copy(self) -> "ModelBookie":
        return ModelBookie(self.name, self.incarnation, self.replica.copy(), self.held)

    def key(self) -> tuple[object, ...]:
        return (self.name, self.incarnation, self.held, self.replica.key())

    def answer(self, asked: SendAdd | SendFence | SendRead | SendRow) -> Event:
        """Judge a request and answer it; all is on disk at once."""
        match asked:
            case SendAdd(position, member, generation, run):
                verdict = ask(self.replica, add_asked(asked))
                event: Event = AddAnswered(
                    position, member, generation, run.first, run.last, verdict.status
                )
            case SendFence(position, member):
                verdict = ask(self.replica, FenceAsked(member, asked.ledger_key))
                event = FenceAnswered(position, member, verdict.status, verdict.last_add_confirmed)
            case SendRead(position, member, _, first, last):
                verdict = ask(
                    self.replica,
                    ReadAsked(member, first, last, asked.fence, asked.ledger_key, asked.from_disk),
                )
                event = ReadAnswered(
                    position,
                    member,
                    first,
                    last,
                    verdict.status,
                    self._entries.run(verdict.present),
                    verdict.absent,
                )
            case SendRow(member, row):
                verdict = ask(self.replica, row_told(asked))
                event = RowAnswered(member, row.version, verdict.status)
            case _:
                assert_never(asked)
        self._sync(verdict)
        return event

    def _sync(self, verdict: Verdict) -> None:
        self.replica.synced(self.replica.accepted_count)
        assert verdict.after <= self.replica.synced_count
        self.replica.check()
        self.held = self.held.union(self._entries.entries)

    @property
    def _entries(self) -> HeldEntries:
        assert isinstance(self.replica.holdings, HeldEntries)
        return self.replica.holdings

    def delete(self) -> None:
        """It gives the ledger up on a tombstone: the id stays (rule 16a)."""
        self._sync(self.replica.delete())

    def lose_all(self) -> None:
        """The disk is lost: the bookie comes back as its next incarnation with nothing."""
        self.incarnation += 1
        self.replica = memory_replica(member_of(self.name, self.incarnation))

    def ever_held(self, entry_id: int) -> bool:
        """Whether an entry was ever durable here: a lost disk is no fault of the protocol."""
        return entry_id in self.held
