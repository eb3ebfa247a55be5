"""Copies of rows that none of this bookie's witnesses stands for yet (rule 18c).

A copy that was confirmed once needs no other look: the witnesses that the bookie keeps stand for it from then on
(rule 18a). The others are told with the next exchange of witnesses, so that a database which lacks the newest changes
is found out though all processes that had heard of them are gone. A checkpoint writes them; a replay of the log finds
those that came later.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

from quorumlog.protocol.row_copy import ATTEMPT_BYTES, RowCopy, attempt_of, token_text
from quorumlog.wire.row_copies import placed_by
from quorumlog.wire.witnesses import witness_of

FRESH_MAX: Final = 10_000
"""Copies that wait for their first confirmation: an index that is rebuilt knows of none that it was confirmed."""


def witnesses_of(cluster_id: str, attempts: Iterable[bytes]) -> tuple[str, ...]:
    """The witnesses that copies are of the changes that made their rows (rule 18a)."""
    return tuple(witness_of(cluster_id, token_text(attempt)) for attempt in attempts)


class FreshCopies:
    """The changes of the fresh copies, in the order in which they came. At most FRESH_MAX: the oldest go."""

    def __init__(self, encoded: bytes = b"") -> None:
        """Starts from what a checkpoint wrote."""
        starts = range(0, len(encoded), ATTEMPT_BYTES)
        self._attempts = dict.fromkeys(encoded[at : at + ATTEMPT_BYTES] for at in starts)

    def note(self, copy: RowCopy) -> None:
        """A copy came. It is of the change that made its row, and of that of the log that placed the ledger: an open
        ledger's row gets no version by that (rule 18b).
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
