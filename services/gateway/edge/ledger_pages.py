"""A ledger's entries as pages."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

from quorumlog import header
from services.gateway.edge import arrow
from services.gateway.edge.http.limits import BATCH_ENTRIES_MAX
from services.gateway.edge.pages import TAIL_BYTES, Pages
from services.gateway.edge.payloads import encoded
from services.gateway.engine.ledger_reads import LedgerReads
from services.gateway.interface import ReadResult
from services.gateway.logs.values import Start


class LedgerPages(Pages[ReadResult]):
    """Entries of one ledger up to `last`, which is inclusive."""

    def __init__(
        self,
        reads: LedgerReads,
        ledger_id: int,
        *,
        last: int | None = None,
        password: str | None = None,
    ) -> None:
        super().__init__(b'"ledger_id":%d' % ledger_id, last)
        self._reads, self._ledger_id, self._password = reads, ledger_id, password

    async def read(
        self,
        at: Start,
        *,
        limit: int = BATCH_ENTRIES_MAX,
        max_bytes: int = TAIL_BYTES,
        wait_s: float = 0.0,
    ) -> ReadResult:
        """The entries from an id on. Raises: what the engine raises."""
        assert isinstance(at, int), "a ledger's pages begin at an id"
        if wait_s > 0:
            await self._reads.last_add_confirmed(
                self._ledger_id, after=at - 1, wait_s=wait_s, password=self._password
            )
        return await self._reads.read(
            self._ledger_id,
            at,
            last=self.last,
            limit=limit,
            max_bytes=max_bytes,
            password=self._password,
        )

    async def end(self, page: ReadResult) -> int:
        """The id after the LAC."""
        return page.last_add_confirmed + 1

    def count(self, page: ReadResult) -> int:
        """Entries of a page."""
        return sum(run.count for run in page.runs)

    def payload_bytes(self, page: ReadResult) -> int:
        """Bytes of their payloads."""
        return sum(run.payload_bytes for run in page.runs)

    def rest(self, page: ReadResult, at: int) -> ReadResult:
        """The entries from an id on."""
        parts = (run.where(lambda entry_id: entry_id >= at) for run in page.runs)
        return replace(page, runs=tuple(part for part in parts if part is not None))

    def is_end(self, page: ReadResult) -> bool:
        """Whether a page reaches the end of a closed ledger."""
        return page.closed and page.next > page.last_add_confirmed

    def position(self, page: ReadResult) -> dict[str, str]:
        """Where to go on, and how far the ledger is confirmed."""
        return {
            header.NEXT_ENTRY_ID: str(page.next),
            header.LAST_ADD_CONFIRMED: str(page.last_add_confirmed),
            header.LEDGER_CLOSED: "true" if page.closed else "false",
            "Lac-Source": page.lac_source,
        }

    def numbers(self, page: ReadResult) -> Iterable[int]:
        """The entry ids."""
        return chain.from_iterable(run.ids for run in page.runs)

    def payloads(self, page: ReadResult) -> Iterable[tuple[int, memoryview]]:
        """The entry ids with their payloads."""
        return chain.from_iterable(zip(run.ids, run.payloads(), strict=True) for run in page.runs)

    def arrow(self, page: ReadResult) -> bytes:
        """The columns `entry_id` and `value`."""
        return arrow.entries_stream(page.runs)

    def items(self, page: ReadResult, encoding: str) -> Iterable[bytes]:
        """Each entry as a JSON object."""
        return (
            b'{"entry_id":%d,%b}' % (entry_id, encoded(payload, encoding))
            for entry_id, payload in self.payloads(page)
        )

    def members(self, page: ReadResult) -> bytes:
        """`"next","last_add_confirmed","closed"`."""
        return b'"next":%d,"last_add_confirmed":%d,"closed":%b' % (
            page.next,
            page.last_add_confirmed,
            b"true" if page.closed else b"false",
        )

    def document_members(self, page: ReadResult) -> bytes:
        """`members` and `"lac_source"`."""
        return b'%b,"lac_source":"%b"' % (self.members(page), page.lac_source.encode())

    def ending(self, page: ReadResult) -> dict[str, int]:
        """The ledger's last entry."""
        return {"last_entry": page.last_add_confirmed}
