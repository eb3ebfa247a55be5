"""Plans and creates forks of streams (section 4.2).

A fork is a log that names ranges of its source's closed ledgers (rule 27a). Therefore the source's
offsets are valid in the fork up to the fork's beginning. A log counts records, which are JSON
messages or chunks of bytes. `Stream-Fork-Sub-Offset` counts JSON messages or bytes. If the
sub-offset ends within a chunk, the first part becomes the fork's first own record.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

from aiohttp import web

from quorumlog import errors
from quorumlog.net.parameters import Given
from quorumlog.protocol.batch import RECORDS_MAX, Record
from quorumlog.protocol.log import LogMetadata, LogSettings
from services.gateway.edge.access.scopes import Kind, Scope, caller_of
from services.gateway.logs.manager import LogManager
from services.gateway.streams import operations as op
from services.gateway.streams.config import Forked, StreamConfig, config_of, media_of
from services.gateway.streams.reads import Found

EXISTS: Final = "the stream exists with other settings: delete it first, or use another name"

Find = Callable[[str], Awaitable[Found]]
"""Finds the stream of a log. Raises: NoSuchLog."""


@dataclass(frozen=True, slots=True)
class ForkAsked:
    """A request for a fork. Settings that are None come from the source."""

    source: str
    """Name of the source's log."""
    offset: op.Place | Literal[0] | None
    sub_offset: int
    content_type: str | None
    expires_at: str | None = None
    ttl_s: int | None = None

    @property
    def has_lifetime(self) -> bool:
        """Whether the request sets when the fork expires. If not, the source's settings apply."""
        return self.expires_at is not None or self.ttl_s is not None

    def is_made(self, config: StreamConfig) -> bool:
        """Whether an earlier attempt of this request created the stream that has this `config`."""
        made = config.forked
        if made is None or (made.source, made.sub_offset) != (self.source, self.sub_offset):
            return False
        wanted = replace(
            config,
            content_type=self.content_type or config.content_type,
            expires_at=self.expires_at if self.has_lifetime else config.expires_at,
            ttl_s=self.ttl_s if self.has_lifetime else config.ttl_s,
        )
        is_there = self.offset in (None, made.offset, op.Place(made.offset, made.created_at))
        return is_there and wanted.equals(config)


@dataclass(frozen=True, slots=True)
class ForkPlan:
    """A fork to create, with the settings that it inherits from its source."""

    config: StreamConfig
    source: LogMetadata
    at: int
    """The offset of the fork's first own record."""
    prefix: tuple[Record, ...] = ()
    """The fork's first own record, if the fork begins within a record of the source."""


def asked(given: Given) -> ForkAsked | None:
    """The fork that a creation requests, or None. Raises: BadRequest."""
    source, offset, sub = given[op.FORKED_FROM], given[op.FORK_OFFSET], given[op.FORK_SUB_OFFSET]
    if source is None:
        if offset is not None or sub is not None:
            raise errors.BadRequest(
                "Stream-Fork-Offset and Stream-Fork-Sub-Offset require Stream-Forked-From"
            )
        return None
    return ForkAsked(
        source,
        offset,
        sub or 0,
        given[op.CONTENT_TYPE],
        given[op.EXPIRES_AT],
        given[op.TTL],
    )


def inherited(wanted: ForkAsked, source: StreamConfig) -> StreamConfig:
    """A fork's settings without its offsets. Settings that the request left out come from the
    source (the table of section 4.2).

    Raises: StreamConflict if the request has another content type than the source.
    """
    if wanted.content_type is not None and media_of(wanted.content_type) != source.media:
        raise errors.StreamConflict(
            f"Content-Type must be the source's, {source.media}, or left out", log=wanted.source
        )
    lifetime = wanted if wanted.has_lifetime else source
    return StreamConfig(
        source.content_type if wanted.content_type is None else wanted.content_type,
        lifetime.expires_at,
        lifetime.ttl_s,
    )


class StreamForks:
    """Creates forks at this gateway."""

    def __init__(self, logs: LogManager, find: Find) -> None:
        """Keeps no state."""
        self._logs, self._find = logs, find

    async def made(
        self, name: str, wanted: ForkAsked, exists: Callable[[LogMetadata], Awaitable[bool]]
    ) -> Found | None:
        """The stream of this name if an earlier attempt of the request created it; None if no such
        stream exists. `exists` returns False for an expired stream, which it deletes.

        Raises: StreamConflict if another request created the stream.
        """
        try:
            row = await self._logs.rows.row(name)
        except errors.LogDeleted as error:
            raise taken(name) from error
        except errors.NoSuchLog:
            return None
        config = config_of(row)
        if config is not None and not await exists(row):
            return None
        if config is None or not wanted.is_made(config):
            raise errors.StreamConflict(EXISTS, log=name)
        return Found(row, config)

    async def plan(
        self, request: web.Request, wanted: ForkAsked, made: StreamConfig | None
    ) -> ForkPlan:
        """Plan the fork. `made` has the settings of a fork whose creation is unfinished.

        Raises: Forbidden (the source is not readable), NoSuchLog, StreamConflict, BadRequest.
        """
        caller_of(request).check(Scope.READ, Kind.LOGS, wanted.source)
        try:
            source = await self._find(wanted.source)
        except errors.LogDeleted as error:
            raise errors.StreamConflict(
                "the fork's source was deleted: fork another stream", log=wanted.source
            ) from error
        end, _ = await self._logs.reader.tail(source.row.name, source.row)
        offset = end
        if made is not None and made.forked is not None:
            source.row.check_created(made.forked.created_at)
            offset = made.forked.offset
        elif wanted.offset is not None:
            offset = source.at(wanted.offset)
        if offset > end:
            end = max(end, await self._logs.reader.closed_end(source.row))
        if not source.row.first_offset <= offset <= end:
            first = source.row.first_offset
            detail = f"must be an offset of the source, from {first} to {end} (got {offset})"
            raise errors.BadRequest(f"/header/Stream-Fork-Offset: {detail}")
        at, prefix = await self._begin(source, offset, wanted.sub_offset)
        forked = Forked(wanted.source, offset, wanted.sub_offset, source.row.created_at)
        return ForkPlan(
            replace(inherited(wanted, source.config), forked=forked), source.row, at, prefix
        )

    async def create(
        self, name: str, plan: ForkPlan, settings: LogSettings
    ) -> tuple[LogMetadata, bool]:
        """Create the fork's log. Returns the metadata of the log of this name, and whether this
        call created it.
        """
        try:
            wanted = self._logs.draft(name, settings, idle_s=plan.config.ttl_s)
            return await self._logs.fork(wanted, plan.source, plan.at)
        except (errors.OffsetTruncated, errors.InvalidRequest) as error:
            raise errors.BadRequest(f"/header/Stream-Fork-Offset: {error.detail}") from error

    async def _begin(
        self, source: Found, offset: int, sub_offset: int
    ) -> tuple[int, tuple[Record, ...]]:
        """The offset where the fork's own records begin. If the fork begins within a record of the
        source, also returns the first part of that record.
        """
        left = sub_offset
        if not left:
            return offset, ()
        is_json = source.config.is_json
        page = await self._logs.reader.read(
            source.row.name,
            offset,
            limit=RECORDS_MAX,
            max_bytes=1,
            created_at=source.row.created_at,
            is_whole=True,
        )
        for found in page.batches[:1]:
            for at, (value, *_) in enumerate(found.columns.rows, offset):
                size = 1 if is_json else len(value)
                if left < size:
                    return at, (Record(bytes(value[:left])),)
                left -= size
                if not left:
                    return at + 1, ()
        detail = f"must not exceed the batch at the fork's offset (got {sub_offset})"
        raise errors.BadRequest(f"/header/Stream-Fork-Sub-Offset: {detail}")


def taken(name: str) -> errors.StreamConflict:
    """The error for creating a stream with the name of a deleted stream that still has forks."""
    return errors.StreamConflict("a deleted stream of this name has forks: delete them", log=name)
