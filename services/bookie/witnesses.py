"""A bookie's witnesses of the metadata database, kept across restarts (rule 18a), and its fresh
copies of ledger metadata, which no kept witness covers yet (rule 18c).

The witnesses are in one small file, replaced atomically and synced. Each line is a witness from the
metadata service, with a checksum keyed by the cluster's id. Damaged lines are ignored and logged.
"""

import logging
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from quorumlog.protocol.row_copy import ATTEMPT_BYTES, RowCopy, attempt_of, token_text
from quorumlog.wire.bodies import token_of, witness_of
from quorumlog.wire.row_copies import placed_by
from services.bookie.segments import write_durably

log = logging.getLogger(__name__)

_FILE: Final = "witnesses"


class WitnessFile:
    """The file with the witnesses of one data directory."""

    def __init__(self, directory: Path) -> None:
        """Reads nothing yet, since the directory may not exist."""
        self._path = directory / _FILE

    def load(self, cluster_id: str) -> tuple[str, ...]:
        """The valid witnesses in the file; damaged lines are logged as an error."""
        lines = self.lines()
        sound = tuple(line for line in lines if token_of(cluster_id, line) is not None)
        if len(sound) < len(lines):
            log.error("witnesses-damaged", extra={"path": str(self._path), "sound": len(sound)})
        return sound

    def lines(self) -> tuple[str, ...]:
        """The unchecked lines of the file, which may be damaged or of another cluster."""
        try:
            return tuple(self._path.read_text(encoding="ascii", errors="replace").split())
        except FileNotFoundError:
            return ()

    def keep(self, witnesses: tuple[str, ...]) -> None:
        """Durably replace the kept witnesses."""
        write_durably(self._path, "".join(f"{line}\n" for line in witnesses).encode())


FRESH_MAX: Final = 10_000
"""Maximum number of unconfirmed changes; after an index rebuild, all copies are unconfirmed."""


def witnesses_of(cluster_id: str, attempts: Iterable[bytes]) -> tuple[str, ...]:
    """The witnesses of changes of the metadata, from the changes' attempt tokens (rule 18a)."""
    return tuple(witness_of(cluster_id, token_text(attempt)) for attempt in attempts)


class FreshCopies:
    """Attempt tokens of fresh copies, in order of arrival; beyond FRESH_MAX the oldest are dropped.

    A copy is fresh until this bookie keeps a witness that covers it (rule 18c). Each exchange of
    witnesses presents the fresh copies, so a database that lacks the newest changes is noticed even
    if the processes that made these changes are gone. A confirmed copy is not presented again. A
    checkpoint writes the fresh copies; a replay of the log finds later copies.
    """

    def __init__(self, encoded: bytes = b"") -> None:
        """`encoded`: the bytes that `encode` returned for the last checkpoint."""
        starts = range(0, len(encoded), ATTEMPT_BYTES)
        self._attempts = dict.fromkeys(encoded[at : at + ATTEMPT_BYTES] for at in starts)

    def note(self, copy: RowCopy) -> None:
        """Record a new copy, as evidence of two changes: the change that made this metadata, and
        the log's change that placed the ledger without a new version of its metadata (rule 18f).
        """
        for token in (copy.name.token, placed_by(copy.body)):
            if token:
                self._attempts[attempt_of(token)] = None
                if len(self._attempts) > FRESH_MAX:
                    del self._attempts[next(iter(self._attempts))]

    def newest(self, count: int) -> Sequence[bytes]:
        """The newest tokens, which other processes are least likely to have."""
        return list(islice(reversed(self._attempts), count))

    def confirmed(self, attempts: Iterable[bytes]) -> None:
        """Forget these tokens, because kept witnesses cover them."""
        for attempt in attempts:
            self._attempts.pop(attempt, None)

    def encode(self) -> bytes:
        """The tokens as bytes, for a checkpoint."""
        return b"".join(self._attempts)
