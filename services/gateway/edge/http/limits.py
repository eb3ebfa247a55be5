"""The edge's limits, for one request and for all requests together."""

from typing import Final

from pydantic import BaseModel, ConfigDict, Field

BATCH_ENTRIES_MAX: Final = 10_000
"""Entries of one append, and of one page (docs/guides/http.md, Bounds)."""

CONTROL_BYTES_MAX: Final = 2 << 20
"""A JSON body other than an append's: three times a commit of as many ledgers as a log may have."""
CONTROL_MARKS_MAX: Final = 1 << 16
"""Values of such a body (`strict.MARKS_MAX`)."""
INLINE_BYTES_MAX: Final = 256 << 10
"""A body up to this size is parsed at once: less than 50 ms of work in the worst case (measured)."""

WAIT_MS_MAX: Final = 60_000
CUSTOM_KEYS_MAX: Final = 64
CUSTOM_BYTES_MAX: Final = 16 * 1024
PASSWORD_CHARS_MAX: Final = 1024
"""Long enough for any secret; short enough for a header (taste)."""
READ_BYTES_MAX: Final = 64 << 20
"""The greatest `max_bytes`: as much as a body of frames."""


class Limits(BaseModel):
    """Limits that an operator may set. Sizes in bytes, times in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    entry_bytes_max: int = Field(default=1 << 20, ge=1, le=64 << 20, description="One entry.")
    body_bytes_max: int = Field(default=16 << 20, ge=1, le=1 << 30, description="A JSON body.")
    frames_bytes_max: int = Field(
        default=64 << 20, ge=1, le=1 << 30, description="A body of frames, which need no decoding."
    )
    body_timeout_s: float = Field(
        default=10.0,
        gt=0,
        le=3600,
        description="For a body to come; longer while it comes at a fair rate.",
    )
    body_rate_bytes_s_min: int = Field(
        default=256 << 10,
        ge=1,
        description="The fair rate: so many bytes earn a body one second more.",
    )
    stream_idle_s: float = Field(
        default=300.0, gt=0, le=86_400, description="For the next line of a streamed append."
    )
    comment_every_s: float = Field(
        default=15.0,
        gt=0,
        le=3600,
        description="Between the comments that keep an idle tail's connection open.",
    )
    stalled_answer_s: float = Field(
        default=30.0, gt=0, le=3600, description="For a client to go on reading its answer."
    )
    connections_max: int = Field(
        default=10_000, ge=1, description="Connections at once; beyond: 429 overloaded."
    )
    peer_connections_max: int = Field(
        default=1250, ge=1, description="Of one address, once seven eighths of all are taken."
    )
    requests_max: int = Field(
        default=4096, ge=1, description="Requests in work at once; beyond: 429 overloaded."
    )
    peer_requests_max: int = Field(
        default=512, ge=1, description="Of one address, once seven eighths of all are taken."
    )
    held_bytes_max: int = Field(
        default=512 << 20, ge=1, description="Bodies in memory at once; beyond: 429 overloaded."
    )
    peer_held_bytes_max: int = Field(
        default=64 << 20, ge=1, description="Of one address, once seven eighths of all are taken."
    )
    answers_bytes_max: int = Field(
        default=256 << 20, ge=1, description="Answers that wait for their readers; beyond: 429."
    )
    peer_answers_bytes_max: int = Field(
        default=32 << 20, ge=1, description="Of one address, once seven eighths of all are taken."
    )
    compressed_answer_bytes_min: int = Field(
        default=0,
        ge=0,
        description="Answers to reads are compressed from this length on, say 1024; 0: none is (docs/guides/http.md).",
    )
    waiters_max: int = Field(
        default=10_000, ge=1, description="Long polls and tails at once; they cost no work."
    )
    peer_waiters_max: int = Field(
        default=1250, ge=1, description="Of one address, once seven eighths of all are taken."
    )
