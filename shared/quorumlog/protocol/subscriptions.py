"""Decides requests about subscriptions, which wake a receiver or worker for new records (ADR 58).

A subscription is a row of the log of subscriptions (`rows.py`). The row links streams, each with an
acknowledged offset. While a linked stream ends beyond its acknowledged offset, the subscription has
pending work and gets a *wake*, with a `generation` that only grows. A webhook's wake is delivered
until the receiver accepts it; a pull-wake is announced in a stream until a worker claims it. The
receiver or worker then holds the wake for a lease. The names are from the Durable Streams protocol,
sections 6 and 7.

Invariants (checked by the simulation in tests/model/subscriptions):
  - acknowledged offsets never decrease, and only requests of the current wake advance them;
  - a wake has one holder; another receiver or worker gets the work only after a whole lease of time
    awake without an acknowledgement, and never with the same generation;
  - a subscription without a wake has no pending work, or gets a wake;
  - a wake that no receiver accepted stays, even if gateways die;
  - a request changes only the creation of a subscription for which the request was made;
  - a stream that a subscription wants is linked, in the stream's present creation.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, ClassVar, Final

from quorumlog.errors import (
    AlreadyClaimed,
    InvalidOffset,
    InvalidRequest,
    NoPendingWork,
    NoSuchSubscription,
    QuorumLogError,
    SubscriptionExists,
    TooManySubscriptions,
    WakeFenced,
)
from quorumlog.protocol.rows import Key, List, RowDraft, Rows, Stamp

SUBSCRIPTIONS_MAX: Final = 1000
"""Maximum subscriptions. The owner of their log keeps them in memory. Chosen by judgement."""
STREAMS_MAX: Final = 1000
"""Maximum streams of a subscription. Each change writes its row, which stays below 300 KB."""
LINKS_MAX: Final = 5000
"""Maximum links of all subscriptions. The owner follows each stream. Chosen by judgement."""
RETRY_MS_MAX: Final = 60_000
"""The longest pause between two attempts, without its jitter (section 7.1). A wake that no worker
has claimed is announced again after this pause.
"""
JITTER_PERMILLE: Final = 200
"""Maximum jitter of a pause in permille of the pause, in both directions."""
_RETRY_MS: Final = 1000
_DOUBLINGS_MAX: Final = 6
_BATCH_CHARS: Final = 2 << 20
"""Characters of changed rows after which a batch accepts no more requests, as for queues."""
HEARD_MAX: Final = 10_000
"""Maximum stored names of streams, beyond which all streams are listed. Chosen by judgement."""


class Kind(StrEnum):
    """The way in which a subscription announces pending work."""

    WEBHOOK = "webhook"
    PULL = "pull-wake"


class Phase(StrEnum):
    """The state of a subscription's current wake."""

    IDLE = "idle"
    """There is no current wake."""
    DUE = "due"
    """The wake is to be delivered to the webhook, or announced in the wake stream."""
    OPEN = "open"
    """The wake was announced, and no worker has claimed it yet."""
    HELD = "held"
    """The receiver has accepted the wake, or a worker has claimed it, and a lease runs."""


@dataclass(frozen=True, slots=True)
class SubscriptionSettings:
    """A subscription's configuration, normalized. Streams are named by their logs."""

    kind: str
    pattern: str
    streams: tuple[str, ...]
    url: str
    wake_log: str
    lease_ms: int
    description: str


@dataclass(frozen=True, slots=True)
class Link:
    """One stream of a subscription."""

    log: str
    created: str = ""
    """The log's creation time; empty while the stream does not exist."""
    acked: int = 0
    """The offset below which all records are acknowledged."""
    is_explicit: bool = False
    is_glob: bool = False
    """Whether the subscription's pattern matches the stream."""
    tail: int = 0
    """The stream's end at the time when the last wake was made or claimed."""


Ends = tuple[tuple[str, str, int], ...]
"""The ends of streams as (log, creation time, offset). All records below an end are durable. Ends
that the row already has may be left out."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """A subscription's whole state. The row with an empty id has the cluster's signing key."""

    id: str
    version: int
    settings: SubscriptionSettings
    secret: str
    """Random text that identifies this creation. Tokens of wakes contain its first characters."""
    origin: str = ""
    """The gateways' URL, in the form that the subscription's creator used."""
    created_ms: int = 0
    links: tuple[Link, ...] = ()
    generation: int = 0
    wake_id: str = ""
    phase: str = Phase.IDLE
    holder: str = ""
    """The worker that has claimed the wake."""
    woken_ms: int = 0
    """The time when the current wake was made."""
    attempts: int = 0
    """Failed attempts since the last attempt that succeeded."""
    next_ms: int = 0
    """The time of the next attempt, by the owner's clock; 0 means at once."""
    last: str = ""
    """The id of the last claim or final acknowledgement. A copy of that request has no effect."""

    @property
    def key(self) -> Key:
        """The key of the row. All subscriptions share one namespace."""
        return "", self.id

    @property
    def created(self) -> str:
        """An empty text, because a subscription belongs to no single log."""
        return ""

    @property
    def size(self) -> int:
        """A rough upper bound of the row's characters."""
        named = sum(3 + len(each) for each in self.settings.streams)
        return 12_000 + named + sum(120 + len(each.log) for each in self.links)

    def sends_in_ms(self, wall_ms: int) -> int | None:
        """Milliseconds until the wake is delivered or announced; None if neither is due. A wait
        beyond the longest pause counts as 0, because the clock must have been set back.
        """
        if self.phase not in (Phase.DUE, Phase.OPEN):
            return None
        longest = RETRY_MS_MAX * (1000 + JITTER_PERMILLE) // 1000
        wait_ms = self.next_ms - wall_ms
        return max(0, wait_ms) if wait_ms <= longest else 0

    def pending(self, ends: Ends) -> tuple[Link, ...]:
        """The links with unacknowledged records, given the streams' ends."""
        return tuple(each for each in _reached(self.links, ends) if each.tail > each.acked)


@dataclass(frozen=True, slots=True)
class _Named:
    """A request about one subscription or all of them."""

    log: ClassVar[str] = ""


@dataclass(frozen=True, slots=True)
class _OfCreation(_Named):
    """A request about one creation of a subscription, which its `secret` identifies. A later
    subscription with the same id is not changed.
    """

    id: str
    secret: str


@dataclass(frozen=True, slots=True)
class PutSubscription(_Named):
    """Create a subscription, or confirm that an existing subscription has these settings. Answer:
    the subscription, which is new if it has the request's `secret`.
    """

    id: str
    settings: SubscriptionSettings
    secret: str
    origin: str
    links: tuple[Link, ...]


@dataclass(frozen=True, slots=True)
class LookSubscription(_Named):
    """Return one subscription."""

    id: str


@dataclass(frozen=True, slots=True)
class SigningKey(_Named):
    """Return the row with the signing key. If there is no key yet, a non-empty `secret` becomes the
    key, and an empty `secret` is rejected with NoSuchSubscription.
    """

    secret: str


@dataclass(frozen=True, slots=True)
class DeleteSubscription(_OfCreation):
    """Delete a subscription. Answer: its last state."""


@dataclass(frozen=True, slots=True)
class LinkStreams(_OfCreation):
    """Add links. A re-created stream is linked from its beginning. Answer: the subscription."""

    links: tuple[Link, ...]


@dataclass(frozen=True, slots=True)
class UnlinkStream(_OfCreation):
    """Remove an explicit stream, unless the pattern matches it too. Answer: the subscription."""

    stream: str


@dataclass(frozen=True, slots=True)
class StreamGone(_OfCreation):
    """Remove the link of a deleted stream. An explicit link waits for the next stream with this
    name. Answer: the subscription.
    """

    stream: str
    created: str


@dataclass(frozen=True, slots=True)
class Wake(_OfCreation):
    """Make a wake if there is none and work is pending. Answer: the subscription."""

    wake_id: str
    ends: Ends


@dataclass(frozen=True, slots=True)
class Delivered(_OfCreation):
    """Record that a wake was announced, or accepted by its receiver. With `is_done`, all records
    that the wake showed are acknowledged. Has no effect if the wake has since ended or was claimed.
    Answer: the subscription.
    """

    generation: int
    is_done: bool


@dataclass(frozen=True, slots=True)
class Failed(_OfCreation):
    """Schedule the next attempt after a failed delivery. Answer: the subscription."""

    generation: int
    jitter: int
    """The jitter in permille of the pause, from -JITTER_PERMILLE to JITTER_PERMILLE."""


@dataclass(frozen=True, slots=True)
class Expire(_OfCreation):
    """End an expired wake, and make a new wake for pending work. Answer: the subscription."""

    generation: int
    wake_id: str
    """The id of the next wake."""


@dataclass(frozen=True, slots=True)
class ClaimWake(_OfCreation):
    """Claim a pull-wake subscription. Answer: the subscription."""

    worker: str
    wake_id: str
    """The id of this request, and of the wake if the claim makes a new wake."""
    ends: Ends


@dataclass(frozen=True, slots=True)
class AckWake(_OfCreation):
    """Acknowledge offsets of the current wake. Extends its lease, or ends the wake if `is_done`.
    Answer: the subscription.
    """

    generation: int
    wake_id: str
    acks: tuple[tuple[str, str, int], ...]
    """The acknowledged offsets: (log, creation time, offset)."""
    is_done: bool
    next_id: str
    """The id of this request, and of the next wake if work is pending."""
    ends: Ends


_OfOne = (
    LookSubscription
    | DeleteSubscription
    | LinkStreams
    | UnlinkStream
    | StreamGone
    | Wake
    | Delivered
    | Failed
    | Expire
    | ClaimWake
    | AckWake
)
SubscriptionRequest = PutSubscription | List | SigningKey | _OfOne
SubscriptionAnswer = Subscription | tuple[Subscription, ...] | QuorumLogError


def is_counted_once(request: SubscriptionRequest) -> bool:
    """Whether a request needs a `Stamp`. Requests about wakes carry their own ids."""
    if isinstance(request, LinkStreams):
        return any(each.is_explicit for each in request.links)
    return isinstance(request, PutSubscription | DeleteSubscription | UnlinkStream)


class Subscriptions(Rows[Subscription]):
    """All subscriptions that their log contains, and the ends of their wakes' leases."""

    noun = "subscription"
    absent = NoSuchSubscription

    def __init__(self) -> None:
        """Start without subscriptions."""
        super().__init__()
        self.links = 0
        """The number of links of all subscriptions."""

    def _add(self, row: Subscription) -> None:
        super()._add(row)
        self.links += len(row.links)

    def _drop(self, key: Key, *, keeps_lease: bool = False) -> Subscription | None:
        row = super()._drop(key, keeps_lease=keeps_lease)
        self.links -= 0 if row is None else len(row.links)
        return row

    def draft(
        self, *, end: int, now_s: float, wall_ms: int, database_ms: int = 0, expiry_ms: int = 0
    ) -> "SubscriptionDraft":
        """Begin a draft of the batch for the offset `end`."""
        del database_ms, expiry_ms
        return SubscriptionDraft(self, end=end, now_s=now_s, wall_ms=wall_ms)

    def held_until(self, row: Subscription) -> float:
        """The time when the lease of the current wake ends, in seconds of time awake."""
        generation, end = self._held_until.get(row.key, (0, 0.0))
        if generation == row.generation:
            return float(end)
        return self.since_s + row.settings.lease_ms / 1000

    def remembered(self, row: Subscription) -> Subscription:
        """The answer to copies of a change: the subscription without its streams, which may be many."""
        return replace(row, links=(), settings=replace(row.settings, streams=()))

    def size_of(self, row: Subscription) -> int:
        """A rough upper bound of a row's characters."""
        return row.size


class SubscriptionDraft(RowDraft[Subscription]):
    """A batch of requests that are decided, but not yet in the log."""

    def __init__(self, state: Subscriptions, *, end: int, now_s: float, wall_ms: int) -> None:
        """Begin a batch for the offset `end`."""
        super().__init__(state, end=end, now_s=now_s)
        self._state, self._wall_ms, self._size = state, wall_ms, 0
        self._links = state.links

    @property
    def is_full(self) -> bool:
        """Whether the batch accepts no more requests."""
        return super().is_full or self._size > _BATCH_CHARS

    def decide(self, request: Any, stamp: Stamp | None = None) -> Any:
        """Decide a request. The answer counts once the batch is in the log (`RowDraft.decide`). A
        copy of a change gets the answer without links, because many answers are remembered.
        """
        answer = super().decide(request, stamp)
        if stamp is not None and isinstance(answer, Subscription):
            self._size += self._state.remembered(answer).size
        return answer

    def _perform(self, request: PutSubscription | SigningKey | _OfOne) -> Subscription:
        match request:
            case SigningKey(secret):
                key = self._row(("", ""))
                if key is None and not secret:
                    raise NoSuchSubscription("the cluster has no signing key yet")
                return self._put(_key_row(secret)) if key is None else key
            case PutSubscription():
                return self._put_subscription(request)
            case _:
                row = self._row(("", request.id))
                if row is None or not request.id or not _is_meant(row, request):
                    raise NoSuchSubscription(f"there is no subscription {request.id}")
                return self._of_one(row, request)

    def _of_one(self, row: Subscription, request: _OfOne) -> Subscription:
        match request:
            case LookSubscription():
                return row
            case DeleteSubscription():
                self._links -= len(row.links)
                self._changed[row.key] = None
                return row
            case StreamGone(stream=stream, created=created):
                return self._put(_without_stream(row, stream, created), row)
            case LinkStreams(links=links):
                return self._put(self._linked(row, links), row)
            case UnlinkStream(stream=stream):
                return self._put(_unlinked(row, stream), row)
            case Wake():
                if row.phase != Phase.IDLE:
                    return row
                return self._put(self._woken(row, request.ends, request.wake_id), row)
            case Delivered():
                return self._delivered(row, request)
            case Failed():
                return self._failed(row, request)
            case Expire():
                return self._expired(row, request)
            case ClaimWake():
                return self._claimed(row, request)
            case AckWake():
                return self._acknowledged(row, request)

    def _put(self, row: Subscription, before: Subscription | None = None) -> Subscription:
        """Add a row to the batch, unless it equals `before`. Returns the row."""
        if row == before:
            return row
        row = replace(row, version=self._version)
        self._size += row.size
        self._links += len(row.links) - (0 if before is None else len(before.links))
        self._changed[row.key] = row
        return row

    # --- settings and links ----------------------------------------------------------------------

    def _put_subscription(self, request: PutSubscription) -> Subscription:
        known = self._row(("", request.id))
        if known is not None:
            if known.settings != request.settings:
                detail = "the subscription exists with another configuration: delete it first"
                raise SubscriptionExists(detail)
            return known
        if len(self._of_log("")) > SUBSCRIPTIONS_MAX:  # one of the rows is the signing key
            detail = f"the cluster has {SUBSCRIPTIONS_MAX} subscriptions, the maximum: delete some"
            raise TooManySubscriptions(detail)
        new = Subscription(
            request.id,
            self._version,
            request.settings,
            request.secret,
            request.origin,
            self._wall_ms,
        )
        return self._put(self._linked(new, request.links))

    def _linked(self, row: Subscription, links: Iterable[Link]) -> Subscription:
        """The subscription with further links. Beyond the bounds, an explicit link is rejected, and
        a link that only the pattern matches is left out. Raises: TooManySubscriptions.
        """
        known = {each.log: each for each in row.links}
        room = min(STREAMS_MAX - len(known), LINKS_MAX - self._links)
        for link in links:
            old = known.get(link.log)
            if old is not None:
                known[link.log] = _again(old, link)
            elif room > 0:
                known[link.log] = link
                room -= 1
            elif link.is_explicit:
                raise TooManySubscriptions(
                    f"a subscription links at most {STREAMS_MAX} streams, all together"
                    f" {LINKS_MAX}: remove links"
                )
        return replace(row, links=tuple(known.values()))

    # --- wakes -----------------------------------------------------------------------------------

    def _woken(self, row: Subscription, ends: Ends, wake_id: str) -> Subscription:
        """The subscription with a new wake if it has pending work, otherwise without a wake."""
        links = _reached(row.links, ends)
        row = replace(row, links=links, phase=Phase.IDLE, holder="", wake_id="")
        if not any(each.tail > each.acked for each in links):
            return row
        return replace(
            row,
            generation=row.generation + 1,
            wake_id=wake_id,
            phase=Phase.DUE,
            woken_ms=self._wall_ms,
        )

    def _hold(self, row: Subscription) -> Subscription:
        """The subscription with its wake held for a whole lease from now on."""
        until_s = self._now_s + row.settings.lease_ms / 1000
        self.held_until[row.key] = row.generation, until_s
        return replace(row, phase=Phase.HELD, attempts=0, next_ms=0)

    def _is_over(self, row: Subscription) -> bool:
        """Whether the current wake is held, and its lease has ended."""
        generation, end = self.held_until.get(row.key, (0, 0.0))
        until_s = end if generation == row.generation else self._state.held_until(row)
        return bool(row.phase == Phase.HELD and self._now_s >= until_s)

    def _delivered(self, row: Subscription, request: Delivered) -> Subscription:
        # A receiver may extend the lease before it answers.
        is_late = row.phase == Phase.HELD and row.settings.kind == Kind.WEBHOOK and request.is_done
        is_sent = row.phase in (Phase.DUE, Phase.OPEN) or is_late
        if row.generation != request.generation or not is_sent:
            return row
        if row.settings.kind == Kind.PULL:
            again_ms = self._wall_ms + RETRY_MS_MAX
            return self._put(replace(row, phase=Phase.OPEN, attempts=0, next_ms=again_ms), row)
        if not request.is_done:
            return self._put(self._hold(row), row)
        links = tuple(replace(each, acked=max(each.acked, each.tail)) for each in row.links)
        done = replace(row, links=links, phase=Phase.IDLE, wake_id="", attempts=0, next_ms=0)
        return self._put(done, row)

    def _failed(self, row: Subscription, request: Failed) -> Subscription:
        if row.generation != request.generation or row.phase not in (Phase.DUE, Phase.OPEN):
            return row
        pause_ms = min(RETRY_MS_MAX, _RETRY_MS << min(row.attempts, _DOUBLINGS_MAX))
        pause_ms = pause_ms * (1000 + request.jitter) // 1000
        failed = replace(row, attempts=row.attempts + 1, next_ms=self._wall_ms + pause_ms)
        return self._put(failed, row)

    def _expired(self, row: Subscription, request: Expire) -> Subscription:
        if row.generation != request.generation or not self._is_over(row):
            return row
        return self._put(self._woken(row, (), request.wake_id), row)

    def _claimed(self, row: Subscription, request: ClaimWake) -> Subscription:
        if row.settings.kind != Kind.PULL:
            raise InvalidRequest("only pull-wake subscriptions can be claimed; this is a webhook")
        if row.last == request.wake_id and row.phase == Phase.HELD:
            return row  # a copy of the claim; after the lease, a copy counts as a new claim
        before = row
        if row.phase == Phase.HELD and not self._is_over(row):
            raise AlreadyClaimed(
                f"worker {row.holder} has claimed the subscription: retry when its lease ends",
                current_holder=row.holder,
                generation=row.generation,
            )
        if row.phase in (Phase.IDLE, Phase.HELD):
            row = self._woken(row, request.ends, request.wake_id)
            if row.phase == Phase.IDLE:
                raise NoPendingWork("no records are pending: claim again after the next wake")
        else:
            row = replace(row, links=_reached(row.links, request.ends))
        row = replace(row, holder=request.worker, last=request.wake_id)
        return self._put(self._hold(row), before)

    def _acknowledged(self, row: Subscription, request: AckWake) -> Subscription:
        if row.last == request.next_id:
            return row
        is_held = row.phase == Phase.HELD
        is_sent = row.phase == Phase.DUE and row.settings.kind == Kind.WEBHOOK
        if (request.generation, request.wake_id) != (row.generation, row.wake_id) or not (
            is_held or is_sent
        ):
            raise WakeFenced("the wake has ended: wait for another", generation=row.generation)
        acked = replace(row, links=_acked(row, request))
        if request.is_done:
            acked = replace(acked, attempts=0, next_ms=0, last=request.next_id)
            return self._put(self._woken(acked, request.ends, request.next_id), row)
        return self._put(self._hold(acked), row)


@dataclass(slots=True)
class Discovery:
    """The streams that the owner still has to check for links of subscriptions."""

    names: set[str] = field(default_factory=set)
    """Streams that may be new or deleted."""
    is_all: bool = True
    """Whether any stream may be new or deleted."""

    def heard(self, name: str) -> None:
        """Record that a stream may have been created, changed or deleted."""
        self.names.add(name)
        if len(self.names) > HEARD_MAX:
            self.gap()

    def gap(self) -> None:
        """Record that changes of any stream may have been missed."""
        self.names.clear()
        self.is_all = True

    def take(self) -> tuple[set[str], bool]:
        """Return `names` and `is_all`, and clear them."""
        taken = self.names, self.is_all
        self.names, self.is_all = set(), False
        return taken

    def answered(self, name: str, answer: object) -> None:
        """Record the answer to a request that links or unlinks a stream. After a failure, whose
        outcome may be unknown, the stream is checked again.
        """
        is_failed = isinstance(answer, QuorumLogError)
        if is_failed and not isinstance(answer, NoSuchSubscription):
            self.heard(name)


def discovered(
    row: Subscription, stream: str, created: str, *, is_match: bool
) -> LinkStreams | StreamGone | None:
    """The request that updates a subscription's link to the present creation of a stream; None if
    the link is up to date. `created`: empty if the stream does not exist. `is_match`: whether the
    pattern matches the stream.
    """
    link = next((each for each in row.links if each.log == stream), None)
    is_new = link is None or link.created < created or (is_match and not link.is_glob)
    if created and is_new and (is_match or link is not None):
        return LinkStreams(row.id, row.secret, (Link(stream, created, is_glob=is_match),))
    if not created and link is not None and link.created:
        return StreamGone(row.id, row.secret, stream, link.created)
    return None


def _is_meant(row: Subscription, request: _OfOne) -> bool:
    """Whether a request applies to this creation of the subscription."""
    return isinstance(request, LookSubscription) or request.secret == row.secret


def _reached(links: tuple[Link, ...], ends: Ends) -> tuple[Link, ...]:
    """The links, with their tails advanced to the given ends of their streams."""
    known = {(log, created): end for log, created, end in ends}

    def tail(link: Link) -> int:
        return max(link.tail, link.acked, known.get((link.log, link.created), 0))

    return tuple(replace(each, tail=tail(each)) for each in links)


def _acked(row: Subscription, request: AckWake) -> tuple[Link, ...]:
    """The links after the acknowledgements of a request. Raises: InvalidOffset."""
    ends = {each.log: each.tail for each in _reached(row.links, request.ends)}
    links = {each.log: each for each in row.links}
    for log, created, offset in request.acks:
        link = links.get(log)
        if link is None or not link.created or link.created != created:
            raise InvalidOffset(f"the subscription does not link this creation of stream {log}")
        if not link.acked <= offset <= ends[log]:
            raise InvalidOffset(
                f"offset {offset} of {log} must be between {link.acked} and {ends[log]}"
            )
        links[log] = replace(link, acked=offset)
    return tuple(links.values())


def _again(old: Link, new: Link) -> Link:
    """Merge two links to one name. A re-created stream is linked from its beginning."""
    link = replace(
        old, is_explicit=old.is_explicit or new.is_explicit, is_glob=old.is_glob or new.is_glob
    )
    if new.created <= old.created:
        return link
    return replace(link, created=new.created, acked=0, tail=0)


def _unlinked(row: Subscription, stream: str) -> Subscription:
    kept = (replace(each, is_explicit=False) if each.log == stream else each for each in row.links)
    return replace(row, links=tuple(each for each in kept if each.is_explicit or each.is_glob))


def _without_stream(row: Subscription, stream: str, created: str) -> Subscription:
    links = []
    for each in row.links:
        if (each.log, each.created) != (stream, created):
            links.append(each)
        elif each.is_explicit:
            links.append(Link(stream, is_explicit=True))
    return replace(row, links=tuple(links))


def _key_row(secret: str) -> Subscription:
    return Subscription("", 0, SubscriptionSettings("", "", (), "", "", 0, ""), secret)
