"""Files that a process looks at again: what changes in them is taken without a restart."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

LOOK_S: Final = 2.0
"""How often files are looked at (taste)."""

Stamp = tuple[int, int, int]


def stamp_of(path: Path) -> Stamp | None:
    """Differs once a file, its place or its permissions have changed; None where there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    # Not the time of modification, which a copy may keep, and a new mode does not change.
    return found.st_ctime_ns, found.st_ino, found.st_size


class Followed:
    """Files that belong together."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """The files as they are now count as known."""
        self._paths = tuple(paths)
        self._seen = self._known = self._stamps()

    def have_changed(self) -> bool:
        """Whether the files have changed, and not since the last look: by then all of them are written. Each change
        is told once.
        """
        found = self._stamps()
        was_seen, self._seen = found == self._seen, found
        if not was_seen or found == self._known:
            return False
        self._known = found
        return True

    def _stamps(self) -> tuple[Stamp | None, ...]:
        return tuple(map(stamp_of, self._paths))
