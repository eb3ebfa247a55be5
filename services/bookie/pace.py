"""How fast work in the background may go, and whether it may go on at all.

Scrubbing and compaction share one pause: who needs the disk for something else stops both.
"""

import asyncio


class Pace:
    """Holds work back. Invariant: what was begun ends; a pause comes between two steps."""

    def __init__(self) -> None:
        """Work may go on."""
        self._going = asyncio.Event()
        self._going.set()

    @property
    def is_paused(self) -> bool:
        """Whether work waits for `resume`."""
        return not self._going.is_set()

    def pause(self) -> None:
        """Begin no further step."""
        self._going.clear()

    def resume(self) -> None:
        """Go on."""
        self._going.set()

    async def spend(self, size: int, bytes_per_s: int) -> None:
        """Take the time that so many bytes may take, and longer while it is paused."""
        await asyncio.sleep(size / bytes_per_s)
        await self._going.wait()
