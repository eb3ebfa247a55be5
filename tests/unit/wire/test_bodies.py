"""Bodies and versions on the wire: read as they were sent, or refused with the place of the fault."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from uuid import UUID

import orjson
import pytest
from pydantic import ValidationError

from quorumlog.errors import InvalidRequest
from quorumlog.net.bodies import parsed
from quorumlog.protocol.log import Answer, Expiry, LogItem, LogMetadata, LogSettings, Producer
from quorumlog.protocol.messages import MissedRange
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata, Repair, State, Writer
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.transaction import Transaction
from quorumlog.wire.bodies import LedgerChange, codec, document_of, json_of, received
from quorumlog.wire.versions import upgrades, versions_in

FULL = LedgerMetadata(
    ledger_id=2**63 - 1,
    quorum=Quorum(3, 3, 2),
    digest=DigestKind.HMAC_SHA256,
    fragments=(Fragment(0, ("b1@1", "b2@1", "b3@1")), Fragment(9, ("b4@2", "b2@1", "b3@1"))),
    version=7,
    state=State.CLOSED,
    last_entry=20,
    length=400,
    writer=Writer("w", "http://w"),
    ledger_key=bytes(range(32)),
    mac_key=b"mac",
    access_key=b"access",
    custom=(("a", "1"), ("k", "ü")),
    log="a-log",
    created_at="2026-11-22T00:00:00Z",
    declared_lost=("b9@1",),
    may_lack_entries=True,
    repairs=(Repair(9, "b4@2", "b5@1"),),
    extra=(("transaction", "t"),),
)


def test_a_row_comes_back_as_it_was() -> None:
    wire = json_of(FULL)

    assert received(LedgerMetadata, wire) == FULL


def test_processes_reach_a_writer_at_its_internal_url_where_it_has_one() -> None:
    assert FULL.writer is not None
    assert FULL.writer.url_inside == "http://w"
    both = replace(FULL, writer=Writer("w", "http://w", "http://inside"))

    read = received(LedgerMetadata, json_of(both))

    assert read == both
    assert read.writer is not None
    assert read.writer.url_inside == "http://inside"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ledger_id", 2**63),
        ("ledger_id", -2),
        ("ledger_id", 1.0),
        ("ledger_id", "1"),
        ("version", 0),
        ("unknown", 1),
        ("state", "SEALED"),
        ("state", "OPEN"),
        ("last_entry", None),
        ("last_entry", 7),
        ("quorum", {"ensemble_size": 3, "write_quorum": 3, "ack_quorum": 4}),
        ("quorum", {"ensemble_size": 3, "write_quorum": 3, "ack_quorum": 2, "unknown": 1}),
        ("ledger_key", "a"),
        ("ledger_key", "AB=="),
        ("custom", {"a": "\0"}),
        ("custom", [["a", "b"]]),
        ("fragments", []),
        ("fragments", [{"first_entry": 1, "bookies": ["b1@1", "b2@1", "b3@1"]}]),
        ("fragments", [{"first_entry": 0, "bookies": ["b1@1", "b1@1", "b3@1"]}]),
        ("fragments", [{"first_entry": 0, "bookies": ["b1@1", "b2@1"]}]),
        ("fragments", [{"first_entry": 0, "bookies": ["b1@01", "b2@1", "b3@1"]}]),
        ("log", "../x"),
    ],
)
def test_what_breaks_the_row_is_refused(field: str, value: object) -> None:
    row = document_of(FULL)

    row[field] = value

    with pytest.raises(ValidationError):
        codec(LedgerMetadata).validate_json(json.dumps(row))


def test_a_missed_range_is_not_empty() -> None:
    with pytest.raises(ValidationError):
        codec(MissedRange).validate_python({"member": "b1@1", "first": 2, "last": 1})


@pytest.mark.parametrize(
    ("changes", "pointer"),
    [
        ({"fragments": [{"first_entry": 0, "bookies": ["b1"]}]}, "/row/fragments/0/bookies/0"),
        ({"quorum": {"ensemble_size": 256, "write_quorum": 3, "ack_quorum": 2}}, "/row/quorum/ensemble_size"),
        ({"quorum": {"ensemble_size": 3, "write_quorum": 3, "ack_quorum": 4}}, "/row/quorum"),
        ({"writer": {"id": "w", "url": "u", "port": 1}}, "/row/writer/port"),
        ({"extra": {"partition": 1}}, "/row/extra/partition"),
        ({"last_entry": None}, "/row"),
    ],
)  # fmt: skip
def test_a_refusal_points_to_the_field_of_the_value(changes: dict[str, Any], pointer: str) -> None:
    change = {"row": document_of(FULL) | changes, "attempt": str(UUID(int=1))}

    with pytest.raises(InvalidRequest) as refused:
        parsed(json.dumps(change).encode(), LedgerChange)

    assert refused.value.members["errors"][0]["pointer"] == pointer


@pytest.mark.parametrize("value", [LedgerMetadata, LogMetadata, Transaction, LedgerChange])
def test_every_number_and_text_of_a_value_has_bounds(value: type) -> None:
    unbounded = [
        found
        for found in parts(codec(value).json_schema())
        if (found.get("type") == "integer" and not {"minimum", "maximum"} <= found.keys())
        or (found.get("type") == "string" and not {"pattern", "enum", "contentEncoding"} & found.keys())
    ]  # fmt: skip

    assert unbounded == []


def parts(schema: object) -> Iterator[dict[str, Any]]:
    """All schemas within a schema."""
    if isinstance(schema, dict):
        yield schema
    for part in schema.values() if isinstance(schema, dict) else ():
        yield from parts(part)
        for one in part if isinstance(part, list) else ():
            yield from parts(one)


# --- a log's row ---------------------------------------------------------------------------------


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


def test_the_versions_that_are_spoken_are_offered_the_highest_first_and_are_understood() -> None:
    assert upgrades(range(2, 4)) == ("quorumlog-channel/3", "quorumlog-channel/2")
    assert versions_in(upgrades(range(2, 4))) == [2, 3]


@pytest.mark.parametrize("said", ["", "x", "-2", "9" * 5000])
def test_a_name_without_a_version_is_passed_over(said: str) -> None:
    assert versions_in(["chat", f"quorumlog-channel/{said}", "quorumlog-channel/2"]) == [2]
