"""Heads of metadata: the fields that show whether a ledger's writer or a log's owner must end.

A gateway reads the heads of many ledgers and logs at once after a gap in its stream of changes
(rule 16a). Heads contain no fragments, keys or producers.
"""

from dataclasses import dataclass

from quorumlog.protocol.log import LogMetadata, LogState
from quorumlog.protocol.metadata import State
from quorumlog.protocol.values import LedgerId, LogName, Number, Text, Version


@dataclass(frozen=True, slots=True)
class LedgerHead:
    """The head of a ledger's metadata; `state` is None if the ledger has a tombstone."""

    ledger_id: LedgerId
    version: Version
    state: State | None
    writer_id: Text | None = None


@dataclass(frozen=True, slots=True)
class LogHead:
    """The head of a log's metadata; `state` is None if the log is deleted. If the name is used
    again, the new log's versions continue the old log's.
    """

    name: LogName
    version: Version
    state: LogState | None
    writer_token: Number = 0
    last_ledger: LedgerId | None = None
    """The ledger whose writer owns the log (rule 22)."""

    @classmethod
    def of(cls, log: LogMetadata) -> "LogHead":
        """The head of a log's complete metadata."""
        last = log.last_item
        return cls(
            log.name,
            log.version,
            log.state,
            log.writer_token,
            None if last is None else last.ledger_id,
        )
