"""Subscriptions of streams, at /v1/stream/__ds/subscriptions (sections 6 and 7 of the protocol)."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from time import monotonic
from typing import Annotated, Any, Final, Literal, Self

import orjson
from aiohttp import hdrs, web
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from yarl import URL

from quorumlog import errors
from quorumlog.net import parameters
from quorumlog.net.operations import Content, Handler, Reply, Route
from quorumlog.net.parameters import Given
from quorumlog.net.timers import time_text, wall_s
from quorumlog.protocol import subscriptions
from quorumlog.protocol.batch import Record
from quorumlog.protocol.log import LogState
from quorumlog.protocol.log.messages import Append
from quorumlog.protocol.subscriptions import (
    STREAMS_MAX,
    Kind,
    Link,
    Phase,
    Subscription,
    SubscriptionSettings,
)
from services.gateway.edge import operations as op
from services.gateway.edge.access import scopes
from services.gateway.edge.access.scopes import OPEN, Named, Scope, on
from services.gateway.edge.http import body
from services.gateway.edge.http.limits import Room
from services.gateway.edge.http.media import json_value, no_content
from services.gateway.edge.logs import TAKING_OVER
from services.gateway.logs.manager import LogManager
from services.gateway.logs.subscriptions import DeliveryFailed, literal, new_wake
from services.gateway.logs.values import STREAM_PREFIX, stream_name, stream_path
from services.gateway.streams.config import config_of
from services.gateway.streams.operations import (
    PREFIX,
    RESERVED,
    Place,
    log_of,
    offset_of,
    offset_text,
)
from services.gateway.streams.webhooks import URL_CHARS_MAX, Keys, Networks, Webhooks

PAGE_MAX: Final = 100
"""Maximum number of subscriptions in a page."""
LEASE_MS_MIN: Final = 1000
LEASE_MS_MAX: Final = 600_000
"""Bounds of a lease's length (section 6.2)."""
DESCRIPTION_CHARS_MAX: Final = 1000
PATTERN_CHARS_MAX: Final = 1000
WORKER_CHARS_MAX: Final = 200

_ROOT: Final = f"{PREFIX}{RESERVED}"
_ALL: Final = f"{_ROOT}/subscriptions"
_ONE: Final = _ALL + "/{id}"
ID: Final = parameters.path_text("id", "[!-.0-~]{1,200}", "The subscription.", "mailer")
STREAM: Final = replace(
    parameters.path_text("path", ".+", "The stream.", "events/a"),
    parse=lambda text, _pointer: log_of(_path(text)),
)
LIMIT: Final = parameters.query_integer("limit", 1, PAGE_MAX, "Maximum of a page.", PAGE_MAX)
AFTER: Final = parameters.query_text("after", "[!-.0-~]{1,200}", "List those after this id.")

_KEYS_S: Final = 60.0
"""Time for which a gateway caches the keys that sign webhooks. Chosen by judgement."""
_PLAIN: Final = r"^[^\x00-\x1f\x7f]*$"
"""Text without control characters, whose JSON escapes are six times as long."""
_Path = Annotated[str, StringConstraints(min_length=1, max_length=600)]
_Paths = Annotated[list[_Path], Field(max_length=STREAMS_MAX)]


class _Body(BaseModel):
    """A request body of the protocol. Ignores unknown members, which later versions may add."""

    model_config = ConfigDict(frozen=True, strict=True, use_attribute_docstrings=True)


class WebhookTarget(_Body):
    """The URL to which wakes are sent."""

    url: Annotated[str, StringConstraints(min_length=1, max_length=URL_CHARS_MAX, pattern=_PLAIN)]


class SubscriptionPut(_Body):
    """The configuration of a subscription, which can't be changed later."""

    type: Literal["webhook", "pull-wake"]
    pattern: (
        Annotated[str, StringConstraints(max_length=PATTERN_CHARS_MAX, pattern=_PLAIN)] | None
    ) = None
    """A glob for paths of streams: `*` is one segment, `**` any number of segments."""
    streams: _Paths | None = None
    """The paths of further streams to follow."""
    webhook: WebhookTarget | None = None
    wake_stream: _Path | None = None
    """The stream that announces the wakes of a `pull-wake` subscription."""
    lease_ttl_ms: Annotated[int, Field(ge=LEASE_MS_MIN, le=LEASE_MS_MAX)] = 30_000
    description: (
        Annotated[str, StringConstraints(max_length=DESCRIPTION_CHARS_MAX, pattern=_PLAIN)] | None
    ) = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not self.pattern and not self.streams:
            raise ValueError("at least one of `pattern` and `streams` is required")
        if self.type == "webhook" and self.webhook is None:
            raise ValueError("a webhook subscription requires webhook.url")
        if self.type == "pull-wake" and self.wake_stream is None:
            raise ValueError("a pull-wake subscription requires wake_stream")
        return self

    @property
    def settings(self) -> SubscriptionSettings:
        """The configuration, normalized. Raises: BadRequest."""
        streams = tuple(sorted({log_of(_path(each)) for each in self.streams or ()}))
        wake_log = log_of(_path(self.wake_stream)) if self.wake_stream else ""
        if wake_log in streams:
            raise errors.BadRequest("`streams` must not contain the subscription's wake_stream")
        return SubscriptionSettings(
            self.type,
            _path(self.pattern or ""),
            streams,
            self.webhook.url if self.webhook and self.type == "webhook" else "",
            wake_log,
            self.lease_ttl_ms,
            self.description or "",
        )


class StreamsAdded(_Body):
    """Streams to add to a subscription."""

    streams: Annotated[_Paths, Field(min_length=1)]


class WakeClaim(_Body):
    """The worker that claims a subscription."""

    worker: Annotated[
        str, StringConstraints(min_length=1, max_length=WORKER_CHARS_MAX, pattern=_PLAIN)
    ]


class OneAck(_Body):
    """Acknowledges all records of a stream below an offset."""

    stream: _Path
    offset: Annotated[str, StringConstraints(max_length=100)]


class WakeAck(_Body):
    """Acknowledges offsets of the current wake. Without `done` the lease is extended."""

    wake_id: Annotated[str, StringConstraints(max_length=100)]
    generation: int
    acks: Annotated[list[OneAck], Field(max_length=STREAMS_MAX)] = []
    done: bool = False


_SPOKEN: Final[dict[type[errors.QuorumLogError], str]] = {
    errors.InvalidRequest: "INVALID_REQUEST",
    errors.BadRequest: "INVALID_REQUEST",
    errors.NoSuchSubscription: "SUBSCRIPTION_NOT_FOUND",
    errors.SubscriptionExists: "SUBSCRIPTION_ALREADY_EXISTS",
    errors.TooManySubscriptions: "TOO_MANY_SUBSCRIPTIONS",
    errors.WebhookUrlRejected: "WEBHOOK_URL_REJECTED",
    errors.WakeTokenInvalid: "TOKEN_INVALID",
    errors.WakeFenced: "FENCED",
    errors.AlreadyClaimed: "ALREADY_CLAIMED",
    errors.NoPendingWork: "NO_PENDING_WORK",
    errors.InvalidOffset: "INVALID_OFFSET",
}
"""The protocol's error codes, for the member `error` of a problem."""
_STREAM: Final = {"path": "events/a", "link_type": "glob", "acked_offset": "-1"}
_TAIL: Final = {"tail_offset": "0000000000000000001_00000000000000", "has_pending": True}
_EXAMPLE: Final[dict[str, Any]] = {
    "id": "mailer",
    "subscription_id": "mailer",
    "type": "webhook",
    "pattern": "events/*",
    "streams": [_STREAM],
    "webhook": {"url": "https://worker.example/hook"},
    "wake_stream": None,
    "lease_ttl_ms": 30000,
    "created_at": "2026-01-02T03:04:05.678Z",
    "status": "active",
    "description": None,
}
_CLAIMED: Final = {
    "wake_id": "w_1",
    "generation": 7,
    "token": "7.f00",
    "streams": [_STREAM | _TAIL],
    "lease_ttl_ms": 30000,
}
_ACK: Final = {
    "wake_id": "w_1",
    "generation": 7,
    "acks": [{"stream": "events/a", "offset": _TAIL["tail_offset"]}],
    "done": True,
}
_ANY: Final = {"type": "object"}
_TAKES_ACK: Final = op.takes(WakeAck, {"done": _ACK})
_ACKED: Final = op.gives("Acknowledged.", _ANY, {"all": {"ok": True, "next_wake": False}})
_KEPT: Final = (
    *TAKING_OVER,
    errors.QuorumTimeout,
    errors.NotTheOwner,
    errors.WriterLost,
    errors.NoSuchSubscription,
)
"""Errors of a request to the log of subscriptions, which this gateway may have to take over."""
_BY_WAKE: Final = (
    *_KEPT,
    errors.MetadataUnavailable,
    errors.WakeTokenInvalid,
    errors.WakeFenced,
    errors.InvalidOffset,
)
_MANAGE: Final = on(Named.SOME, Scope.MANAGE)


class SubscriptionRoutes(op.Handlers, tag="Durable Streams"):
    """HTTP handlers for subscriptions of streams, which also send the subscriptions' wakes."""

    def __init__(self, logs: LogManager, room: Room, networks: Networks) -> None:
        """`networks`: the private networks to which webhooks may be sent."""
        self._logs, self._room = logs, room
        self._subscriptions = logs.subscriptions
        self._webhooks = Webhooks(networks)
        self._known_keys: Keys | None = None
        self._keys_until_s = 0.0
        self._subscriptions.begin(self._send)

    async def close(self, _app: web.Application) -> None:
        """Close the connections to webhooks."""
        await self._webhooks.close()

    def routes(self) -> list[Route]:
        """The operations and their handlers, whose errors also have the protocol's codes."""
        return [replace(route, handler=_speaking(route.handler)) for route in super().routes()]

    @op.operation(
        f"GET {_ROOT}/jwks.json",
        scope=OPEN,
        replies={
            200: Reply(
                "A JWK set.", {"application/jwk-set+json": Content(_ANY, {"none": {"keys": []}})}
            )
        },
        errors=(*_KEPT, errors.MetadataUnavailable),
    )
    async def get_webhook_keys(self, _request: web.Request, _given: Given) -> web.Response:
        """Get the keys that sign webhooks.

        Receivers verify the header `Webhook-Signature` with these public keys (Ed25519).
        """
        try:
            keys = [(await self._keys(creates=False)).jwk]
        except errors.NoSuchSubscription:
            keys = []
        return web.Response(
            body=orjson.dumps({"keys": keys}),
            headers={
                hdrs.CONTENT_TYPE: "application/jwk-set+json",
                hdrs.CACHE_CONTROL: "public, max-age=300" if keys else "no-store",
            },
        )

    @op.operation(
        f"GET {_ALL}",
        (LIMIT, AFTER),
        replies=op.gives("A page.", _ANY, {"last": {"subscriptions": [_EXAMPLE], "next": None}}),
        errors=_KEPT,
        scope=_MANAGE,
    )
    async def list_subscriptions(self, request: web.Request, given: Given) -> web.Response:
        """List subscriptions.

        Returns the subscriptions whose streams the caller may manage, sorted by id. A page may
        contain fewer than `limit` subscriptions.
        """
        limit = given[LIMIT]
        found = await self._subscriptions.page("", after=given[AFTER] or "", limit=limit + 1)
        shown = [
            await self._shown(row) for row in found[:limit] if _may(request, Scope.MANAGE, row)
        ]
        following = found[limit - 1].id if len(found) > limit else None
        return json_value({"subscriptions": shown, "next": following})

    @op.operation(
        f"PUT {_ONE}",
        (ID,),
        body=op.takes(
            SubscriptionPut,
            {
                "webhook": {
                    "type": "webhook",
                    "pattern": "events/*",
                    "webhook": {"url": "https://worker.example/hook"},
                },
                "pull-wake": {
                    "type": "pull-wake",
                    "streams": ["events/a"],
                    "wake_stream": "wake/pool",
                },
            },
        ),
        replies=op.gives("Created.", _ANY, {"new": _EXAMPLE}, status=201)
        | op.gives("The subscription exists with this configuration.", _ANY, {"same": _EXAMPLE}),
        errors=(
            *_KEPT,
            errors.SubscriptionExists,
            errors.TooManySubscriptions,
            errors.WebhookUrlRejected,
            errors.RequestOutdated,
        ),
        scope=_MANAGE,
        needs_body=True,
        is_audited=True,
    )
    async def put_subscription(self, request: web.Request, given: Given) -> web.Response:
        """Create a subscription, or confirm its configuration.

        The subscription gets wakes for records that are appended from now on. A token needs
        `manage` on each stream and each possible match of the pattern, and `append` on the wake
        stream.
        """
        wanted = (await body.read_model(request, self._room, SubscriptionPut)).settings
        _check(request, Scope.MANAGE, wanted.streams, wanted.pattern)
        if wanted.wake_log:
            _check(request, Scope.APPEND, (wanted.wake_log,))
        if wanted.kind == Kind.WEBHOOK:
            self._webhooks.check(wanted.url)
        origin = str(request.url.origin())
        row, is_new = await self._subscriptions.put(given[ID], wanted, origin)
        if not _may(request, Scope.MANAGE, row):  # another client has added streams
            raise errors.SubscriptionExists("the subscription has other streams: use another id")
        return json_value(await self._shown(row), status=201 if is_new else 200)

    @op.operation(
        f"GET {_ONE}",
        (ID,),
        replies=op.gives("The subscription.", _ANY, {"one": _EXAMPLE}),
        errors=_KEPT,
        scope=_MANAGE,
    )
    async def get_subscription(self, request: web.Request, given: Given) -> web.Response:
        """Get a subscription."""
        return json_value(await self._shown(await self._look(request, given, Scope.MANAGE)))

    @op.operation(
        f"DELETE {_ONE}",
        (ID,),
        replies={204: Reply("There is no such subscription any more.")},
        errors=(*_KEPT, errors.RequestOutdated),
        scope=_MANAGE,
        is_audited=True,
    )
    async def delete_subscription(self, request: web.Request, given: Given) -> web.Response:
        """Delete a subscription.

        The subscription's current wake ends, and can no longer acknowledge offsets. Idempotent.
        """
        try:
            row = await self._look(request, given, Scope.MANAGE)
            await self._subscriptions.ask(subscriptions.DeleteSubscription(row.id, row.secret))
        except errors.NoSuchSubscription:
            pass
        return no_content()

    @op.operation(
        f"POST {_ONE}/streams",
        (ID,),
        body=op.takes(StreamsAdded, {"two": {"streams": ["events/x", "events/y"]}}),
        replies={204: Reply("The subscription has these streams.")},
        errors=(*_KEPT, errors.TooManySubscriptions, errors.RequestOutdated),
        scope=_MANAGE,
        needs_body=True,
        is_audited=True,
    )
    async def add_subscription_streams(self, request: web.Request, given: Given) -> web.Response:
        """Add streams to a subscription.

        The subscription follows each added stream from the stream's end. Idempotent. A token also
        needs `manage` on each added stream, and `append` on the wake stream.
        """
        wanted = await body.read_model(request, self._room, StreamsAdded)
        row = await self._look(request, given, Scope.MANAGE)
        names = sorted({log_of(_path(each)) for each in wanted.streams})
        if row.settings.wake_log in names:
            raise errors.BadRequest("`streams` must not contain the subscription's wake_stream")
        _check(request, Scope.MANAGE, names)
        if row.settings.wake_log:
            _check(request, Scope.APPEND, (row.settings.wake_log,))
        await self._subscriptions.link(row, names)
        return no_content()

    @op.operation(
        f"DELETE {_ONE}/streams/{{path}}",
        (ID, STREAM),
        replies={204: Reply("The subscription lacks this explicit stream.")},
        errors=(*_KEPT, errors.RequestOutdated),
        scope=_MANAGE,
        is_audited=True,
        ignores_unknown=True,
    )
    async def remove_subscription_stream(self, request: web.Request, given: Given) -> web.Response:
        """Remove a stream from a subscription.

        The stream stays linked if the pattern matches it. Idempotent.
        """
        row = await self._look(request, given, Scope.MANAGE)
        asked = subscriptions.UnlinkStream(row.id, row.secret, given[STREAM])
        await self._subscriptions.ask(asked)
        return no_content()

    @op.operation(
        f"POST {_ONE}/claim",
        (ID,),
        body=op.takes(WakeClaim, {"one": {"worker": "worker-1"}}),
        replies=op.gives("The wake.", _ANY, {"one": _CLAIMED}),
        errors=(*_KEPT, errors.AlreadyClaimed, errors.NoPendingWork),
        scope=on(Named.SOME, Scope.WORK),
        needs_body=True,
    )
    async def claim_subscription(self, request: web.Request, given: Given) -> web.Response:
        """Claim a pull-wake subscription.

        The worker gets the pending work for `lease_ttl_ms`. Acknowledgements without `done` extend
        the lease. A token needs `work` on each stream and each possible match of the pattern.
        """
        wanted = await body.read_model(request, self._room, WakeClaim)
        row = await self._look(request, given, Scope.WORK)
        claim = partial(subscriptions.ClaimWake, row.id, row.secret, wanted.worker, new_wake())
        is_held = row.phase == Phase.HELD  # the claim is probably refused
        keys = await self._keys()  # first, because an error must not leave a claimed wake behind
        row = await self._subscriptions.by_ends(row, claim, is_known=is_held)
        claimed = {
            "wake_id": row.wake_id,
            "generation": row.generation,
            "token": keys.token(row.id, row.secret, row.generation),
            "streams": _links_json(row, has_tails=True),
            "lease_ttl_ms": row.settings.lease_ms,
        }
        return json_value(claimed)

    @op.operation(
        f"POST {_ONE}/callback",
        (ID,),
        body=_TAKES_ACK,
        replies=_ACKED,
        errors=_BY_WAKE,
        scope=OPEN,
        needs_body=True,
    )
    async def call_back(self, request: web.Request, given: Given) -> web.Response:
        """Acknowledge a webhook's wake.

        Requires the wake's token, as `Authorization: Bearer …`. Without `done` the lease is
        extended.
        """
        return await self._acknowledged(request, given, Kind.WEBHOOK)

    @op.operation(
        f"POST {_ONE}/ack",
        (ID,),
        body=_TAKES_ACK,
        replies=_ACKED,
        errors=_BY_WAKE,
        scope=OPEN,
        needs_body=True,
    )
    async def ack_subscription(self, request: web.Request, given: Given) -> web.Response:
        """Acknowledge a claimed wake.

        Requires the claim's token, as `Authorization: Bearer …`. Without `done` the lease is
        extended.
        """
        return await self._acknowledged(request, given, Kind.PULL)

    @op.operation(
        f"POST {_ONE}/release",
        (ID,),
        body=_TAKES_ACK,
        replies={204: Reply("Released. Pending work gets another wake.")},
        errors=_BY_WAKE,
        scope=OPEN,
        needs_body=True,
    )
    async def release_subscription(self, request: web.Request, given: Given) -> web.Response:
        """Release a claimed wake.

        Requires the claim's token, as `Authorization: Bearer …`. Acknowledges nothing.
        """
        await self._acknowledged(request, given, Kind.PULL, is_release=True)
        return no_content()

    # --- what the handlers share -----------------------------------------------------------------

    async def _keys(self, *, creates: bool = True) -> Keys:
        """The keys, cached for `_KEYS_S`. A lost log of subscriptions leads to new keys."""
        if self._known_keys is None or monotonic() > self._keys_until_s:
            secret = await self._subscriptions.signing_key(creates=creates)
            self._known_keys = Keys(secret.encode())
            self._keys_until_s = monotonic() + _KEYS_S
        return self._known_keys

    async def _look(self, request: web.Request, given: Given, scope: Scope) -> Subscription:
        """The subscription that a request names. If the caller has no scope at all on one of the
        streams, the error hides the subscription. Raises: NoSuchSubscription, Forbidden.
        """
        row = await self._subscriptions.look(given[ID])
        if not _may(request, scope, row):
            if any(not _scopes(request, name) for name in _names(row)):
                raise errors.NoSuchSubscription(f"there is no subscription {row.id} for this token")
            raise scopes.caller_of(request).lacks((scope,), "the subscription's streams")
        return row

    async def _acknowledged(
        self, request: web.Request, given: Given, kind: Kind, *, is_release: bool = False
    ) -> web.Response:
        scheme, _, token = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        try:
            keys = await self._keys(creates=False)
        except errors.NoSuchSubscription as error:
            raise errors.WakeTokenInvalid from error
        generation, uid = keys.generation_of(given[ID], token.strip())
        if scheme.lower() != "bearer":
            raise errors.WakeTokenInvalid
        wanted = await body.read_model(request, self._room, WakeAck)
        row = await self._subscriptions.look(given[ID])
        if row.settings.kind != kind:
            detail = f"this operation needs a {kind} subscription (got {row.settings.kind})"
            raise errors.BadRequest(detail)
        if not row.secret.startswith(uid) or generation != wanted.generation:
            raise errors.WakeFenced("the token belongs to another wake: use the newest wake")
        acks, is_done = tuple(map(_ack_of, wanted.acks)), wanted.done
        if is_release:
            acks, is_done = (), True
        asked = partial(
            subscriptions.AckWake,
            row.id,
            row.secret,
            wanted.generation,
            wanted.wake_id,
            acks,
            is_done,
            new_wake(),
        )
        logs = (log for log, _, _ in acks)
        row = await self._subscriptions.by_ends(row, asked, logs, is_known=not is_done)
        return json_value({"ok": True, "next_wake": row.generation != wanted.generation})

    async def _shown(self, row: Subscription) -> dict[str, Any]:
        """The JSON of a subscription for clients."""
        settings = row.settings
        webhook = None
        if settings.kind == Kind.WEBHOOK:
            signing = {
                "alg": "ed25519",
                "kid": (await self._keys()).jwk["kid"],
                "jwks_url": f"{row.origin}{_ROOT}/jwks.json",
            }
            webhook = {"url": settings.url, "signing": signing}
        return {
            "id": row.id,
            "subscription_id": row.id,
            "type": settings.kind,
            "pattern": settings.pattern or None,
            "streams": _links_json(row),
            "webhook": webhook,
            "wake_stream": stream_path(settings.wake_log) if settings.wake_log else None,
            "lease_ttl_ms": settings.lease_ms,
            "created_at": time_text(row.created_ms / 1000),
            "status": "failed" if row.attempts else "active",
            "description": settings.description or None,
        }

    # --- deliveries ------------------------------------------------------------------------------

    async def _send(self, row: Subscription) -> bool:
        """Deliver a webhook's wake, or announce a pull-wake. Raises: DeliveryFailed."""
        if row.settings.kind == Kind.PULL:
            await self._announce(row)
            return False
        keys = await self._keys()
        callback = URL(f"{row.origin}{_ALL}") / row.id / "callback"
        document = {
            "subscription_id": row.id,
            "wake_id": row.wake_id,
            "generation": row.generation,
            "streams": _links_json(row, has_tails=True),
            "callback_url": str(callback),
            "callback_token": keys.token(row.id, row.secret, row.generation),
        }
        return await self._webhooks.send(row.settings.url, document, keys)

    async def _announce(self, row: Subscription) -> None:
        log = await self._logs.rows.row(row.settings.wake_log)
        config = config_of(log)
        if config is None or not config.is_json or log.state is LogState.CLOSED:
            raise DeliveryFailed("wake_stream must be an open stream of application/json")
        pending = row.pending(())
        event = {
            "type": "wake",
            "subscription_id": row.id,
            "stream": stream_path(pending[0].log) if pending else "",
            "generation": row.generation,
            "ts": int(wall_s() * 1000),
        }
        with self._logs.accesses.during(log):
            call = Append.of((Record(orjson.dumps(event)),), created_at=log.created_at)
            await self._logs.append(log.name, call)


def _path(text: str) -> str:
    """A stream's path without slashes at its ends."""
    return text.strip("/")


def _ack_of(ack: OneAck) -> tuple[str, str, int]:
    """The stream's log, its creation time and the offset. Raises: BadRequest, InvalidOffset."""
    place = offset_of(ack.offset, "/acks")
    if not isinstance(place, Place):
        raise errors.InvalidOffset("`offset` must be a Stream-Next-Offset of the stream")
    return log_of(_path(ack.stream)), place.created_at, place.at


def _links_json(row: Subscription, *, has_tails: bool = False) -> list[dict[str, Any]]:
    def shown(link: Link) -> dict[str, Any]:
        acked = offset_text(link.acked, link.created) if link.created and link.acked else "-1"
        found: dict[str, Any] = {
            "path": stream_path(link.log),
            "link_type": "explicit" if link.is_explicit else "glob",
            "acked_offset": acked,
        }
        if has_tails:
            tail = max(link.tail, link.acked)
            found["tail_offset"] = offset_text(tail, link.created) if link.created else "-1"
            found["has_pending"] = link.tail > link.acked
        return found

    return [shown(link) for link in row.links]


def _all_of(pattern: str) -> Sequence[str]:
    """A name that stands for all possible matches of a pattern; empty without a pattern. The name
    ends with a star, which no log's name contains, so only grants for a prefix cover it.
    """
    return (f"{STREAM_PREFIX}{stream_name(literal(pattern))}*",) if pattern else ()


def _names(row: Subscription) -> Iterable[str]:
    """The names that the grants for a subscription must cover. They include the configured streams
    and pattern, because links end when their streams are deleted.
    """
    settings = row.settings
    return chain(settings.streams, _all_of(settings.pattern), (each.log for each in row.links))


def _check(request: web.Request, scope: Scope, names: Iterable[str], pattern: str = "") -> None:
    """Require a scope on streams and on all possible matches of a pattern. Raises: Forbidden."""
    for name in chain(names, _all_of(pattern)):
        scopes.caller_of(request).check(scope, scopes.Kind.LOGS, name)


def _scopes(request: web.Request, name: str) -> frozenset[Scope]:
    return scopes.caller_of(request).scopes(scopes.Kind.LOGS, name)


def _may(request: web.Request, scope: Scope, row: Subscription) -> bool:
    return all(scope in _scopes(request, name) for name in _names(row))


def _speaking(handler: Handler) -> Handler:
    """Wrap a handler, so that its errors have the member `error`, as the protocol requires."""

    async def handle(request: web.Request, given: Given) -> web.StreamResponse:
        try:
            return await handler(request, given)
        except errors.QuorumLogError as error:
            code = _SPOKEN.get(type(error))
            if code is None:
                raise
            if isinstance(error, errors.InvalidRequest):  # the protocol requires 400
                error = errors.BadRequest(error.detail, **error.members)
            named = {"code": code, "message": error.detail}
            for member in ("current_holder", "generation"):
                if member in error.members:
                    named[member] = error.members[member]
            raise error.replace(members={**error.members, "error": named}) from error

    return handle
