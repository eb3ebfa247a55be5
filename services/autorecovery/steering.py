"""Operators' settings for all of autorecovery, as this process knows them."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from quorumlog.errors import QuorumLogError
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.net.repair_client import RepairClient
from quorumlog.wire.repair_bodies import RepairSettings, RepairSettingsPut
from services.autorecovery.config import Config
from services.autorecovery.pace import PacedBookies

log = logging.getLogger(__name__)

_POLL_S: Final = 1.0


class Steering:
    """Follows the settings in metadata; while metadata is away the last known ones hold."""

    def __init__(
        self, config: Config, metadata: MetadataClient, repairs: RepairClient, pace: PacedBookies
    ) -> None:
        """Until the first refresh the process's own configuration holds."""
        self._config = config
        self._metadata = metadata
        self._repairs = repairs
        self._pace = pace
        self._settings = RepairSettings()
        self._triggers: int | None = None
        """How many audits had been requested by the last refresh."""
        self._processes = 1

    @property
    def is_paused(self) -> bool:
        """Whether copying is paused."""
        return self._settings.paused

    @property
    def lost_bookie_delay_s(self) -> float:
        """How long a bookie may be away before its ledgers are copied."""
        delay_s = self._settings.lost_bookie_delay_s
        return self._config.lost_bookie_delay_s if delay_s is None else delay_s

    @property
    def bytes_per_s(self) -> int | None:
        """The copy limit of all processes together; None is no limit."""
        return self._settings.bytes_per_s or self._config.copy_bytes_per_s or None

    @property
    def concurrency(self) -> int:
        """Repairs at a time in this process."""
        return self._settings.concurrency or self._config.workers

    async def follow(self, triggered: Callable[[], None]) -> None:
        """Refresh the settings for ever; call `triggered` when an operator requests an audit."""
        while True:
            try:
                await self.refresh(triggered)
            except QuorumLogError as error:
                log.info("settings-unknown", extra={"why": error.detail})
            await asyncio.sleep(_POLL_S)

    async def refresh(self, triggered: Callable[[], None]) -> None:
        """Read the settings now. Raises: MetadataUnavailable."""
        services = (await self._metadata.services()).services
        self._processes = max(1, sum(info.kind == "autorecovery" for info in services))
        found = await self._repairs.settings()
        is_triggered = self._triggers not in {None, found.triggers}
        self._triggers = found.triggers
        self._apply(found)
        if is_triggered:
            triggered()

    async def change(self, change: RepairSettingsPut) -> None:
        """Change the given fields, for all processes. Raises: MetadataUnavailable."""
        self._apply(await self._repairs.change_settings(change))

    def _apply(self, found: RepairSettings) -> None:
        self._settings = found
        limit = self.bytes_per_s
        self._pace.is_paused = found.paused
        self._pace.bytes_per_s = None if limit is None else limit / self._processes
