"""A fork on real processes: its source is truncated, then deleted, and bookies collect what nobody names (rule 27a)."""

import aiohttp

from loadtest.cluster import Cluster, running
from loadtest.stores import Stores
from quorumlog.protocol.metadata import Deletion
from quorumlog.wire import row_copies
from quorumlog.wire.bodies import received
from quorumlog.wire.rebuild_bodies import RowsPage
from tests.support.waiting import SETTLED_S, UNHURRIED, until
from tests.unit.logs.support import Http
from tests.unit.logs.test_cluster import has_dropped

AT_ONCE = {**UNHURRIED, "COLLECT_S": "0.2", "COLLECT_GRACE_S": "0"}
SOURCE, LOG = "/v1/stream/source", "/v1/logs/durable-stream.source"
FORK = "/v1/stream/fork"
TEXT = {"Content-Type": "text/plain"}


async def ledgers_of(http: Http, log: str) -> list[int]:
    return [ledger["ledger_id"] for ledger in (await http.done("GET", log))["ledgers"]]


async def dropped(cluster: Cluster, *ledgers: int) -> None:
    """Until all bookies have dropped these ledgers."""
    await until(
        lambda: all(has_dropped(cluster, ledger_id) for ledger_id in ledgers),
        f"ledgers {ledgers} are dropped",
        SETTLED_S,
    )


async def told_deleted(cluster: Cluster) -> set[int]:
    """The ledgers that bookies hold for deleted: what a rebuild would bury (rule 18e)."""
    return await reported(cluster, {Deletion.ALONE, Deletion.WITH_LOG}, has_ids=True)


async def reported(cluster: Cluster, kinds: set[Deletion], *, has_ids: bool = False) -> set[int]:
    """The ledgers of which bookies hold copies that tell of such deletions; `has_ids`: or keep the id alone."""
    found = set[int]()
    async with cluster.session() as session:
        for name in ("bookie-1", "bookie-2", "bookie-3"):
            async with session.get(f"{cluster.url(name)}/v1/rows?after=-1&limit=100") as answer:
                page = received(RowsPage, await answer.read())
            found |= {
                held.ledger_id
                for held in page.ledgers
                if (has_ids and held.deleted)
                or any(row_copies.decode(copy).deletion in kinds for copy in held.copies)
            }
    return found


async def test_a_fork_keeps_every_byte_until_it_is_deleted_and_not_longer(stores: Stores) -> None:
    async with (
        running(stores, bookies=3, environment=AT_ONCE) as cluster,
        aiohttp.ClientSession() as session,
    ):
        http = Http(session, cluster.gateways)

        async def sent(path: str, text: bytes, method: str = "POST", **headers: str) -> None:
            async def ask() -> bool:
                answer = await http.ask(method, path, headers=TEXT | headers, body=text)
                assert answer.status < 300 or answer.status in (429, 503, 504), answer
                return answer.status < 300

            await until(ask, f"{text!r} is there", SETTLED_S, passing=(aiohttp.ClientError,))

        await sent(SOURCE, b"0", "PUT")
        await sent(SOURCE, b"1")
        await http.done("POST", f"{LOG}/roll")
        await sent(SOURCE, b"2")
        await sent(SOURCE, b"3")
        end = (await http.ask("HEAD", SOURCE)).headers["Stream-Next-Offset"]
        at_three = f"{3:019d}_{end.partition('_')[2]}"
        forked = {"Stream-Forked-From": SOURCE, "Stream-Fork-Offset": at_three}
        await sent(FORK, b"x", "PUT", **forked)
        await sent(SOURCE, b"4")
        first, second, last = await ledgers_of(http, LOG)
        shared_first, shared_second, own = await ledgers_of(http, "/v1/logs/durable-stream.fork")
        assert (shared_first, shared_second) == (first, second)

        await http.done("POST", f"{LOG}/truncate", {"before": 2})
        assert await ledgers_of(http, LOG) == [second, last]
        assert (await http.ask("DELETE", SOURCE, at=1)).status == 204
        await dropped(cluster, last)

        for at in (0, 1):
            read = await http.ask("GET", FORK, at=at)
            assert (read.status, read.body) == (200, b"012x")
            assert (await http.ask("GET", SOURCE, at=at)).status == 410
        refused = await http.ask("PUT", SOURCE, headers=TEXT, body=b"")
        assert refused.status == 409
        gone = await told_deleted(cluster)
        assert last in gone
        assert gone.isdisjoint((first, second))
        assert await reported(cluster, {Deletion.OF_LOG}) == {second}, "of the log's deletion alone"
        for ledger_id in (first, second):
            assert (await http.ask("GET", f"/v1/ledgers/{ledger_id}")).json["state"] == "CLOSED"

        await sent(FORK, b"y")
        assert (await http.ask("GET", FORK, at=1)).body == b"012xy"
        assert (await http.ask("DELETE", FORK)).status == 204
        await dropped(cluster, first, second, own)
        assert (await http.ask("GET", SOURCE)).status == 404
        await sent(SOURCE, b"new", "PUT")
