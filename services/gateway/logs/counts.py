"""What the logs of a gateway have done."""

from dataclasses import dataclass

from quorumlog.protocol.log.messages import LogAppended


@dataclass(slots=True)
class Counts:
    """What was done here, since the start."""

    requests: int = 0
    records: int = 0
    duplicates: int = 0
    takeovers: int = 0

    def add(self, done: LogAppended) -> None:
        """One append was acknowledged by an owner in this process."""
        self.requests += 1
        if done.is_duplicate:
            self.duplicates += 1
        else:
            self.records += done.last_offset - done.first_offset + 1
