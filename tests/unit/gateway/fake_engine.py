"""An engine of a few dictionaries, for tests of HTTP alone: one gateway, no quorums, no bytes on
a disk. What it raises, and when, is what the real one raises.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from quorumlog.errors import (
    LedgerClosed,
    LedgerExists,
    LossNotProven,
    NoSuchEntry,
    NoSuchLedger,
    NotEnoughBookies,
    NotYetConfirmed,
    QuorumLogError,
    UnexpectedEntryId,
    WrongPassword,
)
from quorumlog.protocol.metadata import Fragment, LedgerMetadata, State, Writer
from quorumlog.protocol.once import Once
from quorumlog.protocol.record import Codec, make
from quorumlog.wire.bodies import BookieInfo, BookieList, ServiceList
from services.gateway.engine import Engine
from services.gateway.interface import (
    EntriesAppended,
    LacSource,
    LedgerOptions,
    LedgerView,
    ReadResult,
)

BOOKIES = 4


class FakeEngine(Engine):
    """Holds ledgers in memory. It is its own parts."""

    def __init__(self) -> None:
        self.appends = self.reads = self.rows = self.metadata = self.directory = cast("Any", self)
        self.ledgers: dict[int, LedgerMetadata] = {}
        self.entries: dict[int, list[bytes]] = {}
        self.passwords: dict[int, str | None] = {}
        self.idempotent: dict[Once | None, int] = {}
        self.deleted: set[int] = set()
        self.changed = asyncio.Condition()
        self.fails: BaseException | None = None
        """Raised by the next call of append, or by ready."""
        self.gate: asyncio.Event | None = None
        """Appends wait for it."""
        self.wait_s_min = 0.0
        """Waits take as long at least, whatever was asked for, where nothing comes."""
        self.appending = 0
        self.waiting = 0

    def state(self) -> tuple[Any, ...]:
        """All that a request may change, for tests that nothing changed."""
        return (
            dict(self.ledgers),
            {ledger_id: tuple(entries) for ledger_id, entries in self.entries.items()},
            set(self.deleted),
        )

    async def create(self, options: LedgerOptions) -> LedgerMetadata:
        if options.once in self.idempotent:
            return self.ledgers[self.idempotent[options.once]]
        if options.quorum.ensemble_size > BOOKIES and not options.allow_degraded:
            raise NotEnoughBookies(f"{options.quorum.ensemble_size} are needed, {BOOKIES} live")
        ledger_id = options.ledger_id
        if ledger_id is None:
            used = self.ledgers.keys() | self.deleted
            ledger_id = next(n for n in range(1, 100_000) if n not in used)
        elif ledger_id in self.ledgers or ledger_id in self.deleted:
            raise LedgerExists(ledger_id=ledger_id)
        self.ledgers[ledger_id] = LedgerMetadata(
            ledger_id=ledger_id,
            quorum=options.quorum,
            digest=options.digest,
            fragments=(Fragment(0, tuple(f"b{n}@1" for n in range(options.quorum.ensemble_size))),),
            writer=Writer("fake", "http://127.0.0.1:1"),
            custom=options.custom,
            created_at="2026-01-02T03:04:05Z",
        )
        self.entries[ledger_id] = []
        self.passwords[ledger_id] = options.password
        if options.once is not None:
            self.idempotent[options.once] = ledger_id
        return self.ledgers[ledger_id]

    async def get(self, ledger_id: int) -> LedgerMetadata:
        if ledger_id not in self.ledgers:
            raise NoSuchLedger(ledger_id=ledger_id, deleted=ledger_id in self.deleted)
        return self.ledgers[ledger_id]

    row = get

    def writes(self, ledger_id: int) -> bool:
        return ledger_id in self.ledgers

    async def _open(self, ledger_id: int, password: str | None) -> LedgerMetadata:
        ledger = await self.get(ledger_id)
        if self.passwords[ledger_id] not in (None, password):
            raise WrongPassword(ledger_id=ledger_id)
        return ledger

    async def list(
        self,
        *,
        state: State | None,
        bookie: str | None,
        log: str | None,
        metadata: Mapping[str, str],
        after: int | None,
        limit: int,
        shown: Sequence[str] | None,
    ) -> tuple[Sequence[LedgerMetadata], int | None]:
        del shown
        found = [
            ledger
            for ledger_id, ledger in sorted(self.ledgers.items())
            if (after is None or ledger_id > after)
            and state in (None, ledger.state)
            and set(metadata.items()) <= set(ledger.custom)
            and log in (None, ledger.log)
            and (bookie is None or bookie in ledger.last_fragment.bookies)
        ]
        page = found[:limit]
        return page, page[-1].ledger_id if len(found) > len(page) else None

    def at_hand(
        self, ledger_id: int
    ) -> Callable[[Sequence[bytes]], asyncio.Future[EntriesAppended]] | None:
        ledger = self.ledgers.get(ledger_id)
        if ledger is None or ledger.state is State.CLOSED or self.passwords[ledger_id] is not None:
            return None
        return lambda payloads: asyncio.ensure_future(self.append(ledger_id, payloads))

    async def forward(
        self,
        ledger_id: int,
        media: str,
        data: bytes,
        *,
        password: str | None = None,
        expect: int | None = None,
    ) -> bytes:
        del media, data, password, expect
        if self.fails is not None:
            raise self.fails
        await self.get(ledger_id)
        raise AssertionError("it writes all that it has")

    async def append(
        self,
        ledger_id: int,
        payloads: Sequence[bytes],
        *,
        password: str | None = None,
        expect: int | None = None,
    ) -> EntriesAppended:
        if self.gate is not None:
            self.appending += 1
            await self.gate.wait()
            self.appending -= 1
        if self.fails is not None:
            raise self.fails
        ledger = await self._open(ledger_id, password)
        if ledger.state is State.CLOSED:
            raise LedgerClosed(ledger_id=ledger_id, last_entry=ledger.last_entry)
        entries = self.entries[ledger_id]
        first = len(entries)
        if expect not in (None, first):
            raise UnexpectedEntryId(ledger_id=ledger_id, next_entry_id=first)
        entries.extend(payloads)
        async with self.changed:
            self.changed.notify_all()
        return EntriesAppended(first, len(entries) - 1, len(entries) - 1)

    async def transaction_of(self, ledger_id: int) -> str | None:
        del ledger_id
        return None

    async def read(
        self,
        ledger_id: int,
        first: int,
        *,
        last: int | None = None,
        limit: int = 100,
        max_bytes: int = 1 << 20,
        password: str | None = None,
    ) -> ReadResult:
        ledger = await self._open(ledger_id, password)
        entries = self.entries[ledger_id]
        chosen: list[bytes] = []
        size = 0
        for payload in entries[first : None if last is None else last + 1][:limit]:
            size += len(payload)
            if chosen and size > max_bytes:
                break
            chosen.append(payload)
        closed = ledger.state is State.CLOSED
        run = (
            make(
                ledger_id=ledger_id,
                first_entry=first,
                last_add_confirmed=first - 1,
                length_before=0,
                payloads=chosen,
                codec=Codec(ledger.digest, b"k"),
            )
            if chosen
            else None
        )
        source: LacSource = "metadata" if closed else "writer"
        return ReadResult(
            runs=() if run is None else (run,),
            next=first + len(chosen),
            last_add_confirmed=len(entries) - 1,
            closed=closed,
            lac_source=source,
            last_entry=ledger.last_entry,
        )

    async def entry(
        self, ledger_id: int, entry_id: int, *, password: str | None = None
    ) -> ReadResult:
        found = await self.read(ledger_id, entry_id, limit=1, password=password)
        if not found.runs:
            missing = NoSuchEntry if found.closed else NotYetConfirmed
            raise missing(ledger_id=ledger_id, entry_id=entry_id)
        return found

    async def last_add_confirmed(
        self,
        ledger_id: int,
        *,
        after: int | None = None,
        wait_s: float = 0.0,
        password: str | None = None,
    ) -> LedgerView:
        await self._open(ledger_id, password)

        def is_done() -> bool:
            ledger = self.ledgers.get(ledger_id)
            return (
                after is None
                or ledger is None
                or ledger.state is State.CLOSED
                or len(self.entries[ledger_id]) - 1 > after
            )

        self.waiting += 1
        try:
            async with asyncio.timeout(max(wait_s, self.wait_s_min)), self.changed:
                await self.changed.wait_for(is_done)
        except TimeoutError:
            pass
        finally:
            self.waiting -= 1
        row = await self.get(ledger_id)
        closed = row.state is State.CLOSED
        return LedgerView(row, len(self.entries[ledger_id]) - 1, closed, "writer")

    async def close(self, ledger_id: int, *, password: str | None = None) -> LedgerMetadata:
        ledger = await self._open(ledger_id, password)
        if ledger.state is not State.CLOSED:
            entries = self.entries[ledger_id]
            length = sum(map(len, entries))
            closed = ledger.closed(last_entry=len(entries) - 1, length=length)
            self.ledgers[ledger_id] = replace(closed, version=ledger.version + 1)
        async with self.changed:
            self.changed.notify_all()
        return self.ledgers[ledger_id]

    async def recover(
        self, ledger_id: int, *, password: str | None = None, declare_lost: Sequence[str] = ()
    ) -> LedgerMetadata:
        del declare_lost
        return await self.close(ledger_id, password=password)

    async def change_password(
        self, ledger_id: int, new: str, *, password: str | None = None, once: Once | None = None
    ) -> LedgerMetadata:
        del new, once
        return await self._open(ledger_id, password)

    async def accept_loss(
        self,
        ledger_id: int,
        first: int,
        last: int,
        *,
        password: str | None = None,
        declare_lost: Sequence[str] = (),
    ) -> LedgerMetadata:
        ledger = await self._open(ledger_id, password)
        if ledger.last_entry is None or last > ledger.last_entry:
            raise LossNotProven(ledger_id=ledger_id)
        changed = ledger.given_up(first, last, tuple(declare_lost))
        self.ledgers[ledger_id] = changed
        return changed

    async def delete(self, ledger_id: int, *, password: str | None = None) -> None:
        await self._open(ledger_id, password)
        del self.ledgers[ledger_id]
        self.deleted.add(ledger_id)

    async def services(self) -> ServiceList:
        return ServiceList(services=())

    async def refresh(self) -> BookieList:
        return BookieList(
            bookies=tuple(
                BookieInfo(id=f"b{n}@1", state="writable", url="http://127.0.0.1:1", free_bytes=1)
                for n in range(BOOKIES)
            )
        )

    async def cluster(self) -> dict[str, Any]:
        return {"services": [], "under_replicated": []}

    async def ready(self) -> None:
        if isinstance(self.fails, QuorumLogError):
            raise self.fails

    async def drain(self) -> None:
        return None

    def waits_for(self) -> Sequence[str]:
        return ()
