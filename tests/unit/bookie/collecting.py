"""What tests of a bookie's collector share: rows that say what may go, a store that has something to give up."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from quorumlog.protocol.messages import CasStatus
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.row_copy import RowName
from services.bookie.collect import Collector, Found, MetadataRows
from services.bookie.space import LIVE_SHARE_MIN, Space
from services.bookie.store import Store
from tests.unit.bookie.support import add, fence, run_of, started

ROW = LedgerMetadata(
    ledger_id=7,
    quorum=Quorum(1, 1, 1),
    digest=DigestKind.CRC32C,
    fragments=(Fragment(0, ("b1@1",)),),
)
AWAY = replace(ROW, fragments=(Fragment(0, ("b2@1",)),)).closed(last_entry=99, length=1000)
GONE = (CasStatus.MISSING, None)


class Rows(MetadataRows):
    """The rows that a test says there are."""

    def __init__(self, rows: Mapping[int, Found] | None = None) -> None:
        """An OPEN ledger of this bookie where nothing is said."""
        self.rows = dict(rows or {})
        self.cluster = "cluster"
        self.reads = self.questions = 0
        self.listed: set[int] = set()
        self.contained: set[RowName] = set()
        """Copies of rows whose changes the database contains."""

    async def read(self, held: Mapping[int, Sequence[RowName]]) -> Mapping[int, Found]:
        self.questions += 1
        return {ledger_id: await self.read_one(ledger_id, held[ledger_id]) for ledger_id in held}

    async def read_one(self, ledger_id: int, held: Sequence[RowName]) -> Found:
        self.reads += 1
        if not self.contained.issuperset(held):
            return CasStatus.UNKNOWN, None
        return self.rows.get(ledger_id, (CasStatus.OK, ROW))

    async def cluster_id(self) -> str:
        return self.cluster

    async def confirm(self) -> None:
        return

    async def ledgers_naming(self, bookie: str) -> set[int]:
        assert bookie == "b1"
        return self.listed


def collector_of(store: Store, rows: Rows, live_share_min: float = LIVE_SHARE_MIN) -> Collector:
    """Without a grace. `live_share_min`: 1 moves what lives out of every segment."""
    return Collector(
        store, rows, "cluster", grace_s=0.0, space=Space(store, live_share_min=live_share_min)
    )


async def rounds(collector: Collector, count: int) -> None:
    """Look so often at everything: what may go is dropped at the second look."""
    for _ in range(count):
        await collector.round()


async def filled(directory: Path) -> Store:
    """Three ledgers over several segments: 7 and 8 big, 9 with an entry and a fence in the first."""
    store = started(directory)
    await add(store, run_of(9, range(3)))
    await fence(store, 9)
    for number in range(12):
        await add(store, run_of(7, range(number * 10, number * 10 + 10), "w" * 200))
        await add(store, run_of(8, range(number * 10, number * 10 + 10), "w" * 200))
    assert len(store.segments.numbers()) > 3
    return store


def copy_of(version: int) -> RowName:
    """A copy of a row's version, by its change."""
    return RowName(version, b"%16d" % version)
