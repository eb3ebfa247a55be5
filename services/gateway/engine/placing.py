"""Ensembles of new ledgers: live bookies, in enough zones, or else marked as degraded."""

import logging

from quorumlog.errors import NotEnoughBookies
from quorumlog.net.directory import Directory
from quorumlog.protocol.quorum import Quorum

log = logging.getLogger(__name__)


class Placing:
    """Chooses the ensembles of new ledgers for one gateway."""

    def __init__(self, directory: Directory, *, zones_min: int, enforces_zones: bool) -> None:
        """`zones_min`: over how many zones the copies of each entry are spread. If too few zones
        live, a ledger is refused (`enforces_zones`), or created and marked as degraded.
        """
        self._directory = directory
        self._zones_min = zones_min
        self._enforces_zones = enforces_zones
        self.narrow_count = 0
        """Ledgers created in fewer zones than requested."""

    async def new_ensemble(
        self, quorum: Quorum, *, allow_degraded: bool
    ) -> tuple[tuple[str, ...], bool]:
        """The members, and whether the ensemble is degraded.

        Raises: NotEnoughBookies, MetadataUnavailable.
        """
        degraded_ack = (quorum.write_quorum, quorum.ack_quorum) if allow_degraded else None
        for is_retry in (False, True):
            if is_retry or not self._directory.is_known:
                await self._directory.refresh()
            # A full ensemble of recently live bookies is better than a degraded one.
            found = self._directory.new_ensemble(
                quorum.ensemble_size, degraded_ack=degraded_ack if is_retry else None
            )
            if found is not None:
                members, is_degraded = found
                return members, self._is_narrow(quorum, members) or is_degraded
        raise self.too_few(quorum.ensemble_size)

    async def refresh(self) -> None:
        """Read the list of bookies now. Raises: MetadataUnavailable."""
        await self._directory.refresh()

    def too_few(self, needed: int) -> NotEnoughBookies:
        """The error if no ensemble is possible."""
        return NotEnoughBookies(
            f"{needed} bookies that take entries are needed: {self._directory.census()}"
        )

    def _is_narrow(self, quorum: Quorum, members: tuple[str, ...]) -> bool:
        wanted = min(self._zones_min, quorum.write_quorum)
        used = min(
            self._directory.zone_count(tuple(members[p] for p in quorum.write_set(entry_id)))
            for entry_id in range(quorum.ensemble_size)
        )
        if used >= wanted:
            return False
        if self._enforces_zones:
            raise NotEnoughBookies(
                f"the copies of an entry would lie in {used} zones, {wanted} are asked for"
                " (ZONES_MIN)"
            )
        self.narrow_count += 1
        log.warning("too-few-zones", extra={"used": used, "wanted": wanted})
        return True
