"""A bookie of the stage whose disk loses what was not synced when the power goes."""

from collections.abc import Iterator

from quorumlog.protocol import limbo
from quorumlog.protocol.ids import member_of
from quorumlog.protocol.messages import SendAdd
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.protocol.replica import Replica, ReplicaRecord, Verdict
from tests.model.explore.bookies import ModelBookie
from tests.support.replicas import add_asked, ask, memory_replica, replay


class DiskBookie(ModelBookie):
    """Its log reaches the disk when an answer waits for it, and when somebody syncs. Where entries
    are deferred no answer to an add waits (rule 31).
    """

    def __init__(self, name: str, *, is_deferred: bool) -> None:
        first = memory_replica(member_of(name, 1), is_deferred=is_deferred)
        super().__init__(name, 1, first, frozenset())
        self._is_deferred = is_deferred
        self._log: list[ReplicaRecord] = []
        self._on_disk = 0

    def _sync(self, verdict: Verdict) -> None:
        self._log.extend(verdict.records)
        if verdict.after > self.replica.synced_count:
            self.sync()
        self.replica.check()

    def sync(self) -> None:
        """All that it was told is on disk."""
        self._on_disk = len(self._log)
        self.replica.synced(self.replica.accepted_count)

    def take(self, asked: SendAdd) -> None:
        """It has an add in its memory; neither disk nor client hear of it yet."""
        self._log.extend(ask(self.replica, add_asked(asked)).records)

    def lose_power(self, row: LedgerMetadata) -> str:
        """It starts again with what is on disk; says how much that is. One that deferred entries is
        its next incarnation, and marks what it may have lost before it serves.
        """
        reported = len(self._log)
        self.incarnation += self._is_deferred
        self._begin(self._log[: self._on_disk])
        me = self.replica.me
        was_fenced = ", fenced" if self.replica.is_fenced else ""
        left = f"{me} starts with {len(self._log)} of {reported} records{was_fenced}"
        if limbo.older_members(row, me):
            is_fenced = row.state is not State.OPEN
            self._sync(self.replica.enter_limbo(row.ledger_key, is_fenced=is_fenced))
            self.sync()
        return left

    def drop_copy(self) -> str:
        """It gives the entries up, as after a proof that they are not its own (rule 16)."""
        self._sync(self.replica.drop())
        self.sync()
        self._begin(self._log)  # the fence outlasts a restart
        return f"{self.replica.me} keeps {int(self.replica.is_fenced)} fence"

    def _begin(self, log: list[ReplicaRecord]) -> None:
        me = member_of(self.name, self.incarnation)
        self._log, self._on_disk = log, len(log)
        self.replica: Replica = replay(me, log, is_deferred=self._is_deferred)

    def end_limbo(self, row: LedgerMetadata) -> str:
        """It leaves limbo if all is here that should be; says why not."""
        me = self.replica.me
        older = limbo.older_members(row, me)
        lacking = tuple(self._lacking(row))
        if older or lacking:
            why = f"{', '.join(older)} is named" if older else f"it lacks {list(lacking)}"
            return f"{me} stays in limbo: {why}"
        self._sync(self.replica.set_limbo(limbo=False))
        self.sync()
        return f"{me} leaves limbo"

    def _lacking(self, row: LedgerMetadata) -> Iterator[tuple[int, int]]:
        for position, first, last in limbo.expected(row, self.replica.me):
            if first <= last:
                held = self._entries.present(first, last)
                yield from limbo.lacking(row, position, first, last, held)
