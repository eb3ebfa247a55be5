"""Selects the records of a read by their keys and headers.

A filter doesn't change where a read ends: records that do not match are read, but not returned.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from quorumlog.protocol.batch import Columns, StoredBatch
from services.gateway.logs.values import RECORD_COST, LogBatches


@dataclass(frozen=True, slots=True)
class Filter:
    """The conditions of a filtered read. A record matches if it meets all conditions."""

    key: bytes | None = None
    key_prefix: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()
    """Pairs of name and value. A record matches if it has all of these headers."""

    def page(self, page: LogBatches, limit: int, max_bytes: int) -> LogBatches:
        """Return the matching records of a page. The result ends after the record that reaches
        `limit` or `max_bytes`.
        """
        batches: list[StoredBatch] = []
        for found in page.batches:
            for part in self.matching(found):
                count, size = part.columns.fitting(
                    0, min(part.count, limit), max_bytes, RECORD_COST
                )
                limit, max_bytes = limit - count, max_bytes - size
                is_whole = count == part.count
                batches.append(
                    part if is_whole else replace(part, columns=part.columns.part(0, count))
                )
                end = part.first_offset + count
                if (limit <= 0 or max_bytes <= 0) and end < page.next:
                    return replace(
                        page, batches=tuple(batches), next=end, closed=False, is_at_end=False
                    )
        return replace(page, batches=tuple(batches))

    def matching(self, found: StoredBatch) -> Iterator[StoredBatch]:
        """Yield the matching records of a batch, in parts with consecutive offsets."""
        indexes = list(self._indexes(found.columns))
        if len(indexes) == found.count:
            yield found
            return
        cuts = [n for n, (a, b) in enumerate(pairwise(indexes), 1) if b != a + 1]
        for begin, end in pairwise([0, *cuts, len(indexes)] if indexes else []):
            first = indexes[begin]
            yield replace(
                found,
                first_offset=found.first_offset + first,
                columns=found.columns.part(first, end - begin),
            )

    def _indexes(self, columns: Columns) -> Iterator[int]:
        """Yield the indexes of the matching records of a batch."""
        has_key = self.key is not None or self.key_prefix is not None
        if (has_key and not columns.key_sizes) or (self.headers and not columns.headers):
            return
        wanted = set(self.headers)
        for index, (_, key, headers, _) in enumerate(columns.rows):
            if has_key and (
                key is None
                or (self.key is not None and key != self.key)
                or not key.startswith(self.key_prefix or b"")
            ):
                continue
            if wanted <= set(headers):
                yield index
