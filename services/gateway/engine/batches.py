"""Compresses record batches without holding up the event loop."""

import asyncio
from typing import Final

from quorumlog.protocol import packed

LARGE_BYTES: Final = 512 << 10
"""Packed in a millisecond (docs/performance.md); a thread costs a tenth of that."""


async def packed_batch(data: bytes) -> bytes:
    """The batch with compressed columns where that is shorter; a large one is compressed by a thread."""
    if len(data) < LARGE_BYTES:
        return packed.pack(data)
    return await asyncio.to_thread(packed.pack, data)
