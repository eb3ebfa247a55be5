"""A bookie's witnesses of the metadata database, kept over restarts (rule 18a).

One small file, replaced atomically and synced. Its lines are witnesses as the metadata service made
them: each has its own checksum, keyed by the cluster's id. A damaged line is ignored and logged.
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
