"""The bookie's HTTP routes: the channel, the same operations as plain HTTP, and administration."""

import base64
import hashlib
import logging
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Final

from aiohttp import hdrs, web

from quorumlog import errors
from quorumlog.net import bodies
from quorumlog.net.bodies import answer, parsed
from quorumlog.net.framed import Framed, accept
from quorumlog.net.identity import BOOKIES, GATEWAYS, HEALERS, METADATA, OPERATORS, WRITERS, Role
from quorumlog.net.operations import Handler, Routes
from quorumlog.net.parameters import (
    Given,
    Parameter,
    invalid,
    matching,
    path_id,
    query_choice,
    query_integer,
)
from quorumlog.protocol.ids import ID_MAX, NO_ENTRY
from quorumlog.protocol.messages import Status
from quorumlog.protocol.ranges import union
from quorumlog.protocol.record import BadRun, Entry, Run
from quorumlog.protocol.replica import AddAsked, FenceAsked, LacAsked, ReadAsked, Verdict
from quorumlog.wire import versions
from quorumlog.wire.bodies import (
    Body,
    BookieStatePut,
    BookieWitnesses,
)
from quorumlog.wire.frames import BadFrame
from quorumlog.wire.rebuild_bodies import DigestsAsked, DigestsBody, Range, RangeDigest, RowsPage
from services.bookie import channel
from services.bookie.bodies import (
    DamageBody,
    EntriesBody,
    EntryBody,
    HeldBody,
    HeldList,
    InfoBody,
    MaintenancePut,
    ProcessBody,
    ScrubProgress,
    VerdictBody,
)
from services.bookie.index import IndexRow
from services.bookie.pending import answered
from services.bookie.runtime import BookieRuntime
from services.bookie.store import ReadAnswer, Store

log = logging.getLogger(__name__)

BOOKIE: Final = web.AppKey("bookie", BookieRuntime)


def _key_of(text: str, pointer: str) -> bytes:
    try:
        key = base64.b64decode(text, validate=True)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise invalid(pointer, "must be 32 bytes in base64")
    return key


_MEMBER: Final = r"[A-Za-z0-9][A-Za-z0-9._-]*@[0-9]{1,18}"
LEDGER_ID: Final = path_id("ledger_id", "The ledger.")
KEY: Final = Parameter(
    "X-Ledger-Key",
    "header",
    _key_of,
    {"type": "string", "contentEncoding": "base64"},
    "The ledger's key, 32 bytes; zeros by default.",
    bytes(32),
)
MEMBER: Final[Parameter[str | None]] = Parameter(
    "X-Member",
    "header",
    lambda text, pointer: matching(text, pointer, _MEMBER),
    {"type": "string", "pattern": f"^{_MEMBER}$"},
    "The incarnation to ask, as `name@incarnation`; by default the running one.",
    None,
)
KIND: Final = query_choice(
    "kind",
    ("normal", "recovery", "repair"),
    "Who adds: the writer (normal), a recovery or a repair.",
    "normal",
)
FROM: Final = query_integer("from", 0, ID_MAX, "The first entry.", 0)
TO: Final = query_integer("to", 0, ID_MAX, "The last entry, inclusive; by default `from`.")
AFTER: Final = query_integer(
    "after", NO_ENTRY, ID_MAX, "Only ledgers with ids above this one.", NO_ENTRY
)
LIMIT: Final = query_integer("limit", 1, 10_000, "Maximum number of ledgers in the page.", 100)

_HTTP_STATUS: Final = {
    Status.OK: 200,
    Status.NO_ENTRY: 404,
    Status.FENCED: 409,
    Status.NOT_MINE: 409,
    Status.CONFLICT: 409,
    Status.WRONG_KEY: 403,
    Status.READ_ONLY: 503,
    Status.UNKNOWN: 503,
}
_DIGEST_HEAD: Final = struct.Struct(">qqqI")
_RANGES_MAX: Final = 1000
_READ_BYTES: Final = 1024 * 1024
"""Maximum size of the entries in one JSON answer, and of entries read at a time for a digest."""

_LEDGER: Final = "/v1/ledgers/{ledger_id}"
ROUTES: Final = Routes()


def _asking(
    path: str, gives: type[Body], *given: Parameter[Any], roles: frozenset[Role] = WRITERS
) -> Callable[[Handler], Handler]:
    """Declare a route about one ledger; refusals have a success's body, but another HTTP status."""
    return ROUTES.add(path, LEDGER_ID, *given, MEMBER, roles=roles, gives=gives, refuses_with=gives)


@ROUTES.add("GET /v1/channel", roles=WRITERS, status=101)
async def open_channel(request: web.Request, _given: Given) -> web.StreamResponse:
    """Upgrade the connection to pipelined frames (`quorumlog-channel/1`; see `wire/frames.py`)."""
    store = _store(request)
    reported = ",".join(request.headers.getall(hdrs.UPGRADE, ()))
    offered = [name.strip().lower() for name in reported.split(",")]
    spoken = versions.upgrades(versions.CHANNEL)
    for name in spoken:
        if name in offered:
            peer = channel.Peer(store)
            framed, answer = await accept(request, peer, name)
            peer.connection = framed
            await _serve(request.app[BOOKIE], framed)
            return answer
    if versions.versions_in(offered):
        request.app[BOOKIE].channel_refusals += 1
        raise errors.BadRequest(
            f"this bookie supports channel versions {versions.shown(versions.CHANNEL)}, and the caller"
            f" {versions.shown(versions.versions_in(offered))}: upgrade one of them (docs/guides/upgrades.md)",
            headers={hdrs.UPGRADE: ", ".join(spoken)},
        )
    raise errors.BadRequest(
        f"the header Upgrade is required on this route: send Upgrade: {spoken[0]}"
    )


async def _serve(bookie: BookieRuntime, connection: Framed) -> None:
    """Wait until a channel ends, then close the connection, so that the peer stops waiting."""
    bookie.channels.add(connection)
    try:
        await connection.closed
    except BadFrame as error:
        log.warning("channel-bad-frame", extra={"why": str(error)})
    except OSError:
        pass  # the peer has gone
    except Exception:
        log.exception("channel-broke")
    finally:
        bookie.channels.discard(connection)
        connection.close()


@_asking(f"POST {_LEDGER}/entries", VerdictBody, KIND, KEY)
async def add_entries(request: web.Request, given: Given) -> web.StreamResponse:
    """Store a run's entries."""
    store = _store(request)
    ledger_id, kind = given[LEDGER_ID], given[KIND]
    try:
        run = Run(await bodies.read(request))
    except BadRun as error:
        raise errors.BadRequest(f"the body must be an encoded run of entries: {error}") from error
    if run.ledger_id != ledger_id:
        raise errors.InvalidRequest(f"the run must be of ledger {ledger_id} (got {run.ledger_id})")
    asked = AddAsked(
        given[MEMBER] or store.me, run, given[KEY], kind == "recovery", kind == "repair"
    )
    verdict = await answered(partial(store.add, asked))
    return _verdict(store, ledger_id, run.first, run.last, verdict)


@_asking(f"GET {_LEDGER}/entries", EntriesBody, FROM, TO)
async def read_entries(request: web.Request, given: Given) -> web.StreamResponse:
    """Return stored entries from `from` to `to`, and known absent ids; all others are unknown."""
    store = _store(request)
    ledger_id = given[LEDGER_ID]
    first, to = given[FROM], given[TO]
    last = first if to is None else to
    if last < first:
        raise invalid(TO.pointer, f"must be at least `from` ({first})")
    asked = ReadAsked(given[MEMBER] or store.me, first, last)
    found: ReadAnswer = await answered(partial(store.read, ledger_id, asked, _READ_BYTES))
    run = None if found.run is None else Run(found.run)
    entries = () if run is None else tuple(map(_entry_body, run.entries()))
    body = EntriesBody(
        bookie=store.me,
        ledger_id=ledger_id,
        first=first,
        last=last,
        status=found.status,
        last_add_confirmed=found.last_add_confirmed,
        entries=entries,
        absent=found.absent,
    )
    return answer(body, _HTTP_STATUS[found.status])


# The metadata service also sends this request, to fence a ledger that ends with an accepted loss.
@_asking(f"POST {_LEDGER}/fence", VerdictBody, KEY, roles=WRITERS | METADATA)
async def fence(request: web.Request, given: Given) -> web.StreamResponse:
    """Fence a ledger durably."""
    store = _store(request)
    return await _ask(store, given, FenceAsked(given[MEMBER] or store.me, given[KEY]))


@_asking(f"GET {_LEDGER}/last-add-confirmed", VerdictBody)
async def last_add_confirmed(request: web.Request, given: Given) -> web.StreamResponse:
    """Return the highest LAC of a ledger that this bookie has."""
    store = _store(request)
    return await _ask(store, given, LacAsked(given[MEMBER] or store.me))


@ROUTES.add("GET /v1/ledgers", AFTER, LIMIT, roles=HEALERS | OPERATORS, gives=HeldList)
async def list_ledgers(request: web.Request, given: Given) -> web.StreamResponse:
    """List the ledgers stored on this bookie, by id."""
    store = _store(request)
    held: list[HeldBody] = []
    more = None
    for ledger_id, row in store.holdings.ledgers(given[AFTER]):
        if len(held) == given[LIMIT]:
            more = held[-1].ledger_id
            break
        held.append(_held(store, ledger_id, row))
    return answer(HeldList(bookie=store.me, ledgers=tuple(held), next=more))


@ROUTES.add("GET /v1/rows", AFTER, LIMIT, roles=METADATA | OPERATORS, gives=RowsPage)
async def list_rows(request: web.Request, given: Given) -> web.StreamResponse:
    """Return copies of ledger metadata, keys and deleted ids, for a rebuild of the database (rule
    18d). The bookie responds even before it is registered.
    """
    bookie = request.app[BOOKIE]
    store, cookie = bookie.replayed_store, bookie.cookie
    if store is None:
        raise errors.ReadOnly("this bookie is starting and is still replaying its log: retry later")
    found, following = await store.holdings.rows_page(given[AFTER], given[LIMIT])
    page = RowsPage(
        bookie=store.me if cookie is None else cookie.member,
        cookie=None if cookie is None else cookie.cookie,
        log_end=store.position.sequence,
        may_lack=bookie.may_lack,
        # Only the first page has witnesses, because a rebuild needs them once.
        witnesses=await bookie.known_witnesses() if given[AFTER] < 0 else (),
        ledgers=tuple(found),
        next=following,
    )
    return answer(page)


@ROUTES.add(f"GET {_LEDGER}", LEDGER_ID, roles=WRITERS | OPERATORS, gives=HeldBody)
async def get_ledger(request: web.Request, given: Given) -> web.StreamResponse:
    """Return a summary of a ledger's data on this bookie."""
    store = _store(request)
    ledger_id = given[LEDGER_ID]
    _check_not_withheld(store, ledger_id)
    _check_not_deleted(store, ledger_id)
    row = store.holdings.row(ledger_id)
    if row is None:
        raise errors.NoSuchLedger(
            f"{store.me} stores no data of ledger {ledger_id}", ledger_id=ledger_id
        )
    ranges = (await store.holdings.ranges(ledger_id, 0, ID_MAX, _RANGES_MAX))[:_RANGES_MAX]
    return answer(_held(store, ledger_id, row).model_copy(update={"ranges": ranges}))


@ROUTES.add(
    f"POST {_LEDGER}/digests", LEDGER_ID, roles=WRITERS, takes=DigestsAsked, gives=DigestsBody
)
async def digest_ranges(request: web.Request, given: Given) -> web.StreamResponse:
    """Return digests of ranges of entries, for comparing replicas."""
    store = _store(request)
    ledger_id = given[LEDGER_ID]
    asked = parsed(await bodies.read(request), DigestsAsked)
    _check_not_deleted(store, ledger_id)
    digests = [await _digest(store, asked, ledger_id, span) for span in asked.ranges]
    # The bookie may have begun to drop the ledger while the digests were computed.
    _check_not_withheld(store, ledger_id)
    row = store.holdings.row(ledger_id)
    body = DigestsBody(
        bookie=store.me,
        ledger_id=ledger_id,
        limbo=row is not None and row.is_limbo,
        digests=tuple(digests),
    )
    return answer(body)


@ROUTES.add(
    "PUT /v1/state",
    roles=OPERATORS | GATEWAYS,
    takes=BookieStatePut,
    gives=InfoBody,
    is_audited=True,
)
async def put_state(request: web.Request, given: Given) -> web.StreamResponse:
    """Set the bookie's mode (`writable`, `read-only` or `draining`), which survives restarts."""
    _store(request)
    wanted = parsed(await bodies.read(request), BookieStatePut)
    request.app[BOOKIE].set_state(wanted.state)
    return await info(request, given)


@ROUTES.add("GET /v1/process", roles=BOOKIES | OPERATORS, gives=ProcessBody)
async def process(request: web.Request, _given: Given) -> web.StreamResponse:
    """Identify the process at this address, which a starting process checks (rule 15a)."""
    bookie = request.app[BOOKIE]
    return answer(ProcessBody(bookie=bookie.config.bookie_name, process=bookie.process))


@ROUTES.add("GET /v1/witnesses", roles=METADATA, gives=BookieWitnesses)
async def witnesses(request: web.Request, _given: Given) -> web.Response:
    """Return the bookie's witnesses of the metadata database (rule 18a), even during startup."""
    return answer(request.app[BOOKIE].witnesses())


@ROUTES.add("GET /v1/info", roles=OPERATORS | GATEWAYS, gives=InfoBody)
async def info(request: web.Request, _given: Given) -> web.StreamResponse:
    """Return the state of this bookie."""
    bookie = request.app[BOOKIE]
    store = _store(request)
    position, limbo = store.position, bookie.limbo
    copied = store.counters["limbo_copied_entries"]
    scrub = ScrubProgress() if bookie.scrubber is None else bookie.scrubber.progress
    return answer(
        InfoBody(
            bookie=store.me,
            cluster_id=bookie.cluster_id,
            state=bookie.state,
            zone=bookie.config.zone,
            durability=bookie.config.durability,
            free_bytes=store.disk.free_bytes(),
            read_only_below_bytes=store.disk.options.read_only_below_bytes,
            disk_low=store.disk.is_low,
            log_segment=position.segment,
            log_offset=position.offset,
            pending_bytes=store.pending.bytes,
            was_clean=store.replayed.was_clean,
            copied_records=store.replayed.copied_records,
            limbo=None if limbo is None else replace(limbo.progress, copied_entries=copied),
            scrub=replace(scrub, paused=bookie.pace.is_paused),
            damages=store.damages.count,
            counters=dict(store.counters),
        )
    )


@ROUTES.add("GET /v1/damage", roles=HEALERS | OPERATORS | GATEWAYS, gives=DamageBody)
async def damage(request: web.Request, _given: Given) -> web.StreamResponse:
    """List the damaged entries and stretches of the log; they must be repaired from peers."""
    store = _store(request)
    damages = store.damages
    return answer(
        DamageBody(
            bookie=store.me,
            entries=tuple(damages.lost()),
            stretches=tuple(damages.stretches()),
            is_cut=damages.is_cut,
        )
    )


@ROUTES.add(
    "PUT /v1/maintenance",
    roles=OPERATORS | GATEWAYS,
    takes=MaintenancePut,
    gives=InfoBody,
    is_audited=True,
)
async def put_maintenance(request: web.Request, given: Given) -> web.StreamResponse:
    """Pause scrubbing and compaction, or resume them."""
    _store(request)
    wanted = parsed(await bodies.read(request), MaintenancePut)
    pace = request.app[BOOKIE].pace
    if wanted.paused:
        pace.pause()
    else:
        pace.resume()
    return await info(request, given)


def _check_not_withheld(store: Store, ledger_id: int) -> None:
    """Raise EntryUnavailable while a drop is decided, so that no repair counts the entries."""
    if ledger_id in store.withheld:
        raise errors.EntryUnavailable(
            f"{store.me} is deciding whether to drop the ledger: retry later", ledger_id=ledger_id
        )


def _check_not_deleted(store: Store, ledger_id: int) -> None:
    """Raise NoSuchLedger if a ledger is deleted: its missing entries prove nothing (rule 16a)."""
    if store.holdings.is_deleted(ledger_id):
        raise errors.NoSuchLedger(
            f"ledger {ledger_id} was deleted on {store.me}", ledger_id=ledger_id, deleted=True
        )


async def _digest(store: Store, asked: DigestsAsked, ledger_id: int, span: Range) -> RangeDigest:
    first, last = span
    if last < first:
        raise errors.InvalidRequest(f"the range {first}..{last} ends before it begins")
    sha = hashlib.sha256()
    present: list[Range] = []
    damaged: list[Range] = []
    count = 0
    at = first
    while at <= last:
        expected, run, known_to = await store.examine(
            ledger_id, at, last, _READ_BYTES, from_disk=asked.from_disk
        )
        present += expected
        missing = set(chain.from_iterable(range(low, high + 1) for low, high in expected))
        for entry in run.entries() if run is not None else ():
            entry_id, size = entry.entry_id, len(entry.payload)
            missing.discard(entry_id)
            if entry_id % asked.modulus == asked.residue:
                sha.update(_DIGEST_HEAD.pack(ledger_id, entry_id, entry.length, size))
                sha.update(entry.payload)
                count += 1
        damaged += [(i, i) for i in sorted(missing) if i % asked.modulus == asked.residue]
        at = known_to + 1
    return RangeDigest(
        first=first,
        last=last,
        entries=count,
        present=union(present)[:_RANGES_MAX],
        digest=sha.hexdigest(),
        damaged=union(damaged)[:_RANGES_MAX],
    )


def _held(store: Store, ledger_id: int, row: IndexRow) -> HeldBody:
    return HeldBody(
        bookie=store.me,
        ledger_id=ledger_id,
        fenced=row.is_fenced,
        limbo=row.is_limbo,
        last_add_confirmed=row.last_add_confirmed,
        highest_entry=row.highest,
        entries=row.entry_count,
        bytes=row.stored_bytes,
    )


def _entry_body(entry: Entry) -> EntryBody:
    return EntryBody(
        entry_id=entry.entry_id,
        last_add_confirmed=entry.last_add_confirmed,
        length=entry.length,
        digest=entry.digest.hex(),
        payload=base64.b64encode(entry.payload).decode(),
    )


def _store(request: web.Request) -> Store:
    store = request.app[BOOKIE].store
    if store is None:
        raise errors.ReadOnly("this bookie is starting: retry later")
    return store


async def _ask(store: Store, given: Given, asked: FenceAsked | LacAsked) -> web.Response:
    """Pass a request about a whole ledger to the store, and return the store's answer."""
    ledger_id = given[LEDGER_ID]
    verdict = await answered(partial(store.ask, ledger_id, asked))
    return _verdict(store, ledger_id, NO_ENTRY, NO_ENTRY, verdict)


def _verdict(store: Store, ledger_id: int, first: int, last: int, verdict: Verdict) -> web.Response:
    body = VerdictBody(
        bookie=store.me,
        ledger_id=ledger_id,
        first=first,
        last=last,
        status=verdict.status,
        last_add_confirmed=verdict.last_add_confirmed,
    )
    return answer(body, _HTTP_STATUS[verdict.status])
