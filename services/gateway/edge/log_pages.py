"""A log's records as pages."""

from collections.abc import Iterable
from dataclasses import replace

from quorumlog import header
from services.gateway.edge.limits import BATCH_ENTRIES_MAX
from services.gateway.edge.log_payloads import records_frames, records_json
from services.gateway.edge.pages import TAIL_BYTES, Pages
from services.gateway.logs.manager import LogManager
from services.gateway.logs.ports import LogBatches, LogRead
from services.gateway.logs.reading import Start


def log_position(page: LogRead | LogBatches) -> dict[str, str]:
    """Where to go on, and where the log begins."""
    return {
        header.NEXT_OFFSET: str(page.next),
        "First-Offset": str(page.first_offset),
        "Log-Closed": "true" if page.closed else "false",
    }


class LogPages(Pages[LogRead]):
    """Records of one log."""

    def __init__(self, logs: LogManager, name: str) -> None:
        """Nothing is read yet."""
        super().__init__(("log", name))
        self._logs, self._name = logs, name

    async def read(
        self,
        at: Start,
        *,
        limit: int = BATCH_ENTRIES_MAX,
        max_bytes: int = TAIL_BYTES,
        wait_s: float = 0.0,
    ) -> LogRead:
        """The records from an offset on. Raises: what the log raises."""
        return await self._logs.read(
            self._name, at, limit=limit, max_bytes=max_bytes, wait_s=wait_s
        )

    async def end(self, page: LogRead) -> int:
        """The offset after the last acknowledged record."""
        del page
        return await self._logs.end(self._name)

    def count(self, page: LogRead) -> int:
        """Records of a page."""
        return len(page.records)

    def payload_bytes(self, page: LogRead) -> int:
        """Bytes of their values, keys and headers."""
        return sum(found.record.size for found in page.records)

    def rest(self, page: LogRead, at: int) -> LogRead:
        """The records from an offset on."""
        return replace(page, records=tuple(found for found in page.records if found.offset >= at))

    def is_end(self, page: LogRead) -> bool:
        """Whether the log is closed, and this is its end."""
        return page.closed

    def position(self, page: LogRead) -> dict[str, str]:
        """Where to go on, and where the log begins."""
        return log_position(page)

    def ids(self, page: LogRead) -> Iterable[int]:
        """The offsets."""
        return (found.offset for found in page.records)

    def items(self, page: LogRead, encoding: str) -> Iterable[bytes]:
        """Each record as a JSON object."""
        return records_json(page.records, encoding)

    def frames(self, page: LogRead) -> bytes:
        """(u64 offset, u32 length, value), repeated."""
        return records_frames(page.records)

    def document(self, page: LogRead, encoding: str) -> bytes:
        """The JSON of a read (`log_models.LogEntries`)."""
        return b'{"log":"%b",%b}' % (self._name.encode(), self.members(page, encoding))

    def members(self, page: LogRead, encoding: str) -> bytes:
        """`"entries","next","first_offset","closed"`."""
        return b'"entries":[%b],"next":%d,"first_offset":%d,"closed":%b' % (
            b",".join(self.items(page, encoding)),
            page.next,
            page.first_offset,
            b"true" if page.closed else b"false",
        )

    def ending(self, page: LogRead) -> dict[str, int]:
        """The offset after the last record."""
        return {"next_offset": page.next}
