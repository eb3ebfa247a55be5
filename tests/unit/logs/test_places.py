"""Where a ledger begins in its log stands in its members' copies of the row (rule 18f), on real processes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from operator import itemgetter

import aiohttp

from loadtest.cluster import Cluster, running
from loadtest.stores import Stores
from quorumlog.net.gateway_clients import LogClient
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.protocol.ids import member_name
from quorumlog.protocol.log import LogItem
from quorumlog.wire import row_copies
from services.bookie.inspection import batches_of
from services.bookie.log import KEY_BYTES, Kind, LogBatch
from services.bookie.segments import Segments
from tests.support.waiting import SETTLED_S, until
from tests.unit.logs.support import Http
from tests.unit.metadata.support import PATIENT_S
from tests.unit.transactions.support import LOG, begin, end, write

Place = tuple[str | None, int | None]
"""A log and the offset at which a ledger begins in it."""

NAME_BYTES = 24
"""A copy's version and attempt, before its body."""


def places_of(cluster: Cluster, member: str) -> dict[int, Place]:
    """What the latest copy of each ledger's row says of its place, at a bookie that runs: the last batch of its
    log may be half written.
    """
    directory = cluster.data / member_name(member)
    found: dict[int, tuple[int, Place]] = {}
    for _, batch in batches_of(Segments(directory / "log", 0), iter):
        for record in batch.records if isinstance(batch, LogBatch) else ():
            if record.kind is Kind.ROW:
                row = row_copies.decode(bytes(record.body[KEY_BYTES + NAME_BYTES :]))
                known = (row.version, (row.log, row.first_offset))
                found[row.ledger_id] = max(
                    known, found.get(row.ledger_id, known), key=itemgetter(0)
                )
    return {ledger_id: place for ledger_id, (_, place) in found.items()}


class Log:
    """The log's row and its ledgers' rows, from the metadata service, and their copies."""

    def __init__(self, cluster: Cluster, session: aiohttp.ClientSession) -> None:
        self._cluster = cluster
        self._metadata = MetadataClient(
            [cluster.url("metadata-1")], session, deadline_s=PATIENT_S, try_s=PATIENT_S
        )

    async def items(self) -> tuple[LogItem, ...]:
        return (await LogClient(self._metadata).get("log")).items

    async def unplaced(self) -> list[LogItem]:
        """The items whose place fewer than an ack quorum of the ledger's members keep."""
        items = await self.items()
        rows = [await self._metadata.get(item.ledger_id) for item in items]
        assert [(row.log, row.first_offset) for row in rows] == [
            ("log", item.first_offset) for item in items
        ]
        members = {member for row in rows for member in row.last_fragment.bookies}
        places = {member: places_of(self._cluster, member) for member in members}
        return [
            item
            for item, row in zip(items, rows, strict=True)
            if row.quorum.ack_quorum
            > sum(
                places[member].get(item.ledger_id) == ("log", item.first_offset)
                for member in row.last_fragment.bookies
            )
        ]


@asynccontextmanager
async def a_log(stores: Stores) -> AsyncIterator[tuple[Cluster, Http, Log]]:
    async with (
        running(stores) as cluster,
        aiohttp.ClientSession() as session,
        aiohttp.ClientSession(headers=cluster.headers) as internal,
    ):
        http = Http(session, cluster.gateways)
        await http.done("PUT", LOG, {})
        yield cluster, http, Log(cluster, internal)


async def append(http: Http, text: str, *, at: int = 0) -> None:
    await http.done("POST", f"{LOG}/records", {"text": text}, at=at)


async def test_members_keep_the_place_of_each_ledger_of_a_log(stores: Stores) -> None:
    async with a_log(stores) as (cluster, http, log):
        for number in range(3):
            await append(http, f"before roll {number}")
            await http.done("POST", f"{LOG}/roll")
        await append(http, "after the rolls")
        await cluster.kill("gateway-1")
        await append(http, "taken over", at=1)
        transaction = await begin(http, at=1)
        parts = [await write(http, transaction, [["a", "b"], ["c"]], at=1) for _ in range(2)]
        assert (await end(http, transaction, "commit", {"ledgers": parts}, at=1)).status == 200
        await append(http, "after the commit", at=1)

        items = await log.items()

        assert len(items) >= 6, "rolls, a takeover and a publication"
        assert {item.ledger_id for item in items} > set(parts)

        async def are_kept() -> bool:
            return not await log.unplaced()

        await until(are_kept, "members keep the place of each ledger", SETTLED_S)
