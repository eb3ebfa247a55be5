"""The rate of the disk alone, which bounds every system that syncs before it answers."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter as clock
from typing import Final, Self

from loadtest.bench.measure import Figures, during, percentiles

_COPIES: Final = 3
_FILE_BYTES: Final = 64 << 20
"""Bytes of each writer's file. At the end of the file, the writer starts again at its beginning."""


@dataclass(frozen=True, slots=True)
class Disk:
    """Measures writes to files in a folder."""

    folder: Path
    seconds: float

    @classmethod
    @asynccontextmanager
    async def running(cls, folder: Path, seconds: float) -> AsyncIterator[Self]:
        """Measure in this folder; nothing needs to be started."""
        yield cls(folder, seconds)

    async def write(self, size: int, writers: int = _COPIES) -> Figures:
        """Let each writer write and sync `size` bytes repeatedly. MB/s are those of one writer."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(asyncio.to_thread(self._write, self.folder / f"writer-{number}", size))
                for number in range(writers)
            ]  # fmt: skip
        times_s = [time for task in tasks for time in task.result()]
        return {"MB/s": len(times_s) / writers * size / self.seconds / 1e6, **percentiles(times_s)}

    def _write(self, file: Path, size: int) -> list[float]:
        data, times_s = os.urandom(size), []
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT)
        try:
            os.posix_fallocate(descriptor, 0, _FILE_BYTES)
            os.fsync(descriptor)
            at = 0
            for began in during(self.seconds):
                os.pwrite(descriptor, data, at)
                os.fdatasync(descriptor)
                times_s.append(clock() - began)
                at = (at + size) % (_FILE_BYTES - size)
        finally:
            os.close(descriptor)
            file.unlink()
        return times_s
