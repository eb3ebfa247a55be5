"""Builds the views of logs that clients get: their metadata, and their ends from the logs' owners.

A listing sends each gateway one request for the ends of the listed logs that the gateway owns. The
other ends are requested one by one, because the owners of these logs are gone or changing.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from quorumlog.errors import LogReplaced, NoSuchLedger, NoSuchLog, QuorumLogError
from quorumlog.protocol.heads import LogHead
from quorumlog.protocol.log import LogMetadata
from quorumlog.protocol.metadata import State, Writer
from quorumlog.wire.position_bodies import OWN_LOGS
from services.gateway.engine import Engine
from services.gateway.logs.ownership import Ownership
from services.gateway.logs.peers import LogPeers
from services.gateway.logs.reading import LogReader
from services.gateway.logs.store import MetadataLogs

_AT_ONCE: Final = 32
"""Maximum logs of a page whose ends are requested concurrently, if their owners don't answer."""


@dataclass(frozen=True, slots=True)
class LogView:
    """A log as clients see it, with its end, its owner and the states of its ledgers."""

    log: LogMetadata
    next_offset: int
    owner: Writer | None
    states: dict[int, State]


class LogViews:
    """Builds the views of logs at one gateway."""

    def __init__(
        self,
        engine: Engine,
        store: MetadataLogs,
        peers: LogPeers,
        ownership: Ownership,
        reader: LogReader,
    ) -> None:
        """Keeps no state."""
        self._engine, self._store, self._peers = engine, store, peers
        self._ownership, self._reader = ownership, reader

    async def page(
        self,
        *,
        after: str | None,
        limit: int,
        prefix: str = "",
        shown: tuple[str, ...] | None = None,
    ) -> tuple[list[LogView], str | None]:
        """A page of logs sorted by name, and the next page's `after`. `shown`: `Caller.listed`."""
        list_page = partial(self._store.list, limit=limit, prefix=prefix, shown=shown)
        listed, following = await list_page(after=after)
        while following is not None and all(row.name in OWN_LOGS for row in listed):
            listed, following = await list_page(after=following)
        rows = [row for row in listed if row.name not in OWN_LOGS]
        if following in OWN_LOGS:
            following = rows[-1].name
        # Ends read after the metadata cover all records acknowledged before this call.
        found = await self._of_owners(rows)
        room = asyncio.Semaphore(_AT_ONCE)

        async def ask(row: LogMetadata) -> None:
            async with room:
                with contextlib.suppress(NoSuchLog, LogReplaced):  # deleted since the page was read
                    found[row.name] = await self.view(row)

        await asyncio.gather(*(ask(row) for row in rows if row.name not in found))
        return [found[row.name] for row in rows if row.name in found], following

    async def view(self, row: LogMetadata) -> LogView:
        """Return the view of the log `row`. Raises: NoSuchLog, LogReplaced."""
        states = {item.ledger_id: State.CLOSED for item in row.items}
        writer: Writer | None = None
        for item in row.unsealed:
            with contextlib.suppress(NoSuchLedger):
                ledger = await self._engine.get(item.ledger_id)
                states[item.ledger_id] = ledger.state
                if item is row.last_item and ledger.state is State.OPEN:
                    writer = ledger.writer
        end = row.end_offset
        owner = self._ownership.owner(row.name)
        if end is None and owner is not None and owner.is_mine(row):
            end = owner.acknowledged_offset
        if end is None:
            end = await self._reader.end(row.name, row)
        return LogView(row, end, writer, states)

    def ends_here(self, heads: Iterable[LogHead]) -> dict[str, int]:
        """The ends of the logs among `heads` whose last ledger this process writes."""
        ends = {}
        for head in heads:
            owner = self._ownership.owner(head.name)
            if owner is None:
                continue
            mine = LogHead.of(owner.log)
            if (mine.last_ledger, mine.writer_token) == (head.last_ledger, head.writer_token):
                ends[head.name] = owner.acknowledged_offset
        return ends

    async def _of_owners(self, rows: Sequence[LogMetadata]) -> dict[str, LogView]:
        """The views, by name, of the logs whose owners answer."""
        heads = [head for row in rows if (head := head_to_ask(row)) is not None]
        by_name = {row.name: row for row in rows}
        return {
            name: _owned(by_name[name], end, owner)
            for name, (end, owner) in (await self.ends(heads)).items()
        }

    async def ends(self, heads: Sequence[LogHead]) -> dict[str, tuple[int, Writer]]:
        """The ends and owners of the logs whose owners answer, with one request to each gateway."""
        here = self.ends_here(heads)
        owners: dict[Writer, Mapping[str, int]] = {self._engine.writer: here}
        left = [head for head in heads if head.name not in here]
        if left:
            others: Sequence[Writer] = ()
            with contextlib.suppress(QuorumLogError):
                others = await self._engine.gateways()
            others = [other for other in others if other.id != self._engine.writer.id]
            answers = await asyncio.gather(*(self._peers.ends(other, left) for other in others))
            owners |= zip(others, answers, strict=True)
        asked = {head.name for head in heads}
        return {
            name: (end, owner)
            for owner, ends in owners.items()
            for name, end in ends.items()
            if name in asked
        }


def head_to_ask(row: LogMetadata) -> LogHead | None:
    """The head to send to a log's owner in a request for the end; None if no request is needed."""
    return LogHead.of(row) if row.unsealed == row.items[-1:] != () else None


def _owned(row: LogMetadata, end: int, owner: Writer) -> LogView:
    states = {item.ledger_id: State.CLOSED for item in row.items}
    return LogView(row, end, owner, states | {row.items[-1].ledger_id: State.OPEN})
