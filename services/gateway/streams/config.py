"""The settings of a stream, and how the metadata of its log stores them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from quorumlog.errors import BadRequest
from quorumlog.net.parameters import time_of
from quorumlog.protocol.log import LogMetadata, LogSettings
from quorumlog.protocol.quorum import Quorum
from services.gateway.edge.http.media import check_charset

JSON: Final = "application/json"
OCTETS: Final = "application/octet-stream"
CONTENT_TYPE_CHARS_MAX: Final = 255

_CONTENT_TYPE: Final = "durable-stream.content-type"
_EXPIRES_AT: Final = "durable-stream.expires-at"
_BEGINS: Final = "durable-stream.begins"
"""The kind of data that the creation writes. Before this write the stream does not exist."""
_FORKED_FROM: Final = "durable-stream.forked-from"
_FORK_OFFSET: Final = "durable-stream.fork-offset"
_FORK_SUB_OFFSET: Final = "durable-stream.fork-sub-offset"
_FORK_CREATED_AT: Final = "durable-stream.fork-created-at"
_TOKEN: Final = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"  # noqa: S105
_MEDIA: Final = re.compile(rf"{_TOKEN}/{_TOKEN}[ \t]*(?:;[\t\x20-\x7e]*)?")


@dataclass(frozen=True, slots=True)
class Forked:
    """The origin of a fork: its source's log, and the offsets of the request as numbers."""

    source: str
    offset: int
    sub_offset: int
    created_at: str
    """Creation time of the source, whose offsets below `offset` are valid in the fork."""


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """A stream's settings. `expires_at` is the client's text; the log's `expiry` stores `ttl_s`."""

    content_type: str = OCTETS
    expires_at: str | None = None
    ttl_s: int | None = None
    forked: Forked | None = None

    @property
    def media(self) -> str:
        """The content type without parameters, which every append must have."""
        return media_of(self.content_type)

    @property
    def is_json(self) -> bool:
        """Whether the stream is JSON, with one record per message."""
        return self.media == JSON

    @property
    def is_text(self) -> bool:
        """Whether events carry the stream's data as text; other data is in base64."""
        return self.is_json or self.media.startswith("text/")

    @property
    def expires_ms(self) -> int | None:
        """The time at which the stream expires, in milliseconds since 1970."""
        return None if self.expires_at is None else time_ms(self.expires_at)

    def equals(self, other: "StreamConfig") -> bool:
        """Whether a creation with the settings `other` counts as a retry."""
        mine, others = (
            (each.media, each.expires_ms, each.ttl_s, each.forked) for each in (self, other)
        )
        return mine == others

    def settings(self, begins: str) -> LogSettings:
        """The settings of the stream's log."""
        custom = {_CONTENT_TYPE: self.content_type}
        if self.expires_at is not None:
            custom[_EXPIRES_AT] = self.expires_at
        if begins:
            custom[_BEGINS] = begins
        if self.forked is not None:
            custom[_FORKED_FROM] = self.forked.source
            custom[_FORK_OFFSET] = str(self.forked.offset)
            custom[_FORK_SUB_OFFSET] = str(self.forked.sub_offset)
            custom[_FORK_CREATED_AT] = self.forked.created_at
        return LogSettings(quorum=Quorum.of(), custom=tuple(sorted(custom.items())))


def config_of(row: LogMetadata) -> StreamConfig | None:
    """The settings of a log's stream; None if the log backs no stream."""
    custom: Mapping[str, str] = dict(row.settings.custom)
    if _CONTENT_TYPE not in custom:
        return None
    ttl_s = None if row.expiry is None else row.expiry.idle_s
    return StreamConfig(custom[_CONTENT_TYPE], custom.get(_EXPIRES_AT), ttl_s, _forked_of(custom))


def _forked_of(custom: Mapping[str, str]) -> Forked | None:
    if _FORKED_FROM not in custom:
        return None
    return Forked(
        custom[_FORKED_FROM],
        int(custom[_FORK_OFFSET]),
        int(custom[_FORK_SUB_OFFSET]),
        custom[_FORK_CREATED_AT],
    )


def begins_later(row: LogMetadata) -> bool:
    """Whether the stream exists only once its log has records, or is closed."""
    return _BEGINS in dict(row.settings.custom)


def media_of(content_type: str) -> str:
    """A content type without its parameters, in lower case."""
    return content_type.partition(";")[0].strip().lower()


def content_type(text: str, pointer: str) -> str:
    """Validate a content type. Raises: BadRequest, UnsupportedMediaType."""
    if len(text) > CONTENT_TYPE_CHARS_MAX or not _MEDIA.fullmatch(text.strip()):
        raise BadRequest(
            f"{pointer}: must be a media type of at most {CONTENT_TYPE_CHARS_MAX} characters"
        )
    check_charset(text)
    return text.strip()


def time(text: str, pointer: str) -> str:
    """Validate an RFC 3339 time. Raises: BadRequest."""
    try:
        time_of(text)
    except ValueError as error:
        raise BadRequest(f"{pointer}: must be a time such as 2026-01-02T03:04:05Z") from error
    return text


def time_ms(text: str) -> int:
    """An RFC 3339 time in milliseconds since 1970. Raises: ValueError."""
    return int(time_of(text).timestamp() * 1000)
