"""A bookie's witnesses of the metadata database, kept over restarts (rule 18a), and its copies of ledger metadata for
which no witness stands yet (rule 18c).

One small file, replaced atomically and synced. Its lines are witnesses as the metadata service made
them: each has its own checksum, keyed by the cluster's id. A damaged line is ignored and logged.
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
    """The file of one data directory."""

    def __init__(self, directory: Path) -> None:
        """Reads nothing yet: the directory may not exist."""
        self._path = directory / _FILE

    def load(self, cluster_id: str) -> tuple[str, ...]:
        """The witnesses kept last."""
        lines = self.lines()
        sound = tuple(line for line in lines if token_of(cluster_id, line) is not None)
        if len(sound) < len(lines):
            log.error("witnesses-damaged", extra={"path": str(self._path), "sound": len(sound)})
        return sound

    def lines(self) -> tuple[str, ...]:
        """What the file has, of whatever cluster; not checked."""
        try:
            return tuple(self._path.read_text(encoding="ascii", errors="replace").split())
        except FileNotFoundError:
            return ()

    def keep(self, witnesses: tuple[str, ...]) -> None:
        """Replace the kept witnesses; on disk when it returns."""
        write_durably(self._path, "".join(f"{line}\n" for line in witnesses).encode())


FRESH_MAX: Final = 10_000
"""Copies that wait for their first confirmation: an index that is rebuilt knows of none that it was confirmed."""


def witnesses_of(cluster_id: str, attempts: Iterable[bytes]) -> tuple[str, ...]:
    """The witnesses that copies are of the changes that made their rows (rule 18a)."""
    return tuple(witness_of(cluster_id, token_text(attempt)) for attempt in attempts)


class FreshCopies:
    """The changes of fresh copies, in the order in which they came. At most FRESH_MAX: the oldest go.

    A copy is fresh while none of this bookie's witnesses stands for it (rule 18c). The next exchange of witnesses presents
    fresh copies, so a database that lacks the newest changes is found out though all processes that knew of them are
    gone. A copy that was confirmed once is not presented again. A checkpoint writes the fresh copies; a replay of the log
    finds those that came later.
    """

    def __init__(self, encoded: bytes = b"") -> None:
        """Starts from what a checkpoint wrote."""
        starts = range(0, len(encoded), ATTEMPT_BYTES)
        self._attempts = dict.fromkeys(encoded[at : at + ATTEMPT_BYTES] for at in starts)

    def note(self, copy: RowCopy) -> None:
        """A copy came. It is of the change that made its row, and of that of the log that placed the ledger: an open
        ledger's row gets no version by that (rule 18f).
        """
        for token in (copy.name.token, placed_by(copy.body)):
            if token:
                self._attempts[attempt_of(token)] = None
                if len(self._attempts) > FRESH_MAX:
                    del self._attempts[next(iter(self._attempts))]

    def newest(self, count: int) -> Sequence[bytes]:
        """The attempts of the newest ones, of which others are least likely to know."""
        return list(islice(reversed(self._attempts), count))

    def confirmed(self, attempts: Iterable[bytes]) -> None:
        """Witnesses that are kept stand for these."""
        for attempt in attempts:
            self._attempts.pop(attempt, None)

    def encode(self) -> bytes:
        """What a checkpoint writes."""
        return b"".join(self._attempts)
