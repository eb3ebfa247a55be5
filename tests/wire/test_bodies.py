"""The bodies of the metadata service: nothing is lost, nothing loose is taken."""

import json
from dataclasses import replace

import pytest
from pydantic import ValidationError

from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata, Repair, State, Writer
from quorumlog.protocol.quorum import Quorum
from quorumlog.wire.bodies import LedgerDraft, LedgerRow, MissedBody

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
    wire = LedgerRow.from_core(FULL).model_dump_json()

    assert LedgerRow.model_validate_json(wire).to_core() == FULL


def test_processes_reach_a_writer_at_its_internal_url_where_it_has_one() -> None:
    assert FULL.writer is not None
    assert FULL.writer.url_inside == "http://w"
    both = replace(FULL, writer=Writer("w", "http://w", "http://inside"))

    read = LedgerRow.model_validate_json(LedgerRow.from_core(both).model_dump_json()).to_core()

    assert read == both
    assert read.writer is not None
    assert read.writer.url_inside == "http://inside"


def test_a_draft_without_an_id_asks_for_the_next_one() -> None:
    row = LedgerRow.from_core(FULL)

    assert LedgerDraft.draft_of(row.to_core()).ledger_id == FULL.ledger_id
    assert LedgerDraft.draft_of(row.core(ledger_id=-1, version=1, created_at="")).ledger_id is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ledger_id", 2**63),
        ("ledger_id", -1),
        ("ledger_id", 1.0),
        ("ledger_id", "1"),
        ("version", 0),
        ("unknown", 1),
        ("state", "SEALED"),
        ("state", "OPEN"),
        ("last_entry", None),
        ("last_entry", 7),
        ("ack_quorum", 4),
        ("ledger_key", "a"),
        ("ledger_key", "AB=="),
        ("metadata", {"a": "\0"}),
        ("fragments", []),
        ("fragments", [{"first_entry": 1, "bookies": ["b1@1", "b2@1", "b3@1"]}]),
        ("fragments", [{"first_entry": 0, "bookies": ["b1@1", "b1@1", "b3@1"]}]),
        ("fragments", [{"first_entry": 0, "bookies": ["b1@1", "b2@1"]}]),
        ("fragments", [{"first_entry": 0, "bookies": ["b1@01", "b2@1", "b3@1"]}]),
        ("log", "../x"),
    ],
)
def test_what_breaks_the_row_is_refused(field: str, value: object) -> None:
    row = json.loads(LedgerRow.from_core(FULL).model_dump_json())

    row[field] = value

    with pytest.raises(ValidationError):
        LedgerRow.model_validate_json(json.dumps(row))


def test_a_missed_range_is_not_empty() -> None:
    with pytest.raises(ValidationError):
        MissedBody(member="b1@1", first=2, last=1)
