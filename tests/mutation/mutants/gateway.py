"""Mutants of a gateway's own guards (rules 5, 8, 16a, 22 and 23). Each has a claim: a few calls of the
shipped classes that go wrong without the guard. A claim gives what went wrong, or None.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, cast

from quorumlog.errors import DatabaseWentBack, NotEnoughBookies, NotYetConfirmed, QuorumLogError
from quorumlog.protocol import writer as machine
from quorumlog.protocol.clock import DatabaseClock
from quorumlog.protocol.heads import LedgerHead, LogHead
from quorumlog.protocol.log import LogMetadata
from quorumlog.protocol.log.job import Job
from quorumlog.protocol.log.messages import HeadLearned, RowChanged, Ticked
from quorumlog.protocol.log.owner import Owner
from quorumlog.protocol.log.tenancy import Tenancy
from quorumlog.protocol.messages import MissedRange, Status
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.protocol.once import Once
from quorumlog.wire.bodies import BookieInfo, BookieList, BookieState
from services.gateway.engine import ledger_reads
from services.gateway.engine.ends import Ends
from services.gateway.engine.handle import WriteHandle
from services.gateway.engine.ledger_reads import LedgerReads
from services.gateway.engine.rows import LedgerRows, Rereads
from services.gateway.logs.manager import LogManager
from services.gateway.logs.ownership import Ownership
from services.gateway.logs.store import LogRows
from services.gateway.logs.sweep import Sweep
from tests.model.logs.model import Gateway, Store
from tests.mutation.mutants.guards import always
from tests.mutation.mutants.hunt import Mutant, Patch, stand_in
from tests.support.waiting import turns
from tests.unit.gateway.engine.hands import (
    ME,
    MEMBERS,
    ROW,
    Hand,
    Lacs,
    Primary,
    Reported,
    closed,
    handle_of,
    reading_of,
    rows_of,
)
from tests.unit.logs.test_manager import a_cluster, call

_TURNS: Final = 20
"""Of the event loop: by then a call has come as far as it comes without an answer."""
SOON_S: Final = 30.0
"""Of virtual time: by then whatever waits for nobody is done."""

Claim = Callable[[], Coroutine[Any, Any, str | None]]

# --- rule 16a: what a row of the primary ends -----------------------------------------------------


async def a_displaced_owner_ends_after_a_gap() -> str | None:
    async with a_cluster() as (_, (one, two)):
        await one.logs.append("log", call("a"))
        sweep = Sweep(one.logs, Store(one))
        await sweep.sweep_logs()
        await take(two)
        one.logs.rows.take_heard()  # the notification is lost

        one.logs.rows.gap()
        await sweep.sweep_logs()
        await asyncio.sleep(SOON_S)

        return lives_on(one)


async def rows_are_reread_after_a_gap() -> str | None:
    asked: list[int] = []

    async def read(keys: Sequence[int]) -> Mapping[int, int]:
        asked.extend(keys)
        return {}

    rereads = Rereads[int](lambda: (1,), read, lambda _head: None)
    task = asyncio.create_task(rereads.run())
    rereads.gap()
    await asyncio.sleep(SOON_S)
    task.cancel()
    return None if asked == [1] else "no row was read"


async def a_displaced_owner_ends_with_the_sweep() -> str | None:
    async with a_cluster() as (_, (one, two)):
        await one.logs.append("log", call("a"))
        await take(two)

        await Sweep(one.logs, Store(one)).sweep_logs()
        await asyncio.sleep(SOON_S)

        return lives_on(one)


async def an_owner_of_a_log_that_was_made_again_ends_with_the_sweep() -> str | None:
    async with a_cluster() as (_, (one, two)):
        await one.logs.append("log", call("a"))
        settings = (await one.logs.get("log")).log.settings
        await two.logs.delete("log")
        await two.logs.put("log", settings)

        await Sweep(one.logs, Store(one)).sweep_logs()
        await asyncio.sleep(SOON_S)

        return lives_on(one)


async def a_row_above_ends_a_handle() -> str | None:
    for head in (
        LedgerHead(ROW.ledger_id, 3, State.IN_RECOVERY, ME.id),
        LedgerHead(ROW.ledger_id, 3, State.CLOSED, ME.id),
        LedgerHead(ROW.ledger_id, 3, State.OPEN, "another"),
        LedgerHead(ROW.ledger_id, 3, None),
    ):
        hand = Hand()
        handle = handle_of(hand, Reported())
        pending = handle.append([b"x"])
        await turns()
        handle.learn(head)
        for done in hand.adds:
            done(Status.OK)
        if handle.is_live or not isinstance(pending.exception(), QuorumLogError):
            return f"rule 16a: a handle acknowledges after {head}"
    return None


async def a_row_that_is_no_news_ends_no_handle() -> str | None:
    for head in (
        LedgerHead(ROW.ledger_id, 2, State.IN_RECOVERY, ME.id),
        LedgerHead(ROW.ledger_id, 1, None),
        LedgerHead(ROW.ledger_id, 3, State.OPEN, ME.id),
    ):
        handle = handle_of(Hand(), Reported())
        handle.learn(head)
        if not handle.is_live:
            return f"rule 16a: a handle has ended by {head}"
    return None


async def a_writers_own_close_is_not_taken_for_anothers() -> str | None:
    reported = Reported()
    handle = handle_of(Hand(), reported)
    closing = asyncio.ensure_future(handle.close())
    await turns()
    handle.learn(LedgerHead(ROW.ledger_id, 3, State.CLOSED, ME.id))
    is_over = closing.done() or reported.failed
    closing.cancel()
    return "rule 16a: a writer's own close has ended its handle" if is_over else None


async def an_owners_own_roll_is_not_taken_for_anothers() -> str | None:
    async with a_cluster() as (cluster, (one, _)):
        await one.logs.append("log", call("a"))
        owner = owner_of(one)
        read_by: list[LogHead] = []

        async def read_in_between(
            log: LogMetadata, once: Once | None = None
        ) -> LogMetadata | RowChanged:
            done = await Store(one).cas(log, once)
            # Read by the background meanwhile: the roll has not heard of its own change yet.
            read_by.append(LogHead.of(cluster.logs["log"]))
            one.logs.ownership.handle("log").hear(HeadLearned(read_by[-1]))
            return done

        cast(Any, one.logs)._store.cas = read_in_between
        await one.logs.roll("log")
        assert len(read_by) == 2
        return "rule 16a: its own roll has ended an owner" if owner.is_ended else None


async def an_old_row_ends_no_owner() -> str | None:
    async with a_cluster() as (_, (one, two)):
        await two.logs.append("log", call("a"))
        old = LogHead.of((await one.logs.get("log")).log)
        await take(one)

        owner = owner_of(one)
        one.logs.ownership.handle("log").hear(HeadLearned(old))

        is_over = owner.is_ended
        return "rule 16a: a row older than its own has ended an owner" if is_over else None


# --- rule 18f: a ledger that the database lost before anybody else heard of it ------------------------


async def take(gateway: Gateway) -> None:
    await gateway.take_over("log")


def owner_of(gateway: Gateway) -> Owner:
    owner = gateway.logs.ownership.handle("log").owner
    assert owner is not None
    return owner


def lives_on(gateway: Gateway) -> str | None:
    owner = gateway.logs.ownership.handle("log").owner
    if owner is None:
        return None
    return "rule 16a: an owner that was displaced lives on"


async def what_was_missed_outlives_its_handle() -> str | None:
    hand = Hand()
    handle = handle_of(hand, Reported())
    pending = handle.append([b"x"])
    await turns()
    for done in hand.adds[:2]:
        done(Status.OK)
    await pending
    handle.learn(LedgerHead(ROW.ledger_id, 3, State.IN_RECOVERY, ME.id))
    if handle.machine.missed == (MissedRange(MEMBERS[2], 0, 0),):
        return None
    return f"rule 8: the third bookie lacks entry 0, and its writer says {handle.machine.missed}"


# --- rule 5: what a gateway that is not the writer may say ----------------------------------------


async def the_lac_of_one_bookie_is_not_enough() -> str | None:
    confirmed = partial(cast(Any, ledger_reads).confirmed_by_bookies, ROW)
    # The first to answer lacks what the two others have: it had been away.
    reported = await confirmed(Lacs(-1, 5, 5))
    if reported != 5:
        return f"rule 5: the LAC is {reported}, as one bookie says, and two know 5"
    alone = await confirmed(Lacs(5, None, None))
    return None if alone is None else f"rule 5: one bookie of three says the LAC: {alone}"


async def a_negative_follows_the_primary() -> str | None:
    """The writer is here and knows nothing of the recovery that has kept what was in flight."""
    primary = Primary(ROW)
    rows = rows_of(primary)
    await rows.fresh(ROW.ledger_id)
    primary.row = closed(1)
    handle = SimpleNamespace(is_live=True, last_add_confirmed=0, row=ROW, recent=lambda *_asked: [])
    try:
        await reading_of(rows, {ROW.ledger_id: handle}).entry(ROW.ledger_id, 1)
    except NotYetConfirmed as error:
        return f"rule 5: {error.detail}, and the ledger is closed behind it"
    except QuorumLogError:
        pass  # no bookie serves it here
    return None


async def a_cached_row_never_goes_back() -> str | None:
    rows = rows_of(Primary(ROW))
    rows.put(closed(1))
    rows.put(ROW)  # read before it was closed, on another connection
    known = await rows.row(ROW.ledger_id)
    return None if known.version == 3 else f"the row goes back to version {known.version}"


async def an_end_that_the_database_lacks_is_not_told() -> str | None:
    for row in (ROW, closed(2)):
        hand = Hand()
        ends = Ends(rows_of(Primary(row)), hand.ports)
        for ask in (ends.kept, ends.reported):
            asking = asyncio.ensure_future(ask(closed(1)))
            await turns(_TURNS)
            hand.keep_all()
            try:
                reported = await asking
            except DatabaseWentBack:
                continue
            return f"rule 18b: {reported.last_entry} is told, and the database has {row.last_entry}"
    return None


async def a_clock_that_jumped_makes_nothing_old() -> str | None:
    clock = DatabaseClock()
    clock.hear(0, wall_ms=0, monotonic_s=0)
    later_ms = 30 * 24 * 3600 * 1000
    if clock.hear(later_ms, wall_ms=later_ms, monotonic_s=5):
        return None
    return "rule 26c: a clock that is 30 days ahead after 5 s makes records 30 days old"


@stand_in
def believed(
    _original: Any, self: DatabaseClock, database_ms: float, *, monotonic_s: float, **_: float
) -> str:
    """The clock is right whatever it says."""
    self._trusted_ms, self.doubt = database_ms - monotonic_s * 1000, ""
    return ""


async def the_retention_waits_for_a_clock_in_doubt() -> str | None:
    async with a_cluster() as (cluster, (one, _)):
        await one.logs.append("log", call("a"))
        await one.logs.roll("log")
        await one.logs.change("log", {"retention_seconds": 3600})
        one.logs._store.clock = cast(Any, SimpleNamespace(doubt="it jumped"))
        cluster.ahead_ms = 30 * 24 * 3600 * 1000
        await Sweep(one.logs, Store(one)).sweep_logs()
        first = cluster.logs["log"].first_offset
        return None if first == 0 else "rule 26c: a log is emptied by a clock that jumped"


async def an_end_with_too_few_copies_is_not_known_as_kept() -> str | None:
    hand = Hand()
    ends = Ends(rows_of(Primary(closed(1))), hand.ports)
    for _ in range(2):
        asking = asyncio.ensure_future(ends.reported(closed(1)))
        await turns(_TURNS)
        if not hand.copies:
            return "rule 18b: one bookie keeps an end, and later readers are told it without copies"
        hand.copies.pop()(Status.OK)
        while hand.copies:
            hand.copies.pop()(Status.UNKNOWN)
        await asking
    return None


def however_few(original: Any) -> Any:
    """An end is remembered as kept whoever has confirmed a copy."""
    return lambda self, row, _copies: original(self, row, row.quorum.ensemble_size)


async def an_end_is_told_to_readers_once_it_is_kept() -> str | None:
    hand = Hand()
    reading = reading_of(rows_of(Primary(closed(1))), {}, hand)
    asks: tuple[Callable[[], Coroutine[Any, Any, Any]], ...] = (
        lambda: reading.last_add_confirmed(ROW.ledger_id),
        lambda: reading.read(ROW.ledger_id, 2),
        lambda: reading.writers_lac(ROW.ledger_id, after=None, wait_s=0),
    )
    asking = [asyncio.ensure_future(ask()) for ask in asks]
    await turns(_TURNS)
    early = [task for task in asking if task.done()]
    hand.keep_all()
    await asyncio.gather(*asking)
    sent = len(hand.copies)
    await reading.last_add_confirmed(ROW.ledger_id)
    if len(hand.copies) > sent:
        return "each reader of an end has its copies sent again"
    return "rule 18b: a reader is told an end that the database alone knows" if early else None


async def an_entry_in_flight_is_shown_to_nobody() -> str | None:
    hand, rows = Hand(), rows_of(Primary(ROW))
    await rows.fresh(ROW.ledger_id)
    handle = handle_of(hand, Reported())
    reading = reading_of(rows, {ROW.ledger_id: handle})
    for payload in (b"a", b"b"):
        _ = handle.append([payload])
        await turns()
    first, second = hand.adds[: len(MEMBERS)], hand.adds[len(MEMBERS) :]
    for done in first[:2]:
        done(Status.OK)
    early = await reading.read(ROW.ledger_id, 0)
    if early.next > 1:
        return "I6: a reader is shown an entry that may still be lost"
    for done in second[:2]:
        done(Status.OK)
    later = await reading.read(ROW.ledger_id, 0)
    return None if later.next == 2 else "what its writer has acknowledged is not shown"


# --- rules 22 and 23 ------------------------------------------------------------------------------


async def no_roll_while_too_few_bookies_live() -> str | None:
    async with a_cluster() as (cluster, (one, _)):
        await one.logs.append("log", call("a"))
        before = cluster.logs["log"]

        async def two_live() -> BookieList:
            states: tuple[BookieState, ...] = ("writable", "writable", "lost")
            return BookieList(
                bookies=tuple(
                    BookieInfo(id=member, state=state, url="")
                    for member, state in zip(MEMBERS, states, strict=True)
                )
            )

        cast(Any, one).directory.refresh = two_live
        try:
            await one.logs.forwarded("log", None)
        except NotEnoughBookies:
            after = await one.logs.append("log", call("b"))
            if cluster.logs["log"] != before or after.ledger_id != before.items[-1].ledger_id:
                return "rule 23: a roll that was refused has changed the log"
            return None
        return "rule 23: a log has rolled onto two bookies of three"


async def one_silence_is_not_the_end_of_an_owner() -> str | None:
    async with a_cluster() as (_, (one, two)):
        asked: list[str] = []

        async def busy(writer: Any) -> bool:
            asked.append(writer.id)
            return len(asked) > 1

        cast(Any, two.logs.ownership)._peers.is_alive = busy
        if await two.logs.ownership.is_alive(one.writer):
            return None
        return "rule 22: an owner that was silent once counts as gone"


# --- the guards, taken out ------------------------------------------------------------------------


@stand_in
def only_told(_original: Any, self: Ownership, row: LogMetadata) -> bool:
    """A sweep sees to its own owners, and lets those live that others have displaced."""
    owner = self.owner(row.name)
    if owner is None or not owner.is_mine(row):
        return False
    self.notify(row.name, Ticked())
    return True


@stand_in
def any_version(original: Any, self: Any, head: Any, *now: Any) -> None:
    """How old a row is does not matter."""
    known = self.log if isinstance(self, Owner) else self.row
    original(self, replace(head, version=known.version + 1), *now)


def whoever_closes(_original: Any) -> Any:
    """A writer's close of its own is not told from another's."""
    return property(lambda _self: False)


def unreported(_original: Any) -> Any:
    """Whoever ends the ledger is left to find what its writer knew."""
    return property(lambda _self: ())


def only_the_written(_original: Any) -> Any:
    """The ledger that a roll has made ahead is not known for this owner's."""
    return lambda self, head: head.last_ledger == self.ledger_id


@stand_in
async def whoever_answers(_original: Any, row: LedgerMetadata, bookies: Any) -> int | None:
    """The first bookie that answers says the LAC."""
    first: list[int] = []
    for member in row.last_fragment.bookies:
        bookies.read_lac(member, row.ledger_id, lambda _status, lac: first.append(lac))
    return first[0]


@stand_in
async def from_the_cache(
    original: Any, self: LedgerReads, ledger_id: int, *, is_strict: bool = False
) -> Any:
    """A negative follows whatever row is known."""
    del is_strict
    return await original(self, ledger_id)


@stand_in
def whatever_was_sent(
    _original: Any, self: WriteHandle, first: int, _last: int, _bytes_max: int
) -> Any:
    """Memory has what is on its way to bookies too, and shows it."""
    runs = [pending.run for pending in self.machine._window.runs.values()]
    return [run for run in runs if run.first >= first]


@stand_in
async def as_it_was_answered(
    _original: Any, _self: Ends, row: LedgerMetadata, _copies: int
) -> LedgerMetadata:
    """The answer to a close is told however old it is."""
    return row


@stand_in
async def as_it_was_read(_original: Any, _self: Ends, row: LedgerMetadata) -> LedgerMetadata:
    """A reader is told the end of the row that was read."""
    return row


@stand_in
def whatever_comes(_original: Any, self: LedgerRows, row: LedgerMetadata) -> None:
    """The cache keeps the row that came last."""
    self._rows[row.ledger_id] = row


@stand_in
async def asked_once(_original: Any, self: Ownership, writer: Any) -> bool:
    """An owner is asked once whether it lives."""
    return await self._peers.is_alive(writer)


def enough_anyway(original: Any) -> Any:
    """However many bookies live, a roll goes on."""
    return lambda self, _writable, held: original(self, 99, held)


_GUARDS: Final[Sequence[tuple[Mutant, Claim]]] = (
    (
        Patch(Rereads, "gap", always(None)).mutant(
            "a gateway does not reread metadata after a gap in the changes", "rule 16a"
        ),
        rows_are_reread_after_a_gap,
    ),
    (
        Patch(LogRows, "gap", always(None)).mutant(
            "a sweep does not read all logs after a gap in the changes", "rule 16a"
        ),
        a_displaced_owner_ends_after_a_gap,
    ),
    (
        Patch(Ownership, "tick", only_told).mutant(
            "a sweep does not end an owner that another gateway displaced", "rules 16a and 22"
        ),
        a_displaced_owner_ends_with_the_sweep,
    ),
    (
        Patch(Owner, "_learn", always(None)).mutant(
            "an owner continues whatever its log's metadata states", "rules 16a and 22"
        ),
        an_owner_of_a_log_that_was_made_again_ends_with_the_sweep,
    ),
    (
        Patch(WriteHandle, "learn", always(None)).mutant(
            "a handle continues whatever its ledger's metadata states", "rule 16a"
        ),
        a_row_above_ends_a_handle,
    ),
    (
        Patch(WriteHandle, "learn", any_version).mutant(
            "outdated metadata ends a handle", "rule 16a"
        ),
        a_row_that_is_no_news_ends_no_handle,
    ),
    (
        Patch(Owner, "_learn", any_version).mutant("outdated metadata ends an owner", "rule 16a"),
        an_old_row_ends_no_owner,
    ),
    (
        Patch(machine.LedgerWriter, "is_closing_row", whoever_closes).mutant(
            "a writer takes its own close for that of another process", "rule 16a"
        ),
        a_writers_own_close_is_not_taken_for_anothers,
    ),
    (
        Patch(machine.LedgerWriter, "missed", unreported).mutant(
            "an ended handle forgets which entries members missed", "rule 8"
        ),
        what_was_missed_outlives_its_handle,
    ),
    (
        Patch(Tenancy, "may_be_own", only_the_written).mutant(
            "an owner takes its own roll for that of another owner", "rules 16a and 23"
        ),
        an_owners_own_roll_is_not_taken_for_anothers,
    ),
    (
        Patch(ledger_reads, "confirmed_by_bookies", whoever_answers).mutant(
            "a gateway takes the LAC from one bookie's answer", "rules 5 and 13"
        ),
        the_lac_of_one_bookie_is_not_enough,
    ),
    (
        Patch(LedgerReads, "_view", from_the_cache).mutant(
            "a gateway denies an entry because of cached metadata", "rule 5"
        ),
        a_negative_follows_the_primary,
    ),
    (
        Patch(LedgerRows, "put", whatever_comes).mutant(
            "cached metadata is replaced by an older version", "rule 5"
        ),
        a_cached_row_never_goes_back,
    ),
    (
        Patch(WriteHandle, "recent", whatever_was_sent).mutant(
            "a gateway serves entries from memory that are not confirmed", "I6"
        ),
        an_entry_in_flight_is_shown_to_nobody,
    ),
    (
        Patch(Ends, "_read", as_it_was_answered).mutant(
            "a gateway reports an end that the database lost before it was copied", "rule 18b"
        ),
        an_end_that_the_database_lacks_is_not_told,
    ),
    (
        Patch(Ends, "reported", as_it_was_read).mutant(
            "a reader gets a ledger's end before members have the metadata", "rule 18b"
        ),
        an_end_is_told_to_readers_once_it_is_kept,
    ),
    (
        Patch(DatabaseClock, "hear", believed).mutant(
            "a gateway trusts a database clock that jumped", "rule 26c"
        ),
        a_clock_that_jumped_makes_nothing_old,
    ),
    (
        Patch(LogManager, "deletes_by_age", lambda _original: property(lambda _self: True)).mutant(
            "retention deletes by age although the clock is in doubt", "rule 26c"
        ),
        the_retention_waits_for_a_clock_in_doubt,
    ),
    (
        Patch(Ends, "_read", however_few).mutant(
            "a gateway remembers an end with too few copies as kept", "rule 18b"
        ),
        an_end_with_too_few_copies_is_not_known_as_kept,
    ),
    (
        Patch(Job, "_counted", enough_anyway).mutant(
            "a log rolls although too few bookies are live", "rule 23"
        ),
        no_roll_while_too_few_bookies_live,
    ),
    (
        Patch(Ownership, "is_alive", asked_once).mutant(
            "an owner counts as gone after its first missed answer", "rule 22"
        ),
        one_silence_is_not_the_end_of_an_owner,
    ),
)

GATEWAY_MUTANTS: Final[tuple[Mutant, ...]] = tuple(mutant for mutant, _ in _GUARDS)
GATEWAY_CLAIMS: Final = {mutant.name: claim for mutant, claim in _GUARDS}
