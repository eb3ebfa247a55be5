"""What a bookie remembers of the metadata's database, over its restarts (rule 18a).

One small file, replaced whole and synced. Its lines are witnesses as the metadata service made them:
each carries its own checksum, under the cluster's id. A line that is damaged counts for nothing, and
is told.
"""

import logging
from pathlib import Path
from typing import Final

from quorumlog.wire.witnesses import token_of
from services.bookie.segments import write_durably

log = logging.getLogger(__name__)

_FILE: Final = "witnesses"


class WitnessFile:
    """The file of one data directory."""

    def __init__(self, directory: Path) -> None:
        """Nothing is read yet: the directory may not be there."""
        self._path = directory / _FILE

    def load(self, cluster_id: str) -> tuple[str, ...]:
        """What was kept last."""
        try:
            lines = self._path.read_text(encoding="ascii", errors="replace").split()
        except FileNotFoundError:
            return ()
        sound = tuple(line for line in lines if token_of(cluster_id, line) is not None)
        if len(sound) < len(lines):
            log.error("witnesses-damaged", extra={"path": str(self._path), "sound": len(sound)})
        return sound

    def keep(self, witnesses: tuple[str, ...]) -> None:
        """Replace what was kept; on disk when it returns."""
        write_durably(self._path, "".join(f"{line}\n" for line in witnesses).encode())
