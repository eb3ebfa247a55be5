"""Serves subscriptions of streams at one gateway, and sends their wakes (ADR 58).

The owner of the log of subscriptions (`keeper.py`) follows the ends of all linked streams, makes
wakes and sends them through `Send`. The owner's decisions are stored in the rows, so another
gateway continues when the owner dies. Each gateway checks once a second that the log has an owner.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final
from uuid import uuid4

from quorumlog import errors
from quorumlog.protocol import subscriptions
from quorumlog.protocol.log import LogMetadata, LogSettings, LogState
from quorumlog.protocol.log.messages import HERE, Consult
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.rows import Batch, Key
from quorumlog.protocol.subscriptions import (
    LINKS_MAX,
    STREAMS_MAX,
    Discovery,
    Ends,
    Kind,
    Link,
    Phase,
    Subscription,
    SubscriptionSettings,
)
from quorumlog.wire.position_bodies import SUBSCRIPTION_BODIES, SUBSCRIPTIONS_LOG
from services.gateway.logs.consumers import Consumers
from services.gateway.logs.keeper import RowService
from services.gateway.logs.reading import LogReader
from services.gateway.logs.values import STREAM_PREFIX, stream_name, stream_path

log = logging.getLogger(__name__)

DELIVERIES_MAX: Final = 64
"""Maximum concurrent deliveries of this gateway. Each takes a connection. Chosen by judgement."""
SLOW_DELIVERIES_MAX: Final = 64
"""Maximum concurrent deliveries to receivers whose last delivery was slow or failed. The bound is
separate, so that slow receivers don't delay other receivers. Chosen by judgement.
"""
_SLOW_S: Final = 1.0
"""A delivery that takes longer counts as slow. Chosen by judgement."""
_OWNER_S: Final = 1.0
"""Interval at which a gateway checks that the log of subscriptions has an owner. By judgement."""
_ALL_S: Final = 300.0
"""Interval at which the owner lists all streams, in case a notification was lost."""
_FOLLOW_S: Final = 60.0
_RETRY_S: Final = 1.0
_GATHER_S: Final = 0.05
"""The pause after a stream has grown, so that a busy stream is not read for each record."""
_PER_LINK_S: Final = 0.0005
"""The pause before a wake, for each stream of the subscription. Chosen by judgement."""
_PAGE: Final = 1000
_AT_ONCE: Final = 16
_MATCHES_AT_ONCE: Final = 1000
"""Maximum comparisons of names with patterns before other tasks may run. Chosen by judgement."""

_StreamKey = tuple[str, str]
"""A stream's log, and the log's creation time."""


class DeliveryFailed(Exception):
    """A wake was not delivered. The message gives the reason."""


Send = Callable[[Subscription], Awaitable[bool]]
"""Sends a wake. Returns whether the receiver has finished its work. Raises: DeliveryFailed."""


class SubscriptionService(RowService[Subscription]):
    """Serves this gateway's requests about subscriptions. As the owner, also makes wakes."""

    def __init__(
        self, logs: Any, reader: LogReader, consumers: Consumers, list_logs: Any, **ports: Any
    ) -> None:
        """`list_logs` lists logs by prefix. The other arguments are those of `RowService`."""
        super().__init__(
            logs, reader.read, SUBSCRIPTION_BODIES, subscriptions.Subscriptions, **ports
        )
        self._reader, self._consumers, self._list_logs = reader, consumers, list_logs
        self._send: Send | None = None
        self.deliveries = self.failures = 0
        """The numbers of this gateway's successful and failed delivery attempts."""
        self._room = asyncio.Semaphore(DELIVERIES_MAX)
        self._slow_room = asyncio.Semaphore(SLOW_DELIVERIES_MAX)
        self._slow: set[str] = set()
        """The secrets of subscriptions whose last delivery was slow."""
        self._known: dict[Key, Subscription] = {}
        """The rows with which this owner last compared the current rows (`_track`)."""
        self._drivers: dict[Key, asyncio.Task[None]] = {}
        self._pokes: dict[Key, asyncio.Event] = {}
        self._linking: dict[str, set[Key]] = {}
        """The subscriptions that link each stream, by stream name. Streams may be missing."""
        self._users: dict[_StreamKey, set[Key]] = {}
        self._followers: dict[_StreamKey, asyncio.Task[None]] = {}
        self._changes: dict[str, set[asyncio.Event]] = {}
        """The events to set when a followed stream's metadata changes, by the name of its log."""
        self._ends: dict[_StreamKey, int] = {}
        self._is_owner = False
        self._discovery = Discovery()
        self._lister: asyncio.Task[None] | None = None
        self._has_heard = asyncio.Event()
        self._rows_room = asyncio.Semaphore(_AT_ONCE)

    def _counts_once(self, request: Any) -> bool:
        return subscriptions.is_counted_once(request)

    def _makes(self, request: Any) -> bool:
        return isinstance(request, subscriptions.PutSubscription | subscriptions.SigningKey)

    def _shown(self, request: Any, error: errors.NoSuchLog) -> errors.QuorumLogError:
        del request
        is_own = error.log == SUBSCRIPTIONS_LOG
        return errors.NoSuchSubscription("no such subscription: create one") if is_own else error

    def log_deleted(self, name: str, created: str) -> None:
        """Do nothing, because the owner of the subscriptions itself notices deleted streams."""

    # --- requests --------------------------------------------------------------------------------

    async def put(
        self, name: str, settings: SubscriptionSettings, origin: str
    ) -> tuple[Subscription, bool]:
        """Create a subscription that begins at its streams' ends, or confirm its settings. Returns
        the row, and whether it is new. Raises: SubscriptionExists, TooManySubscriptions.
        """
        with contextlib.suppress(errors.NoSuchSubscription):
            known = await self.look(name)
            if known.settings == settings:
                return known, False
            detail = "the subscription exists with another configuration: delete it first"
            raise errors.SubscriptionExists(detail)
        links = {each.log: each for each in await self._links(settings.streams)}
        if settings.pattern:
            found = await self._matching(settings)
            for link in await self._links(name for name in found if name not in links):
                links[link.log] = replace(link, is_explicit=False)
            links |= {name: replace(links[name], is_glob=True) for name in found}
        secret = uuid4().hex + uuid4().hex
        asked = subscriptions.PutSubscription(name, settings, secret, origin, tuple(links.values()))
        row: Subscription = await self.ask(asked, _quorum_of_streams())
        is_new = row.secret == secret
        return row if row.links else await self.look(name), is_new  # a copy's answer has no links

    async def signing_key(self, *, creates: bool = True) -> str:
        """Return the secret from which all gateways derive the key that signs deliveries. Creates a
        missing secret if `creates`, otherwise raises NoSuchSubscription.
        """
        asked = subscriptions.SigningKey(uuid4().hex + uuid4().hex if creates else "")
        row: Subscription = await self.ask(asked, _quorum_of_streams() if creates else None)
        return row.secret

    async def look(self, name: str) -> Subscription:
        """Read one subscription. Raises: NoSuchSubscription."""
        row: Subscription = await self.ask(subscriptions.LookSubscription(name))
        return row

    async def link(self, row: Subscription, streams: Sequence[str]) -> None:
        """Add explicit streams, which begin at their ends. A stream that also matches the pattern
        keeps its link's offset, or begins at 0 without a link. Raises: TooManySubscriptions.
        """
        links = (
            replace(each, acked=0, is_glob=True) if is_matching(row.settings, each.log) else each
            for each in await self._links(streams)
        )
        await self.ask(subscriptions.LinkStreams(row.id, row.secret, tuple(links)))

    async def by_ends(
        self,
        row: Subscription,
        make: Callable[[Ends], Any],
        acked: Iterable[str] = (),
        *,
        is_known: bool = False,
    ) -> Subscription:
        """Decide a request, which `make` builds from the ends of a subscription's streams. The ends
        of the `acked` streams must be readable. `is_known`: try first with the ends in the row.
        Raises: AlreadyClaimed, NoPendingWork, WakeFenced, InvalidOffset, and the errors of reads.
        """
        decided: Subscription
        needed = frozenset(acked)
        if is_known:
            with contextlib.suppress(errors.NoPendingWork, errors.InvalidOffset):
                decided = await self.ask(make(()))
                return decided
        try:
            decided = await self.ask(make(await self._read_ends(row, needed, is_fresh=False)))
        except (errors.NoPendingWork, errors.InvalidOffset):  # cached metadata may be stale
            decided = await self.ask(make(await self._read_ends(row, needed, is_fresh=True)))
        return decided

    async def _read_ends(
        self, row: Subscription, needed: frozenset[str], *, is_fresh: bool
    ) -> Ends:
        """Read the ends of a subscription's streams, except the ends that the row already has.
        Streams that can't be read are left out. Raises: the errors of reads of `needed` streams.
        """
        room = asyncio.Semaphore(_AT_ONCE)

        async def end(link: Link) -> tuple[str, str, int] | None:
            try:
                async with room:
                    found = (await self._consumers.recent(link.log, is_fresh=is_fresh)).row
                    if found.created_at == link.created:
                        at = await self._consumers.end(found)
                        if is_fresh and link.log in needed:  # the client may know a later end
                            at = max(at, await self._reader.closed_end(found))
                        return (link.log, link.created, at) if at > link.tail else None
            except errors.NoSuchLog:
                pass
            except errors.QuorumLogError:
                if link.log in needed:
                    raise
            return None

        found = await asyncio.gather(*(end(link) for link in row.links if link.created))
        return tuple(each for each in found if each is not None)

    async def _links(self, names: Iterable[str]) -> list[Link]:
        """Return explicit links that begin at the streams' ends, or at 0 for missing streams."""
        room = asyncio.Semaphore(_AT_ONCE)

        async def link(name: str) -> Link:
            with contextlib.suppress(errors.NoSuchLog):
                async with room:
                    row = await self._reader.rows.row(name)
                    return Link(name, row.created_at, await self._reader.end(name, row), True)
            return Link(name, is_explicit=True)

        return list(await asyncio.gather(*map(link, names)))

    async def _matching(self, settings: SubscriptionSettings) -> list[str]:
        """Return the existing streams that a pattern matches, up to the maximum of links."""
        found: list[str] = []
        async with contextlib.aclosing(self._streams(literal(settings.pattern))) as pages:
            async for rows in pages:
                found += [row.name for row in rows if is_matching(settings, row.name)]
                if len(found) >= STREAMS_MAX:
                    break
        return found[:STREAMS_MAX]

    async def _streams(self, path: str = "") -> AsyncGenerator[Sequence[LogMetadata]]:
        """Yield the streams whose paths begin with `path`. Other tasks run between chunks."""
        after: str | None = None
        while True:
            rows, after = await self._list_logs(
                after=after, limit=_PAGE, prefix=STREAM_PREFIX + stream_name(path)
            )
            at_once = self._names_at_once()
            for at in range(0, len(rows), at_once):
                yield rows[at : at + at_once]
                await asyncio.sleep(0)
            if after is None:
                return

    # --- the owner -------------------------------------------------------------------------------

    def begin(self, send: Send) -> None:
        """Send wakes through `send` whenever this process owns the log of subscriptions."""
        self._send = send

    def heard(self, name: str) -> None:
        """Note that some process has created, changed or deleted a log."""
        for event in self._changes.get(name, ()):
            event.set()
        if name == SUBSCRIPTIONS_LOG:
            self._is_owner = False  # another gateway may have been the owner: check again
        if name == SUBSCRIPTIONS_LOG or (self.is_here and name.startswith(STREAM_PREFIX)):
            self._discovery.heard(name)
            self._has_heard.set()

    def gap(self) -> None:
        """Note that changes of any log may have been missed."""
        for events in self._changes.values():
            for event in events:
                event.set()
        self._is_owner = False
        self._discovery.gap()
        self._has_heard.set()

    async def run(self) -> None:
        """Check regularly whether this process owns the log, and act as its owner while it does."""
        exists, all_s = False, 0.0
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_OWNER_S):
                        await self._has_heard.wait()
                self._has_heard.clear()
                if self._loop.time() >= all_s:
                    self._discovery.gap()
                    all_s = self._loop.time() + _ALL_S
                heard, is_all = self._discovery.take()
                exists = exists or SUBSCRIPTIONS_LOG in heard
                if self._send is None or not (exists or is_all):
                    continue
                exists = await self._own()
                if self.is_here and exists:
                    await self._look_around(heard, is_all=is_all)
                else:
                    self._end()
        finally:
            self._end()

    async def _look_around(self, heard: set[str], *, is_all: bool) -> None:
        """Follow the subscriptions, and link the streams that may be new."""
        self._track_all()
        if is_all and (self._lister is None or self._lister.done()):
            self._lister = self._start(self._list_streams())
        elif is_all:
            self._discovery.gap()  # list again once this list has ended
        await self._discover_all(heard - {SUBSCRIPTIONS_LOG})

    async def _discover_all(self, names: Iterable[str]) -> None:
        """Update links to streams, many at a time, so that the store appends them together."""
        wanted = []
        for number, name in enumerate(names):
            if number % self._names_at_once() == 0:
                await asyncio.sleep(0)
            if any(self._wanting(name)):
                wanted.append(name)
        for at in range(0, len(wanted), _PAGE):
            await asyncio.gather(*map(self._discover, wanted[at : at + _PAGE]))

    def _names_at_once(self) -> int:
        """The number of names to compare with all patterns before other tasks get a turn."""
        return max(1, _MATCHES_AT_ONCE // max(1, len(self._known)))

    async def _own(self) -> bool:
        """Make sure that the log of subscriptions has an owner. Returns whether the log exists."""
        try:
            empty = Consult(SUBSCRIPTION_BODIES.encode_requests(()))
            found = await self._logs.consult(SUBSCRIPTIONS_LOG, empty, is_forwarded=False)
            if found is HERE and (not self._is_owner or self._keeper.end is None):
                self._is_owner = True
                self._discovery.gap()  # changes before the takeover were not noted
                await self.page("", after="", limit=1)  # reads the rows
            self._is_owner = self._is_owner and found is HERE
        except errors.NoSuchLog:
            return False
        except errors.QuorumLogError as error:
            self._is_owner = False
            log.warning("subscriptions-without-owner", extra={"error": repr(error)})
        return True

    def _end(self) -> None:
        """Stop the owner's tasks, and forget their state."""
        tasks = [*self._drivers.values(), *self._followers.values()]
        for task in tasks if self._lister is None else [*tasks, self._lister]:
            task.cancel()
        for known in (self._drivers, self._followers, self._users, self._ends, self._pokes):
            known.clear()
        self._linking.clear()
        self._known.clear()
        self._slow.clear()
        self._lister, self._is_owner = None, False

    def _changed(self, batch: Batch[Subscription]) -> None:
        for key in (*(row.key for row in batch.rows), *batch.gone):
            self._track(key)

    def _track_all(self) -> None:
        for key in {*self.kept, *self._known}:
            self._track(key)

    def _track(self, key: Key) -> None:
        """Follow the streams of a subscription's current row, and resume its driver."""
        old, new = self._known.get(key), self.kept.get(key)
        if not key[1] or (new is old and (new is None or key in self._drivers)):
            return
        before, after = _streams_of(old), _streams_of(new)
        names_before, names_after = _names_of(old), _names_of(new)
        for name in names_before - names_after:
            self._linking[name].discard(key)
            if not self._linking[name]:
                del self._linking[name]
        for name in names_after - names_before:
            self._linking.setdefault(name, set()).add(key)
        for stream in before - after:
            self._users[stream].discard(key)
            if not self._users[stream]:
                del self._users[stream]
                self._ends.pop(stream, None)
                self._followers.pop(stream).cancel()
        for stream in after - before:
            self._users.setdefault(stream, set()).add(key)
            if stream not in self._followers:
                self._followers[stream] = self._start(self._follow(stream))
        self._poke(key)
        if old is not None and (new is None or new.secret != old.secret):
            self._slow.discard(old.secret)
            del self._known[key], self._pokes[key]
            if key in self._drivers:
                self._drivers.pop(key).cancel()  # this also cancels a delivery
        if new is None:
            return
        self._known[key] = new
        if old is None or new.secret != old.secret:
            self._discovery.gap()
            self._has_heard.set()
        if key not in self._drivers:
            self._pokes[key] = asyncio.Event()
            task = self._drivers[key] = self._start(self._drive(key, self._pokes[key]))
            task.add_done_callback(lambda done: self._driven(key, done))

    def _poke(self, key: Key) -> None:
        if key in self._pokes:
            self._pokes[key].set()

    def _driven(self, key: Key, task: asyncio.Task[None]) -> None:
        if self._drivers.get(key) is task:
            del self._drivers[key]  # after an error, the next `_track_all` starts a new driver
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("subscription-broke", exc_info=error, extra={"subscription": key[1]})

    # --- streams ---------------------------------------------------------------------------------

    async def _follow(self, stream: _StreamKey) -> None:
        """Keep the known end of a stream current, until the task is cancelled."""
        changed = asyncio.Event()
        self._changes.setdefault(stream[0], set()).add(changed)
        try:
            while True:
                changed.clear()
                try:
                    pause_s = await self._followed(stream, changed)
                except errors.QuorumLogError:
                    pause_s = _RETRY_S
                except Exception:
                    log.exception("stream-not-followed", extra={"log": stream[0]})
                    pause_s = _RETRY_S
                await asyncio.sleep(pause_s)
        finally:
            self._changes[stream[0]].discard(changed)
            if not self._changes[stream[0]]:
                del self._changes[stream[0]]

    async def _followed(self, stream: _StreamKey, changed: asyncio.Event) -> float:
        """Read a stream's end, and wait until the stream may have grown. Returns a pause (in s)."""
        name, created = stream
        try:
            async with self._rows_room:
                row = await self._reader.fresh(name, created)
            end, is_closed = await self._reader.tail(name, row)
            if end > self._ends.get(stream, -1):
                self._ends[stream] = end
                for key in self._users.get(stream, ()):
                    self._poke(key)
            if is_closed or not _is_written(row):
                # Only a metadata change lets the stream grow. The change, or a gap, sets `changed`.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_ALL_S * random.uniform(0.5, 1.0)):  # noqa: S311
                        await changed.wait()
                return 0.0
            page = await self._reader.read(
                name, end, limit=1, max_bytes=1, wait_s=_FOLLOW_S, created_at=created, row=row
            )
        except (errors.NoSuchLog, errors.LogReplaced):
            self._discovery.heard(name)  # another stream may have the name by now
            self._has_heard.set()
            return _RETRY_S
        except errors.OffsetTruncated:
            return _GATHER_S
        return _GATHER_S if page.next > end else 0.0

    async def _list_streams(self) -> None:
        """Link all streams that subscriptions want, and unlink deleted streams."""
        found = set[str]()
        wanted = set[str]()
        try:
            async with contextlib.aclosing(self._streams()) as pages:
                async for rows in pages:
                    found.update(row.name for row in rows)
                    wanted.update(
                        row.name
                        for row in rows
                        if any(_asks(each, row) for each in self._wanting(row.name))
                    )
            gone = {name for name, _ in self._users if name not in found}
            await self._discover_all(sorted(wanted | gone))
        except Exception as error:
            log.warning("streams-not-listed", exc_info=error)
            self._discovery.gap()

    def _wanting(self, name: str) -> Iterable[Subscription]:
        """Yield the subscriptions that link a stream, or that match it and have room for a link."""
        linking = self._linking.get(name, ())
        yield from (self._known[key] for key in linking)
        if self.links < LINKS_MAX:
            for key, row in self._known.items():
                has_room = len(row.links) < STREAMS_MAX and key not in linking
                if has_room and is_matching(row.settings, name):
                    yield row

    async def _discover(self, name: str) -> None:
        """Point all subscriptions' links to a stream at the log that has the stream's name now."""
        try:
            async with self._rows_room:
                created = (await self._reader.rows.row(name)).created_at
        except errors.NoSuchLog:
            created = ""
        except errors.QuorumLogError:
            self._discovery.heard(name)
            return
        for row in tuple(self._wanting(name)):
            is_match = is_matching(row.settings, name)
            request = subscriptions.discovered(row, name, created, is_match=is_match)
            if request is not None:
                await self._linked(name, request)

    async def _linked(self, name: str, request: Any) -> None:
        """Decide a request that links or unlinks a stream. A failure is retried later."""
        answer: Any
        try:
            answer = await self.ask(request)
        except errors.QuorumLogError as error:
            log.info("stream-not-linked", extra={"log": name, "error": repr(error)})
            answer = error
        self._discovery.answered(name, answer)

    # --- wakes -----------------------------------------------------------------------------------

    async def _drive(self, key: Key, poke: asyncio.Event) -> None:
        """Advance a subscription's wakes while it exists and this process owns the log."""
        while self.is_here and (row := self.kept.get(key)) is not None:
            poke.clear()
            wait_s = await self._step(row)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await poke.wait()

    async def _step(self, row: Subscription) -> float | None:
        """Take the next due step. Returns the seconds to wait for a change; None for no limit."""
        match row.phase:
            case Phase.IDLE if row.pending(self._ends_of(row)):
                # The more streams a row has, the less often it is written.
                await asyncio.sleep(len(row.links) * _PER_LINK_S)
                wake = subscriptions.Wake(row.id, row.secret, new_wake(), self._ends_of(row))
                return await self._asked(wake)
            case Phase.IDLE:
                return None
            case Phase.HELD:
                state: Any = self._keeper.state
                left_s = state.held_until(row) - self._monotonic_s()
                if left_s > 0:
                    return float(left_s)
                expire = subscriptions.Expire(row.id, row.secret, row.generation, new_wake())
                return await self._asked(expire)
            case _:
                if left_ms := row.sends_in_ms(self._wall_ms()):
                    return left_ms / 1000
                request = await self._delivered(row)
                return 0.0 if request is None else await self._asked(request)

    def _ends_of(self, row: Subscription) -> Ends:
        return tuple(
            (each.log, each.created, end)
            for each in row.links
            if (end := self._ends.get((each.log, each.created), 0)) > each.tail
        )

    def _room_of(self, row: Subscription) -> contextlib.AbstractAsyncContextManager[Any]:
        """The semaphore that limits deliveries. A pull wake is an append, which needs no limit."""
        if row.settings.kind == Kind.PULL:
            return contextlib.nullcontext()
        return self._slow_room if row.attempts or row.secret in self._slow else self._room

    async def _delivered(self, row: Subscription) -> Any:
        """Send a wake. Returns the request that records the result. If the row has changed since,
        sends nothing and returns None.
        """
        assert self._send is not None
        async with self._room_of(row):
            if self.kept.get(row.key) is not row:
                return None
            begin_s = self._loop.time()
            try:
                is_done = await self._send(row)
            except (DeliveryFailed, errors.QuorumLogError) as error:
                self.failures += 1
                log.info("wake-not-delivered", extra={"subscription": row.id, "error": str(error)})
                jitter = subscriptions.JITTER_PERMILLE
                drawn = random.randint(-jitter, jitter)  # noqa: S311
                return subscriptions.Failed(row.id, row.secret, row.generation, drawn)
        self.deliveries += 1
        is_slow = self._loop.time() - begin_s > _SLOW_S
        (self._slow.add if is_slow else self._slow.discard)(row.secret)
        return subscriptions.Delivered(row.id, row.secret, row.generation, is_done)

    async def _asked(self, request: Any) -> float:
        """Decide a request of the owner. Returns the seconds to wait before the next step."""
        try:
            await self.ask(request)
        except errors.QuorumLogError as error:
            log.info("subscription-not-changed", extra={"error": repr(error)})
            return _RETRY_S
        return 0.0

    @property
    def count(self) -> int:
        """The number of subscriptions, if this process owns their log."""
        return len(self._known)

    @property
    def links(self) -> int:
        """The number of links of all subscriptions, if this process owns their log."""
        state: Any = self._keeper.state
        return int(state.links)

    @property
    def oldest_ms(self) -> int:
        """The age of the oldest undelivered wake; 0 without such a wake, or on other gateways."""
        due = [row.woken_ms for row in self._known.values() if row.phase == Phase.DUE]
        return max(0, self._wall_ms() - min(due)) if due else 0


def new_wake() -> str:
    """Make a random id for a wake."""
    return f"w_{uuid4().hex}"


def literal(pattern: str) -> str:
    """The common prefix of all paths that a pattern matches."""
    head, star, rest = pattern.partition("*")
    if not star:
        return head
    is_any_number = head.endswith("/") and rest.partition("/")[0] == "*"  # also zero
    return head[: head.rfind("/") + (not is_any_number)]


def is_matching(settings: SubscriptionSettings, name: str) -> bool:
    """Whether a pattern matches a stream's path. `*` matches one segment, `**` any number."""
    if not settings.pattern or name == settings.wake_log:
        return False
    prefix, runs = _compiled(settings.pattern)
    if not name.startswith(prefix):
        return False
    segments = stream_path(name).split("/")
    first, last = runs[0], runs[-1]
    if len(runs) == 1:
        return len(segments) == len(first) and _is_run(first, segments, 0)
    end = len(segments) - len(last)
    if len(first) > end or not (_is_run(first, segments, 0) and _is_run(last, segments, end)):
        return False
    at, between = len(first), segments[:end]
    for run in runs[1:-1]:  # the earliest match of each run leaves the most segments for the others
        while not _is_run(run, between, at):
            at += 1
            if at + len(run) > end:
                return False
        at += len(run)
    return True


@lru_cache(maxsize=2 * subscriptions.SUBSCRIPTIONS_MAX)
def _compiled(pattern: str) -> tuple[str, tuple[tuple[str, ...], ...]]:
    """The common prefix of the logs that a pattern matches, and the pattern's runs of segments.
    Between two runs there may be any segments.
    """
    runs: list[list[str]] = [[]]
    for part in pattern.split("/"):
        if part == "**":
            runs.append([])
        else:
            runs[-1].append(part)
    inner = [run for run in runs[1:-1] if run]
    ends = [runs[0], *inner, runs[-1]] if len(runs) > 1 else runs
    return STREAM_PREFIX + stream_name(literal(pattern)), tuple(map(tuple, ends))


def _is_run(run: Sequence[str], segments: Sequence[str], at: int) -> bool:
    """Whether the segments from index `at` match a run."""
    found = segments[at : at + len(run)]
    return len(found) == len(run) and all(
        part in ("*", segment) for part, segment in zip(run, found, strict=True)
    )


def _is_written(row: LogMetadata) -> bool:
    """Whether a log has an open ledger, and so may grow without a change of its metadata."""
    item = row.last_item
    return row.state is not LogState.CLOSED and item is not None and item.last_offset is None


def _asks(row: Subscription, log: LogMetadata) -> bool:
    """Whether a subscription must add or change its link to a stream."""
    is_match = is_matching(row.settings, log.name)
    found = subscriptions.discovered(row, log.name, log.created_at, is_match=is_match)
    return found is not None


def _streams_of(row: Subscription | None) -> set[_StreamKey]:
    """The existing streams that a subscription links."""
    return (
        set() if row is None else {(each.log, each.created) for each in row.links if each.created}
    )


def _names_of(row: Subscription | None) -> set[str]:
    """The names of all streams that a subscription links, even if they don't exist."""
    return set() if row is None else {each.log for each in row.links}


def _quorum_of_streams() -> LogMetadata:
    return LogMetadata(SUBSCRIPTIONS_LOG, LogSettings(quorum=Quorum.of()))
