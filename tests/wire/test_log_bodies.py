"""A log's row survives the wire, and what breaks its invariants does not get in."""

from dataclasses import replace

import orjson
import pytest
from pydantic import ValidationError

from quorumlog.protocol.log import Answer, Expiry, LogItem, LogMetadata, LogSettings, Producer
from quorumlog.protocol.metadata import Writer
from quorumlog.protocol.quorum import Quorum
from quorumlog.wire.bodies import document_of, json_of, received

LOG = LogMetadata(
    "events",
    LogSettings(Quorum(3, 3, 2), roll_entries=5, custom=(("k", "v"),)),
    items=(
        LogItem(7, 0, 9, bytes=100, sealed_ms=5),
        LogItem(8, 10, None, (Producer("p", 1, 3, (Answer(0, 4, 5, 7, 2, "abc"),)),)),
    ),
    version=3,
    writer_token=2,
    opened_by="me",
    forgotten_end=7,
    appended_ms=4,
    created_at="2026-01-01T00:00:00Z",
)


def test_a_row_is_read_as_it_was_sent() -> None:
    sent = json_of(LOG)

    assert received(LogMetadata, sent) == LOG


def test_a_row_carries_its_expiry() -> None:
    keeper = Writer("g1", "http://g1", "http://g1:1")
    row = replace(LOG, expiry=Expiry(0, keeper, "t"))
    sent = json_of(row)

    assert received(LogMetadata, sent) == row


def test_a_row_whose_borders_do_not_meet_is_refused() -> None:
    row = document_of(LOG)
    row["items"][1]["first_offset"] = 12

    with pytest.raises(ValidationError, match="I33"):
        received(LogMetadata, orjson.dumps(row))
