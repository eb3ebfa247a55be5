"""Clients of the metadata service for ledgers, bookies, live services and repairs."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Final
from urllib.parse import quote

from quorumlog import errors
from quorumlog.net.metadata_requests import (
    MetadataRequests,
    current_of,
    new_attempt,
    query_of,
    shown_in,
)
from quorumlog.protocol.heads import LedgerHead
from quorumlog.protocol.messages import CasStatus, MissedRange
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.protocol.once import Once
from quorumlog.protocol.row_copy import RowName
from quorumlog.wire import bodies, repair_bodies
from quorumlog.wire.log_bodies import LedgerIds
from quorumlog.wire.rebuild_bodies import RebuildState

_ROWS: Final = 1000
_IDS: Final = 10_000
"""Page sizes: ledgers per list, and ids per list."""


class MetadataClient(MetadataRequests):
    """Reads and changes the metadata service's data, except logs, transactions and repairs."""

    # Ledger metadata.

    async def get(self, ledger_id: int, *, proof: bool = False) -> LedgerMetadata:
        """A ledger's metadata from the primary. With `proof`, the answer may justify a deletion (rule 18a).

        Raises: NoSuchLedger (`members["deleted"]`: whether it ever existed), MetadataUnavailable.
        """
        path = f"/v1/ledgers/{ledger_id}"
        row = await self.ask("GET", path, gives=LedgerMetadata, proof=proof)
        if row.ledger_id != ledger_id:
            raise errors.MetadataUnavailable(
                f"the service returned ledger {row.ledger_id} instead of {ledger_id}"
            )
        return row

    async def read(self, ledger_id: int) -> tuple[CasStatus, LedgerMetadata | None]:
        """A ledger's status and metadata; UNKNOWN if no service answers or the metadata is lost."""
        try:
            row = await self.get(ledger_id)
        except errors.NoSuchLedger as error:
            return _of_missing(error), None
        except errors.MetadataUnavailable:
            return CasStatus.UNKNOWN, None
        return CasStatus.OK, row

    async def proofs(
        self, held: Mapping[int, Sequence[RowName]], holder: str
    ) -> Mapping[int, bodies.LedgerProof]:
        """Proofs of ledgers' metadata, by id, which may justify deletions. `held`: the copies on
        the bookie `holder` (rules 18a, 18c). Raises: MetadataUnavailable.
        """
        asked: list[bodies.HeldBody] = []
        for ledger_id, names in held.items():
            attempts = tuple(name.token for name in names if name.token)
            parts = [
                attempts[at : at + bodies.HELD_MAX]
                for at in range(0, len(attempts), bodies.HELD_MAX)
            ]
            asked += [bodies.HeldBody(ledger_id=ledger_id, attempts=part) for part in parts or [()]]
        found: dict[int, bodies.LedgerProof] = {}
        for at in range(0, len(asked), bodies.PROOFS_MAX):
            for proof in await self._proofs(asked[at : at + bodies.PROOFS_MAX], holder):
                before = found.get(proof.ledger_id)
                if before is None or not before.lost:
                    found[proof.ledger_id] = proof
        return found

    async def _proofs(
        self, asked: Sequence[bodies.HeldBody], holder: str
    ) -> Sequence[bodies.LedgerProof]:
        body = bodies.LedgerProofsAsk(holder=holder, ledgers=tuple(asked))
        path = "/v1/ledger-proofs"
        proofs = (await self.ask("POST", path, body, gives=bodies.LedgerProofs, proof=True)).ledgers
        reported = [
            proof.ledger_id if proof.row is None else proof.row.ledger_id for proof in proofs
        ]  # fmt: skip
        if reported != [each.ledger_id for each in asked]:
            raise errors.MetadataUnavailable("the answer contains other ledgers than the request")
        return proofs

    async def create(
        self, draft: LedgerMetadata, *, attempt: str | None = None, once: Once | None = None
    ) -> LedgerMetadata:
        """Create a ledger. For a negative `draft.ledger_id`, the service assigns the next free id.
        A late copy of the client's request `once` returns the ledger of the first copy.

        Raises: LedgerExists, InvalidRequest, MetadataUnavailable. If the error's outcome is
        unknown, a try may have arrived; the caller may then repeat the attempt.
        """
        body = bodies.LedgerCreateBody(row=draft, attempt=attempt or new_attempt(), once=once)
        return await self.ask("POST", "/v1/ledgers", body, gives=LedgerMetadata)

    async def cas(
        self,
        metadata: LedgerMetadata,
        missed: tuple[MissedRange, ...] = (),
        *,
        attempt: str | None = None,
        once: Once | None = None,
    ) -> tuple[CasStatus, LedgerMetadata | None]:
        """Replace a ledger's metadata if the stored version is `metadata.version`, and return the
        resulting metadata. A late copy of the client's request `once` replaces nothing.

        Returns once the outcome is certain, without a time limit; UNKNOWN only if nothing was sent.
        Raises: InvalidRequest for an illegal change; CopyLost if bookies have copies of versions
        that the database lacks (rule 18d).
        """
        body = bodies.LedgerChange(
            row=metadata, attempt=attempt or new_attempt(), missed=missed, once=once
        )
        path = f"/v1/ledgers/{metadata.ledger_id}"
        try:
            row = await self.ask("PUT", path, body, gives=LedgerMetadata, settles=True)
        except errors.VersionConflict as error:
            return CasStatus.CONFLICT, current_of(error, LedgerMetadata)
        except errors.AlreadyDone as error:
            return CasStatus.OK, current_of(error, LedgerMetadata)
        except errors.NoSuchLedger as error:
            return _of_missing(error), None
        except errors.MetadataUnavailable:
            return CasStatus.UNKNOWN, None
        return CasStatus.OK, row

    async def delete(
        self, ledger_id: int, *, version: int, row_attempt: str = "", attempt: str | None = None
    ) -> str:
        """Replace a ledger's metadata by a tombstone if it has this version and attempt. Returns
        the deletion's token once the outcome is certain.

        Raises: NoSuchLedger, VersionConflict, OwnedByLog, InvalidRequest, and MetadataUnavailable
        if nothing was sent.
        """
        body = bodies.RowDelete(
            version=version, row_attempt=row_attempt, attempt=attempt or new_attempt()
        )
        await self.ask("DELETE", f"/v1/ledgers/{ledger_id}", body, gives=bodies.Body, settles=True)
        return body.attempt

    async def list(
        self,
        *,
        state: State | None = None,
        bookie: str | None = None,
        log: str | None = None,
        metadata: Mapping[str, str] | None = None,
        after: int | None = None,
        limit: int = 100,
        shown: Sequence[str] | None = None,
    ) -> tuple[list[LedgerMetadata], int | None]:
        """One page of ledgers by id, and the `after` of the next page (None at the end). `shown`:
        limits the page to ledgers with these names (bodies.SHOWN).
        """
        query = query_of(limit=limit, after=after, state=state, bookie=bookie, log=log)
        query |= shown_in(shown)
        query |= {f"metadata[{key}]": value for key, value in (metadata or {}).items()}
        page = await self.ask("GET", "/v1/ledgers", gives=bodies.LedgerListBody, query=query)
        return list(page.ledgers), page.next

    async def rows(
        self, *, state: State | None = None, bookie: str | None = None
    ) -> AsyncGenerator[LedgerMetadata]:
        """The metadata of all ledgers by id, read page by page. Raises: MetadataUnavailable."""
        after: int | None = None
        while True:
            rows, after = await self.list(state=state, bookie=bookie, after=after, limit=_ROWS)
            for row in rows:
                yield row
            if after is None:
                return

    async def heads(self, ledger_ids: Sequence[int]) -> Mapping[int, LedgerHead]:
        """The state and the writer of each ledger, from the primary, by id; for at most HEADS_MAX
        ids. A missing ledger was never created, or is lost. Raises: MetadataUnavailable.
        """
        body = bodies.LedgerHeadsAsk(ledgers=tuple(ledger_ids))
        found = await self.ask("POST", "/v1/ledger-heads", body, gives=bodies.LedgerHeads)
        return {head.ledger_id: head for head in found.ledgers}

    # Bookies and services.

    async def bookies(self) -> bodies.BookieList:
        """The registered bookies and their liveness."""
        return await self.ask("GET", "/v1/bookies", gives=bodies.BookieList)

    async def cookie(self, name: str) -> bodies.CookieRow | None:
        """A bookie's cookie, or None if the bookie is not registered."""
        try:
            return await self.ask(
                "GET", f"/v1/bookies/{quote(name)}/cookie", gives=bodies.CookieRow
            )
        except errors.NoSuchBookie:
            return None

    async def put_cookie(
        self, name: str, cookie: bodies.Cookie, *, version: int | None
    ) -> bodies.CookieRow:
        """Register a bookie (no version) or change its cookie. Returns once the outcome is certain.

        Raises: VersionConflict, InvalidRequest, and MetadataUnavailable if nothing was sent.
        """
        body = bodies.CookiePut(cookie=cookie, version=version, attempt=new_attempt())
        path = f"/v1/bookies/{quote(name)}/cookie"
        return await self.ask("PUT", path, body, gives=bodies.CookieRow, settles=True)

    async def log_ends(self, name: str, end: bodies.LogEnd) -> bodies.CookieRow:
        """Record how far a bookie's log is on disk.

        Raises: VersionConflict (with `current`) if another process is registered, NoSuchBookie,
        MetadataUnavailable.
        """
        path = f"/v1/bookies/{quote(name)}/log-end"
        return await self.ask("PUT", path, end, gives=bodies.CookieRow)

    async def uses(self, name: str, *, limit: int = 10) -> bodies.BookieUses:
        """The ledgers and repairs that name a bookie. Raises: NoSuchBookie, MetadataUnavailable."""
        path = f"/v1/bookies/{quote(name)}/uses"
        return await self.ask("GET", path, gives=bodies.BookieUses, query={"limit": str(limit)})

    async def ledgers_naming(self, name: str) -> set[int]:
        """The ledgers that name a bookie in any incarnation. Raises: MetadataUnavailable."""
        found: set[int] = set()
        path, after = f"/v1/bookies/{quote(name)}/ledgers", None
        while True:
            query = query_of(limit=_IDS, after=after)
            page = (await self.ask("GET", path, gives=LedgerIds, query=query)).ledgers
            found.update(page)
            if len(page) < _IDS:
                return found
            after = page[-1]

    async def retire(self, name: str) -> None:
        """Decommission a dead bookie. Calls may be repeated.

        Raises: NoSuchBookie, MetadataUnavailable, VersionConflict if the bookie is alive, or a
        ledger or repair names it.
        """
        await self.ask("DELETE", f"/v1/bookies/{quote(name)}/cookie", gives=bodies.Body)

    async def send_bookie_heartbeat(self, name: str, heartbeat: bodies.BookieHeartbeat) -> bool:
        """Send a heartbeat; return whether it was recorded. Raises: MetadataUnavailable."""
        path = f"/v1/bookies/{quote(name)}/heartbeat"
        return (await self.ask("PUT", path, heartbeat, gives=bodies.HeartbeatTaken)).recorded

    async def send_service_heartbeat(
        self, kind: str, name: str, heartbeat: bodies.ServiceHeartbeat
    ) -> bool:
        """Send a heartbeat; return whether it was recorded. Raises: MetadataUnavailable."""
        path = f"/v1/services/{quote(kind)}/{quote(name)}/heartbeat"
        return (await self.ask("PUT", path, heartbeat, gives=bodies.HeartbeatTaken)).recorded

    async def services(self) -> bodies.ServiceList:
        """The services whose last heartbeat arrived in time."""
        return await self.ask("GET", "/v1/services", gives=bodies.ServiceList)

    async def missing_witnesses(self) -> Sequence[bodies.MissingWitness]:
        """The acknowledged changes that the database lacks because the database went back (rule 18a)."""
        return (await self.ask("GET", "/v1/witnesses", gives=bodies.WitnessState)).missing

    async def kept_ledgers(self, *, limit: int) -> bodies.KeptLedgers:
        """The number of ledgers that bookies keep because the database lacks changes of their
        metadata, and the first of these ledgers (rule 18c).
        """
        return await self.ask(
            "GET", "/v1/kept-ledgers", gives=bodies.KeptLedgers, query=query_of(limit=limit)
        )

    async def cluster_id(self) -> str:
        """The cluster's id. A database with another id belongs to another cluster (rule 18)."""
        return (await self.ask("GET", "/v1/cluster-id", gives=bodies.ClusterId)).cluster_id

    async def rebuild_state(self) -> RebuildState:
        """Whether the database is empty, or was rebuilt (rule 18d)."""
        return await self.ask("GET", "/v1/rebuild", gives=RebuildState)


class RepairClient:
    """The repair queue's client. Calls may be repeated, and may raise MetadataUnavailable."""

    def __init__(self, client: MetadataRequests, worker: str) -> None:
        """`worker`: this process's name, chosen at random at each start."""
        self._client = client
        self._worker = worker

    async def list(
        self, *, after: str | None = None, limit: int = 100
    ) -> tuple[tuple[repair_bodies.RepairItem, ...], str | None]:
        """One page of the queue, and the `after` of the next page."""
        query = query_of(limit=limit, after=after)
        page = await self._client.ask(
            "GET", "/v1/repairs", gives=repair_bodies.RepairList, query=query
        )
        return page.repairs, page.next

    async def add(self, items: Sequence[repair_bodies.RepairAdd]) -> None:
        """Queue ranges of entries that members lack."""
        body = repair_bodies.RepairsAdd(items=tuple(items))
        await self._client.ask("POST", "/v1/repairs", body, gives=bodies.Body)

    async def claim(
        self, *, lease_s: float, limit: int = 1
    ) -> tuple[repair_bodies.RepairItem, ...]:
        """Claim items to work on. If the answer is lost, the claim ends with its lease."""
        body = repair_bodies.RepairClaim(worker=self._worker, lease_s=lease_s, limit=limit)
        path = "/v1/repairs/claim"
        return (await self._client.ask("POST", path, body, gives=repair_bodies.RepairList)).repairs

    async def progress(
        self, item: repair_bodies.RepairItem, done: repair_bodies.Ranges, *, lease_s: float
    ) -> repair_bodies.Ranges:
        """Record that the member durably has the ranges `done`; return the ranges that remain.

        Raises: VersionConflict if the claim has ended or the item has changed.
        """
        body = repair_bodies.RepairProgress(
            ranges=done, worker=self._worker, version=item.version, lease_s=lease_s
        )
        try:
            answer = await self._client.ask(
                "POST", _path(item, "progress"), body, gives=repair_bodies.RangesBody
            )
        except errors.NoSuchRepair:
            return ()  # an earlier try of this call completed the item
        return answer.ranges

    async def fail(self, item: repair_bodies.RepairItem, detail: str) -> None:
        """Release an item after a failure. Raises: VersionConflict if the claim has ended."""
        body = repair_bodies.RepairFail(worker=self._worker, version=item.version, detail=detail)
        await self._client.ask("POST", _path(item, "fail"), body, gives=bodies.Body)

    async def summary(self) -> repair_bodies.RepairSummary:
        """Statistics of the queue."""
        return await self._client.ask(
            "GET", "/v1/repairs/summary", gives=repair_bodies.RepairSummary
        )

    async def hurry(self) -> None:
        """Retry at once all items that wait after a failure."""
        await self._client.ask("POST", "/v1/repairs/hurry", bodies.Body(), gives=bodies.Body)

    async def settings(self) -> repair_bodies.RepairSettings:
        """The settings that operators chose for all processes of autorecovery."""
        return await self._client.ask(
            "GET", "/v1/repair-settings", gives=repair_bodies.RepairSettings
        )

    async def change_settings(
        self, change: repair_bodies.RepairSettingsPut
    ) -> repair_bodies.RepairSettings:
        """Change the given settings, for all processes; they survive restarts."""
        path = "/v1/repair-settings"
        return await self._client.ask("PATCH", path, change, gives=repair_bodies.RepairSettings)

    async def trigger(self) -> repair_bodies.RepairSettings:
        """Trigger a full audit now, and retry all waiting items."""
        return await self._client.ask(
            "POST", "/v1/repairs/trigger", bodies.Body(), gives=repair_bodies.RepairSettings
        )

    async def take_lease(self, name: str, *, ttl_s: float) -> repair_bodies.Lease:
        """Take or renew a lease; the returned lease may have another holder."""
        body = repair_bodies.LeaseTake(holder=self._worker, ttl_s=ttl_s)
        return await self._client.ask("PUT", f"/v1/leases/{name}", body, gives=repair_bodies.Lease)


def _of_missing(error: errors.NoSuchLedger) -> CasStatus:
    """The status of missing metadata: MISSING if there is a tombstone. Otherwise the metadata is
    lost, which proves nothing (rule 18): UNKNOWN.
    """
    return CasStatus.MISSING if error.members.get("deleted") is True else CasStatus.UNKNOWN


def _path(item: repair_bodies.RepairItem, verb: str) -> str:
    return f"/v1/repairs/{item.ledger_id}/{quote(item.member)}/{verb}"
