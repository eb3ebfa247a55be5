"""What a row says of who may write: all that a handle or an owner needs to learn that it is over.

Whoever missed the news rereads many rows at once (rule 16a), and most of what rows hold (fragments,
keys, producers) says nothing about that.
"""

from dataclasses import dataclass

from quorumlog.protocol.log import LogMetadata, LogState
from quorumlog.protocol.metadata import State
from quorumlog.protocol.values import LedgerId, LogName, Number, Text, Version


@dataclass(frozen=True, slots=True)
class LedgerHead:
    """A ledger's row; `state` is None where there is a tombstone."""

    ledger_id: LedgerId
    version: Version
    state: State | None
    writer_id: Text | None = None


@dataclass(frozen=True, slots=True)
class LogHead:
    """A log's row; `state` is None where the log is deleted. Versions go on when the name is given
    again.
    """

    name: LogName
    version: Version
    state: LogState | None
    writer_token: Number = 0
    last_ledger: LedgerId | None = None
    """The ledger whose writer owns the log (rule 22)."""

    @classmethod
    def of(cls, log: LogMetadata) -> "LogHead":
        """The head of a whole row."""
        last = log.last_item
        return cls(
            log.name,
            log.version,
            log.state,
            log.writer_token,
            None if last is None else last.ledger_id,
        )
