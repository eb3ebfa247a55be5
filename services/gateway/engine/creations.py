"""The creation of ledgers whose only writer is this process, and the choice of their ensembles: live bookies, in enough
zones, or else marked as degraded.
"""

import asyncio
import logging
from typing import Final

from quorumlog import errors
from quorumlog.net.budget import PEER
from quorumlog.net.directory import Directory
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.net.metadata_requests import new_attempt
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata, State
from quorumlog.protocol.once import Once
from quorumlog.protocol.quorum import Quorum
from services.gateway.engine.handles import Handles
from services.gateway.engine.keys import new_keys
from services.gateway.interface import DEGRADED, LedgerOptions

log = logging.getLogger(__name__)

_RETRY_S: Final = 1.0
_PLACINGS: Final = 3
"""How often an ensemble is chosen where its bookies register anew meanwhile."""


class Placing:
    """Chooses the ensembles of new ledgers for one gateway."""

    def __init__(self, directory: Directory, *, zones_min: int, enforces_zones: bool) -> None:
        """`zones_min`: over how many zones the copies of each entry are spread. If too few zones
        live, a ledger is refused (`enforces_zones`), or created and marked as degraded.
        """
        self.directory = directory
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
            if is_retry or not self.directory.is_known:
                await self.directory.refresh()
            # A full ensemble of recently live bookies is better than a degraded one.
            found = self.directory.new_ensemble(
                quorum.ensemble_size, degraded_ack=degraded_ack if is_retry else None
            )
            if found is not None:
                members, is_degraded = found
                return members, self._is_narrow(quorum, members) or is_degraded
        raise self.too_few(quorum.ensemble_size)

    def too_few(self, needed: int) -> errors.NotEnoughBookies:
        """The error if no ensemble is possible."""
        return errors.NotEnoughBookies(
            f"{needed} bookies that take entries are needed: {self.directory.census()}"
        )

    def _is_narrow(self, quorum: Quorum, members: tuple[str, ...]) -> bool:
        wanted = min(self._zones_min, quorum.write_quorum)
        used = min(
            self.directory.zone_count(tuple(members[p] for p in quorum.write_set(entry_id)))
            for entry_id in range(quorum.ensemble_size)
        )
        if used >= wanted:
            return False
        if self._enforces_zones:
            raise errors.NotEnoughBookies(
                f"the copies of an entry would lie in {used} zones, {wanted} are asked for"
                " (ZONES_MIN)"
            )
        self.narrow_count += 1
        log.warning("too-few-zones", extra={"used": used, "wanted": wanted})
        return True


class Creations:
    """Creates ledgers. Invariant: each creation under way has taken a place for an open ledger, which
    it hands to the ledger's handle or gives back.
    """

    def __init__(self, handles: Handles, metadata: MetadataClient, placing: Placing) -> None:
        """No creation is under way yet."""
        self._handles, self._metadata, self._placing = handles, metadata, placing

    async def create(self, options: LedgerOptions) -> LedgerMetadata:
        """Create a ledger whose only writer is this process.

        Raises: NotEnoughBookies, LedgerExists, Overloaded, InvalidRequest, MetadataUnavailable.
        """
        peer, places = PEER.get(), self._handles.places
        if options.log is None:
            places.take(peer)
        else:
            places.back(peer)  # a roll or a takeover of a log is never refused
        is_kept = False
        try:
            stale: errors.StaleMember | None = None
            for _ in range(_PLACINGS):
                draft = await self._draft(options)
                attempt, once = new_attempt(), options.once
                try:
                    row, is_kept = await self._create(draft, attempt, once, peer)
                except errors.StaleMember as error:
                    # The list of bookies is older than a registration (rule 15b).
                    stale = error
                    await self._placing.directory.refresh()
                except (errors.MetadataUnavailable, asyncio.CancelledError) as error:
                    if (
                        not isinstance(error, errors.MetadataUnavailable)
                        or error.outcome == errors.UNKNOWN
                    ):
                        is_kept = True
                        self._handles.ports.tasks.start(self._settle(draft, attempt, once, peer))
                    raise
                else:
                    return row
            raise errors.NotEnoughBookies(
                f"bookies registered anew while an ensemble was chosen, {_PLACINGS} times: {stale}"
            ) from stale
        finally:
            if not is_kept:
                places.give(peer)

    async def _draft(self, options: LedgerOptions) -> LedgerMetadata:
        """The row to be created, with a new ensemble and new keys."""
        if options.digest is DigestKind.HMAC_SHA256 and options.password is None:
            raise errors.InvalidRequest("the digest hmac-sha256 needs a password")
        members, is_degraded = await self._placing.new_ensemble(
            options.quorum, allow_degraded=options.allow_degraded
        )
        keys = new_keys(options.password, options.digest)
        return LedgerMetadata(
            ledger_id=-1 if options.ledger_id is None else options.ledger_id,
            quorum=options.quorum,
            digest=options.digest,
            fragments=(Fragment(0, members),),
            writer=self._handles.writer,
            ledger_key=keys.ledger_key,
            access_key=keys.access_key,
            mac_key=keys.mac_key,
            custom=tuple(sorted(options.custom)),
            log=options.log,
            extra=(*options.tags, *(((DEGRADED, "true"),) if is_degraded else ())),
        )

    async def _create(
        self, draft: LedgerMetadata, attempt: str, once: Once | None, peer: str
    ) -> tuple[LedgerMetadata, bool]:
        """The ledger's row, and whether a new handle has the place of this creation."""
        rereads = self._handles.rereads
        gaps = rereads.gaps
        row = await self._metadata.create(draft, attempt=attempt, once=once)
        is_new = self._adopt(row, draft.ledger_key, peer)
        if gaps != rereads.gaps and row.ledger_id in self._handles.by_ledger:
            rereads.want(row.ledger_id)  # changes may have been missed since the request
        return row, is_new

    def _adopt(self, row: LedgerMetadata, ledger_key: bytes, peer: str) -> bool:
        """Become the writer of a ledger created here, unless this process is that already."""
        self._handles.rows.put(row)
        is_ours = row.writer is not None and row.writer.id == self._handles.writer.id
        # A repeated request of a client gets the first ledger's row, whose handle may exist; and
        # somebody else may have ended the ledger before this answer arrived.
        is_new = row.ledger_id not in self._handles.by_ledger and row.state is State.OPEN
        if is_ours and row.ledger_key == ledger_key and is_new:
            self._handles.open(row, peer)
            return True
        return False

    async def _settle(
        self, draft: LedgerMetadata, attempt: str, once: Once | None, peer: str
    ) -> None:
        """Settle a creation of unknown outcome. While this process lives it counts as the ledger's
        writer (rule 11), so nobody else would close or repair the ledger.
        """
        is_kept = False
        try:
            while True:
                try:
                    _, is_kept = await self._create(draft, attempt, once, peer)
                except errors.MetadataUnavailable:
                    await asyncio.sleep(_RETRY_S)
                except errors.QuorumLogError:
                    return  # the ledger was never created
                else:
                    return
        finally:
            if not is_kept:
                self._handles.places.give(peer)
