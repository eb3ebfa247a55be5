"""Where a time is: from a time to the first record that was appended then or later.

Append times never go back within a log (rule 26b), so a binary search finds the place: over the ledgers by their last
entries, then over the entries of one ledger. A search of L ledgers, where the one that it ends in has N entries, reads at
most log2(L) + 1 + log2(N) entries.
"""

from collections.abc import Awaitable, Callable

from quorumlog.protocol.batch import BatchHead
from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.log import LogItem, LogMetadata

LastEntry = Callable[[LogItem], Awaitable[int]]
"""The last entry of a ledger that is acknowledged, NO_ENTRY where there is none."""
ReadHead = Callable[[int, int], Awaitable[BatchHead]]
"""The head of an entry (ledger, entry); of a lost one that of the hole, with the time of what precedes the hole."""


async def find_time(
    row: LogMetadata, ms: int, *, last_entry: LastEntry, read_head: ReadHead
) -> int:
    """The offset of the first record that was appended at `ms` or later; the log's end where there is none.

    The end is that of the ledgers as this search found them: what is appended meanwhile comes after it.
    """
    items = [item for item in row.items if item.first_offset is not None and not item.is_empty]
    low, high, found = 0, len(items), row.end_offset or row.first_offset
    end: tuple[int, BatchHead] | None = None
    """The last entry of `items[high]`, where that was asked for."""
    while low < high:
        middle = (low + high) // 2
        item = items[middle]
        asked = None if item.published_ms else await _end_of(item, last_entry, read_head)
        if item.published_ms:
            is_before = item.published_ms < ms
        else:
            is_before = asked is not None and asked[1].append_time_ms < ms
        if not is_before:
            high, end = middle, asked
            continue
        low = middle + 1
        found = _after(item, asked)
    if high == len(items):
        return max(found, row.first_offset)
    item = items[high]
    assert item.first_offset is not None
    place = 0 if end is None else await _place(item.ledger_id, ms, end, read_head)
    found = item.first_offset + place
    if item.last_offset is not None:
        # A fork's part of a shared ledger may end before that does (rule 27a): what follows is the fork's own.
        found = min(found, item.last_offset + 1)
    return max(found, row.first_offset)


def _after(item: LogItem, end: tuple[int, BatchHead] | None) -> int:
    """The offset after the last record of a ledger."""
    if item.last_offset is not None:
        return item.last_offset + 1
    assert end is not None, "only an acknowledged record has a time"
    return (item.first_offset or 0) + end[1].records_after


async def _end_of(
    item: LogItem, last_entry: LastEntry, read_head: ReadHead
) -> tuple[int, BatchHead] | None:
    """The last entry of a ledger with its head; None where nothing is acknowledged."""
    last = await last_entry(item)
    return None if last == NO_ENTRY else (last, await read_head(item.ledger_id, last))


async def _place(ledger_id: int, ms: int, end: tuple[int, BatchHead], read_head: ReadHead) -> int:
    """How many records of a ledger were appended before `ms`; its last entry, `end`, was not."""
    low, (high, found) = 0, end
    while low < high:
        middle = (low + high) // 2
        head = await read_head(ledger_id, middle)
        if head.append_time_ms < ms:
            low = middle + 1
        else:
            high, found = middle, head
    return found.records_before
