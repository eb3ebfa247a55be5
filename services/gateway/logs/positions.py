"""Serves the committed offsets of consumers at one gateway, on top of `keeper.py`."""

import asyncio
from itertools import islice
from typing import Any, Final

from quorumlog.protocol import positions
from quorumlog.wire.position_bodies import POSITION_BODIES
from services.gateway.logs.keeper import RowService

_EXPIRED_AT_ONCE: Final = 500
"""Maximum expired consumers deleted per sweep, so that appends have room for clients' requests."""


class PositionService(RowService[positions.Position]):
    """Serves this gateway's requests for committed offsets and leases of all consumers."""

    def __init__(self, logs: Any, read: Any, **ports: Any) -> None:
        """The arguments are those of `RowService`."""
        super().__init__(logs, read, POSITION_BODIES, positions.Positions, **ports)

    def _counts_once(self, request: Any) -> bool:
        return positions.counts_once(request)

    def _makes(self, request: Any) -> bool:
        if isinstance(request, positions.Commit):
            return request.is_new
        return isinstance(request, positions.Acquire)

    async def expire(self) -> None:
        """Delete consumers unused for `expiry_s`, if this process owns their log."""
        now_ms = self._database_ms()
        if not (self._expiry_ms and now_ms and self.is_here):
            return
        last_ms = now_ms - self._expiry_ms
        old = (row.key for row in self.kept.values() if row.used_ms <= last_ms)
        asked = [self.submit(positions.Expire(*key)) for key in islice(old, _EXPIRED_AT_ONCE)]
        await asyncio.gather(*asked, return_exceptions=True)
