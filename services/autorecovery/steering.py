"""Applies the operators' settings: limits or pauses the copying of this process."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from quorumlog.errors import QuorumLogError
from quorumlog.net.bookie_client import BookieClient
from quorumlog.net.metadata_client import MetadataClient, RepairClient
from quorumlog.net.ports import AddDone
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.record import Run
from quorumlog.wire.repair_bodies import RepairSettings, RepairSettingsPut
from services.autorecovery.config import Config

log = logging.getLogger(__name__)

_SETTINGS_S: Final = 1.0
_POLL_S: Final = 0.2
"""Maximum delay until a changed limit, or the end of a pause, takes effect."""


class PacedBookies:
    """A client of bookies that limits the rate of a repair's adds. Implements `BookiesPort`.

    Invariant: in any t seconds, at most `bytes_per_s` * t bytes plus one run are sent.
    """

    def __init__(self, bookies: BookieClient) -> None:
        """Start without a limit. Only adds are limited: each read of a repair leads to an add."""
        self._bookies = bookies
        self.fence, self.read_lac, self.read = bookies.fence, bookies.read_lac, bookies.read
        self.keep_row = bookies.keep_row
        self._loop = asyncio.get_running_loop()
        self._queue: deque[tuple[int, int, Callable[[], None]]] = deque()
        self._wake = asyncio.Event()
        self._debt_bytes = 0.0
        self._seen_at = self._loop.time()
        self.bytes_per_s: float | None = None
        self.is_paused = False
        self.copied_bytes = 0
        self.copied_entries = 0

    async def run(self) -> None:
        """Sends queued adds at the allowed rate. Never returns."""
        while True:
            while self._queue:
                await self._wait_for_turn()
                size, count, send = self._queue.popleft()
                self._debt_bytes += size
                self.copied_bytes += size
                self.copied_entries += count
                send()
                # The debt shrinks only from now on: time that the send itself took reduces no debt.
                self._seen_at = self._loop.time()
            self._wake.clear()
            await self._wake.wait()

    async def _wait_for_turn(self) -> None:
        while True:
            now = self._loop.time()
            rate, since = self.bytes_per_s, now - self._seen_at
            self._seen_at = now
            # Unused rate is not saved, because the limit applies at any time, not on average.
            self._debt_bytes = 0.0 if rate is None else max(0.0, self._debt_bytes - rate * since)
            if self.is_paused:
                await asyncio.sleep(_POLL_S)
            elif rate is not None and self._debt_bytes > 0:
                await asyncio.sleep(min(self._debt_bytes / rate, _POLL_S))
            else:
                return

    def add(
        self,
        member: str,
        ledger_key: bytes,
        run: Run,
        done: AddDone,
        *,
        recovery: bool = False,
        row: LedgerMetadata | None = None,
    ) -> None:
        """Queues an add of a member's part of a run; `run` sends it when the rate allows."""
        send = partial(self._bookies.add, member, ledger_key, run, done, recovery=recovery, row=row)
        self._queue.append((len(run.body), run.count, send))
        self._wake.set()


@dataclass(eq=False)
class Steering:
    """Polls operators' settings. While the metadata service is away, the last settings apply."""

    _config: Config
    """This process's own settings, which apply until operators change them."""
    _metadata: MetadataClient
    _repairs: RepairClient
    _pace: PacedBookies
    _settings: RepairSettings = field(default_factory=RepairSettings)
    _triggers: int | None = None
    """Number of audits requested by operators at the last refresh; None before any refresh."""
    _processes: int = 1

    @property
    def is_paused(self) -> bool:
        """Whether an operator has paused copying."""
        return self._settings.paused

    @property
    def lost_bookie_delay_s(self) -> float:
        """Maximum absence of a bookie, in seconds, before other bookies get its entries."""
        delay_s = self._settings.lost_bookie_delay_s
        return self._config.lost_bookie_delay_s if delay_s is None else delay_s

    @property
    def bytes_per_s(self) -> int | None:
        """The copy limit of all processes together, in bytes per second; None means no limit."""
        return self._settings.bytes_per_s or self._config.copy_bytes_per_s or None

    @property
    def concurrency(self) -> int:
        """The number of concurrent repairs in this process."""
        return self._settings.concurrency or self._config.workers

    async def follow(self, triggered: Callable[[], None]) -> None:
        """Refreshes the settings forever. Calls `triggered` when an operator requests an audit."""
        while True:
            try:
                await self.refresh(triggered)
            except QuorumLogError as error:
                log.info("settings-unknown", extra={"why": error.detail})
            await asyncio.sleep(_SETTINGS_S)

    async def refresh(self, triggered: Callable[[], None]) -> None:
        """Reads and applies the settings once; see `follow`. Raises: MetadataUnavailable."""
        services = (await self._metadata.services()).services
        self._processes = max(1, sum(info.kind == "autorecovery" for info in services))
        found = await self._repairs.settings()
        is_triggered = self._triggers not in {None, found.triggers}
        self._triggers = found.triggers
        self._apply(found)
        if is_triggered:
            triggered()

    async def change(self, change: RepairSettingsPut) -> None:
        """Changes the given settings for all processes. Raises: MetadataUnavailable."""
        self._apply(await self._repairs.change_settings(change))

    def _apply(self, found: RepairSettings) -> None:
        self._settings = found
        limit = self.bytes_per_s
        self._pace.is_paused = found.paused
        self._pace.bytes_per_s = None if limit is None else limit / self._processes
