"""The rate of background work, and its pause.

Scrubbing and compaction share one pause: an operator who needs the disk stops both.
"""

import asyncio


class Pace:
    """Throttles background work. Invariant: a pause takes effect between steps, never inside."""

    def __init__(self) -> None:
        """Not paused at first."""
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
        """End the pause."""
        self._going.set()

    async def spend(self, size: int, bytes_per_s: int) -> None:
        """Sleep as long as so many bytes may take, then wait for the end of a pause."""
        await asyncio.sleep(size / bytes_per_s)
        await self._going.wait()
