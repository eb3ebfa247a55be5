"""Subscriptions of streams at one gateway: requests about them, and the wakes (ADR 58).

The owner of the log of subscriptions (`keeper.py`) follows the ends of all linked streams, makes
wakes, and has them sent by `Send`. All that it decides is in the rows, so another gateway continues
when the owner dies: each gateway looks once a second that the log has an owner.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final
from uuid import uuid4

from quorumlog import errors
from quorumlog.protocol import subscriptions
from quorumlog.protocol.log import LogMetadata, LogSettings
from quorumlog.protocol.log.messages import HERE, Consult
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.rows import Batch, Key
from quorumlog.protocol.subscriptions import (
    STREAMS_MAX,
    Ends,
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
"""Deliveries of this gateway under way. Each takes a connection. By judgement."""
_OWNER_S: Final = 1.0
"""How often a gateway looks that the log of subscriptions has an owner. By judgement."""
_ALL_S: Final = 300.0
"""How often the owner lists the streams, as the sweep does, in case it did not hear of one."""
_FOLLOW_S: Final = 30.0
_RETRY_S: Final = 1.0
_GATHER_S: Final = 0.05
"""The pause after a stream has grown, so that a busy stream is not asked for each record."""
_PAGE: Final = 1000
_AT_ONCE: Final = 16

_StreamKey = tuple[str, str]
"""A stream's log, and its creation time."""


class DeliveryFailed(Exception):
    """A wake was not delivered; the message says why."""


Send = Callable[[Subscription], Awaitable[bool]]
"""Sends a wake. Returns whether the receiver has done all that it showed. Raises: DeliveryFailed."""


class SubscriptionService(RowService[Subscription]):
    """Serves this gateway's requests for subscriptions, and makes their wakes as the owner."""

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
        """Attempts of this gateway that succeeded, and that failed."""
        self._room = asyncio.Semaphore(DELIVERIES_MAX)
        self._known: dict[Key, Subscription] = {}
        """The rows as they were when this owner last looked."""
        self._drivers: dict[Key, asyncio.Task[None]] = {}
        self._pokes: dict[Key, asyncio.Event] = {}
        self._users: dict[_StreamKey, set[Key]] = {}
        self._followers: dict[_StreamKey, asyncio.Task[None]] = {}
        self._ends: dict[_StreamKey, int] = {}
        self._is_owner = False
        self._new: set[Key] = set()
        """Subscriptions whose streams were not listed since this owner knows them."""
        self._heard: set[str] | None = None
        """Logs that changed and may be new streams; None: any may be."""
        self._has_heard = asyncio.Event()

    _list = staticmethod(lambda _log, after, limit: subscriptions.ListSubscriptions(after, limit))
    _free = subscriptions.StreamGone

    def _counts_once(self, request: Any) -> bool:
        return subscriptions.is_counted_once(request)

    def _makes(self, request: Any) -> bool:
        return isinstance(request, subscriptions.PutSubscription | subscriptions.SigningKey)

    def _absent(self, _request: Any) -> errors.QuorumLogError:
        return errors.NoSuchSubscription("there are no subscriptions")

    def log_deleted(self, name: str, created: str) -> None:
        """Note that this gateway deleted a stream, so that its links are removed."""
        if name.startswith(STREAM_PREFIX):
            super().log_deleted(name, created)

    # --- requests --------------------------------------------------------------------------------

    async def put(
        self, name: str, settings: SubscriptionSettings, origin: str
    ) -> tuple[Subscription, bool]:
        """Create a subscription that begins at the ends of its streams, or confirm its settings.
        Returns whether it is new. Raises: SubscriptionExists, TooManySubscriptions.
        """
        links = {each.log: each for each in await self._links(settings.streams)}
        if settings.pattern:
            found = await self._matching(settings)
            for link in await self._links(name for name in found if name not in links):
                links[link.log] = replace(link, is_explicit=False)
            links |= {name: replace(links[name], is_glob=True) for name in found}
        secret = uuid4().hex + uuid4().hex
        asked = subscriptions.PutSubscription(name, settings, secret, origin, tuple(links.values()))
        row: Subscription = await self.ask(asked, _quorum_of_streams())
        return row, row.secret == secret

    async def signing_key(self, *, creates: bool = True) -> str:
        """The secret of which all gateways make the key that signs deliveries. Without `creates`,
        raises NoSuchSubscription if there was no subscription yet.
        """
        asked = subscriptions.SigningKey(uuid4().hex + uuid4().hex)
        row: Subscription = await self.ask(asked, _quorum_of_streams() if creates else None)
        return row.secret

    async def look(self, name: str) -> Subscription:
        """One subscription. Raises: NoSuchSubscription."""
        row: Subscription = await self.ask(subscriptions.LookSubscription(name))
        return row

    async def link(self, name: str, streams: Sequence[str]) -> None:
        """Add explicit streams, which begin at their ends. Raises: TooManySubscriptions."""
        await self.ask(subscriptions.LinkStreams(name, tuple(await self._links(streams))))

    async def by_ends(self, row: Subscription, make: Callable[[Ends], Any]) -> Subscription:
        """Decide a request that `make` makes from the ends of a subscription's streams. Raises:
        AlreadyClaimed, NoPendingWork, WakeFenced, InvalidOffset.
        """
        decided: Subscription
        try:
            decided = await self.ask(make(await self._read_ends(row, is_fresh=False)))
        except (errors.NoPendingWork, errors.InvalidOffset):  # by cached metadata
            decided = await self.ask(make(await self._read_ends(row, is_fresh=True)))
        return decided

    async def _read_ends(self, row: Subscription, *, is_fresh: bool) -> Ends:
        """The acknowledged ends of a subscription's streams, as far as they can be read, and are
        not in the row.
        """
        room = asyncio.Semaphore(_AT_ONCE)

        async def end(link: Link) -> tuple[str, str, int] | None:
            with contextlib.suppress(errors.QuorumLogError):
                async with room:
                    found = (await self._consumers.recent(link.log, is_fresh=is_fresh)).row
                    if found.created_at == link.created:
                        at = await self._consumers.end(found)
                        return (link.log, link.created, at) if at > link.tail else None
            return None

        found = await asyncio.gather(*(end(link) for link in row.links if link.created))
        return tuple(each for each in found if each is not None)

    async def _links(self, names: Iterable[str]) -> list[Link]:
        """Explicit links of streams at their ends; from the beginning for those that don't exist."""
        room = asyncio.Semaphore(_AT_ONCE)

        async def link(name: str) -> Link:
            with contextlib.suppress(errors.NoSuchLog):
                async with room:
                    row = await self._reader.rows.row(name)
                    return Link(name, row.created_at, await self._reader.end(name, row), True)
            return Link(name, is_explicit=True)

        return list(await asyncio.gather(*map(link, names)))

    async def _matching(self, settings: SubscriptionSettings) -> list[str]:
        """The names of the existing streams that a pattern matches, as many as may be linked."""
        found: list[str] = []
        after: str | None = None
        prefix = STREAM_PREFIX + stream_name(literal(settings.pattern))
        while len(found) < STREAMS_MAX:
            rows, after = await self._list_logs(after=after, limit=_PAGE, prefix=prefix)
            found += [row.name for row in rows if is_matching(settings, row.name)]
            if after is None:
                break
        return found[:STREAMS_MAX]

    # --- the owner -------------------------------------------------------------------------------

    def begin(self, send: Send) -> None:
        """Make wakes whenever this process owns the log of subscriptions."""
        self._send = send

    def heard(self, name: str) -> None:
        """Note that some process has created, changed or deleted a log."""
        is_new = name == SUBSCRIPTIONS_LOG or (self.is_here and name.startswith(STREAM_PREFIX))
        if is_new and self._heard is not None:
            self._heard.add(name)
            self._has_heard.set()

    def gap(self) -> None:
        """Note that changes of any log may have been missed."""
        self._heard = None
        self._has_heard.set()

    async def run(self) -> None:
        """Look for ever whether this process owns the log of subscriptions, and be its owner."""
        heard: set[str] | None
        exists, all_s, self._heard = False, 0.0, None
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_OWNER_S):
                        await self._has_heard.wait()
                self._has_heard.clear()
                heard, self._heard = self._heard, set()
                is_all = heard is None or self._loop.time() >= all_s
                exists = exists or SUBSCRIPTIONS_LOG in (heard or ())
                if self._send is None or not (exists or is_all):
                    continue
                exists = await self._own()
                if self.is_here and exists:
                    await self._look_around(heard or set(), is_all=is_all)
                else:
                    self._end()
                all_s = self._loop.time() + _ALL_S if is_all else all_s
        finally:
            self._end()

    async def _look_around(self, heard: set[str], *, is_all: bool) -> None:
        """Link streams that are new, and list them for new subscriptions, or for all."""
        self._track_all()
        new, self._new = self._new, set()
        for key in [*self._known] if is_all else [key for key in new if key in self._known]:
            await self._list_streams(self._known[key])
        for name in heard - {SUBSCRIPTIONS_LOG}:
            await self._discover(name)

    async def _own(self) -> bool:
        """Let the log of subscriptions have an owner. Returns whether the log exists."""
        try:
            empty = Consult(SUBSCRIPTION_BODIES.encode_requests(()))
            found = await self._logs.consult(SUBSCRIPTIONS_LOG, empty, is_forwarded=False)
            if found is HERE and not self._is_owner:
                await self.page("", after="", limit=1)  # reads the rows
            self._is_owner = found is HERE
        except errors.NoSuchLog:
            return False
        except errors.QuorumLogError as error:
            log.warning("subscriptions-without-owner", extra={"error": repr(error)})
        return True

    def _end(self) -> None:
        """End what only the owner does."""
        for task in (*self._drivers.values(), *self._followers.values()):
            task.cancel()
        for known in (self._drivers, self._followers, self._users, self._ends, self._pokes):
            known.clear()
        self._known.clear()
        self._new.clear()
        self._is_owner = False

    def _changed(self, batch: Batch[Subscription]) -> None:
        for key in (*(row.key for row in batch.rows), *batch.gone):
            self._track(key)

    def _track_all(self) -> None:
        for key in {*self.kept, *self._known}:
            self._track(key)

    def _track(self, key: Key) -> None:
        """Follow the streams of a row as it is now, and let its driver see it."""
        old, new = self._known.get(key), self.kept.get(key)
        if new is old or not key[1]:
            return
        before = _streams_of(old)
        after = _streams_of(new)
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
        if new is None:
            del self._known[key]
            return
        self._known[key] = new
        if old is None:
            self._new.add(key)
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
            del self._drivers[key], self._pokes[key]
            self._known.pop(key, None)  # if it broke, the next look begins anew
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("subscription-broke", exc_info=error, extra={"subscription": key[1]})

    # --- streams ---------------------------------------------------------------------------------

    async def _follow(self, stream: _StreamKey) -> None:
        """Learn the end of a stream whenever it grows, until the stream is gone."""
        name, created = stream
        while True:
            try:
                end, is_closed = await self._reader.tail(name, created_at=created)
                if end > self._ends.get(stream, -1):
                    self._ends[stream] = end
                    for key in self._users.get(stream, ()):
                        self._poke(key)
                if is_closed:
                    await asyncio.Event().wait()  # it is longer never again
                page = await self._reader.read(
                    name, end, limit=1, max_bytes=1, wait_s=_FOLLOW_S, created_at=created
                )
                await asyncio.sleep(_GATHER_S if page.next > end else 0)
            except (errors.NoSuchLog, errors.LogReplaced):
                await self._asked(subscriptions.StreamGone(name, created))
                self.heard(name)  # there may be another one by now
                await asyncio.sleep(_RETRY_S)
            except (errors.OffsetTruncated, errors.EntryLost):
                await asyncio.sleep(_GATHER_S)
            except errors.QuorumLogError:
                await asyncio.sleep(_RETRY_S)
            except Exception:
                log.exception("stream-not-followed", extra={"log": name})
                await asyncio.sleep(_RETRY_S)

    async def _list_streams(self, row: Subscription) -> None:
        """Link the existing streams that a pattern matches, and that explicit links wait for."""
        wanted = {each.log for each in row.links if not each.created}
        if row.settings.pattern:
            linked = {each.log for each in row.links if each.created}
            try:
                wanted |= {*await self._matching(row.settings)} - linked
            except errors.QuorumLogError:
                self._new.add(row.key)  # the next look lists them again
        for name in sorted(wanted):
            await self._discover(name)

    async def _discover(self, name: str) -> None:
        """Link a stream that may be new, from its beginning, to the subscriptions that want it."""
        wanting = [row for row in self._known.values() if _wants(row, name)]
        if not wanting:
            return
        try:
            created = (await self._reader.rows.row(name)).created_at
        except errors.NoSuchLog:
            for gone in {each for row in wanting for each in _streams_of(row) if each[0] == name}:
                await self._asked(subscriptions.StreamGone(*gone))
            return
        except errors.QuorumLogError:
            self._heard = None  # all are listed again
            return
        for row in wanting:
            if (name, created) not in _streams_of(row):
                is_glob = is_matching(row.settings, name)
                link = Link(name, created, is_glob=is_glob)
                await self._asked(subscriptions.LinkStreams(row.id, (link,)))

    # --- wakes -----------------------------------------------------------------------------------

    async def _drive(self, key: Key, poke: asyncio.Event) -> None:
        """Bring the wakes of a subscription forward while there is one and this is the owner."""
        while self.is_here and (row := self.kept.get(key)) is not None:
            poke.clear()
            wait_s = await self._step(row)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await poke.wait()

    async def _step(self, row: Subscription) -> float | None:
        """Do what is due. Returns how long to wait at most for a change."""
        wait_s = row.wait_ms(self._wall_ms()) / 1000
        match row.phase:
            case Phase.IDLE | Phase.DUE if wait_s:
                return wait_s
            case Phase.IDLE:
                ends = self._ends_of(row)
                if row.is_pending(ends):
                    return await self._asked(subscriptions.Wake(row.id, new_wake(), ends))
            case Phase.DUE:
                return await self._asked(await self._delivered(row))
            case Phase.HELD:
                state: Any = self._keeper.state
                left_s = state.held_until(row) - self._monotonic_s()
                if left_s > 0:
                    return float(left_s)
                expire = subscriptions.Expire(row.id, row.generation, new_wake())
                return await self._asked(expire)
            case _:  # it waits for a worker
                pass
        return None

    def _ends_of(self, row: Subscription) -> Ends:
        return tuple(
            (each.log, each.created, end)
            for each in row.links
            if (end := self._ends.get((each.log, each.created), 0)) > each.tail
        )

    async def _delivered(self, row: Subscription) -> Any:
        """Send a wake. Returns the request that notes what became of it."""
        assert self._send is not None
        async with self._room:
            try:
                is_done = await self._send(row)
            except (DeliveryFailed, errors.QuorumLogError) as error:
                self.failures += 1
                log.info("wake-not-delivered", extra={"subscription": row.id, "error": str(error)})
                jitter = subscriptions.JITTER_PERMILLE
                drawn = random.randint(-jitter, jitter)  # noqa: S311
                return subscriptions.Failed(row.id, row.generation, drawn)
        self.deliveries += 1
        return subscriptions.Delivered(row.id, row.generation, is_done)

    async def _asked(self, request: Any) -> float:
        """Decide a request of the owner. Returns when to look again."""
        try:
            await self.ask(request)
        except errors.QuorumLogError as error:
            log.info("subscription-not-changed", extra={"error": repr(error)})
            return _RETRY_S
        return 0.0

    @property
    def count(self) -> int:
        """How many subscriptions there are, if this process owns the log."""
        return len(self._known)

    @property
    def oldest_ms(self) -> int:
        """The age of the oldest wake that was not delivered, if this process owns the log."""
        due = [row.woken_ms for row in self._known.values() if row.phase == Phase.DUE]
        return max(0, self._wall_ms() - min(due)) if due else 0


def new_wake() -> str:
    """An id for a wake."""
    return f"w_{uuid4().hex}"


def literal(pattern: str) -> str:
    """The beginning that all paths have which a pattern matches."""
    head, star, rest = pattern.partition("*")
    if not star:
        return head
    is_any_number = head.endswith("/") and rest.partition("/")[0] == "*"  # also none
    return head[: head.rfind("/") + (not is_any_number)]


def is_matching(settings: SubscriptionSettings, name: str) -> bool:
    """Whether a pattern matches a stream's path: `*` is one segment, `**` any number of segments."""
    if not settings.pattern or name == settings.wake_log or not name.startswith(STREAM_PREFIX):
        return False
    parts = settings.pattern.split("/")

    def beyond(states: Iterable[int]) -> set[int]:
        """These places in the pattern, and those that a `**` without segments leads to."""
        found = set(states)
        for at in range(min(found, default=0), len(parts)):
            if at in found and parts[at] == "**":
                found.add(at + 1)
        return found

    states = beyond((0,))
    for segment in stream_path(name).split("/"):
        stay = [at for at in states if at < len(parts) and parts[at] == "**"]
        pass_on = [at + 1 for at in states if at < len(parts) and parts[at] in ("*", segment)]
        states = beyond((*stay, *pass_on))
    return len(parts) in states


def _wants(row: Subscription, name: str) -> bool:
    """Whether a subscription has a stream, or has room for it and matches it."""
    if any(each.log == name for each in row.links):
        return True
    return len(row.links) < STREAMS_MAX and is_matching(row.settings, name)


def _streams_of(row: Subscription | None) -> set[_StreamKey]:
    """The existing streams of a subscription."""
    return (
        set() if row is None else {(each.log, each.created) for each in row.links if each.created}
    )


def _quorum_of_streams() -> LogMetadata:
    return LogMetadata(SUBSCRIPTIONS_LOG, LogSettings(quorum=Quorum.of()))
