"""Converts records of `protocol/replica.py` to records of the log, and back."""

import struct
from collections.abc import Sequence
from typing import Final

from quorumlog.protocol import replica
from quorumlog.protocol.record import Run
from quorumlog.protocol.row_copy import RowCopy, RowName
from services.bookie.ledger import StoredLedger
from services.bookie.log import KEY_BYTES, REPLACES, Kind, QueuedRecord, StoredRecord
from services.bookie.parts import Part

_LAC: Final = struct.Struct(">q")
_LIMBO: Final = struct.Struct(">QB")
_ROW: Final = struct.Struct(">Q16s")
_ID_BYTES: Final = 8

IDS_MAX: Final = 65_536
"""Maximum number of ids in a record of deletions (0.5 MB), which a replay reads as a whole."""


def to_log(ledger: StoredLedger, record: replica.ReplicaRecord, part: Part | None) -> QueuedRecord:
    """Encode a replica's record for the log; the result's tag has the ledger and the part."""
    flags = 0
    kind: Kind
    parts: tuple[bytes, ...]
    match record:
        case replica.RunStored():
            kind, parts = Kind.RUN, (_key(record.ledger_key), record.run.body)
            flags = REPLACES if record.replaces else 0
        case replica.FenceSet():
            kind, parts = Kind.FENCE, (_key(record.ledger_key),)
        case replica.LacKept():
            lac = _LAC.pack(record.last_add_confirmed)
            kind, parts = Kind.LAC, (_key(record.ledger_key), lac)
        case replica.RowKept(row):
            name = _ROW.pack(*row.name)
            kind, parts = Kind.ROW, (_key(record.ledger_key), name, row.body)
        case replica.LimboSet():
            kind, parts = Kind.LIMBO, (_LIMBO.pack(record.counter, record.limbo),)
        case replica.EntriesDropped():
            kind, parts = Kind.DROP, (_key(record.ledger_key),)
        case replica.LedgerDeleted():
            kind, parts = Kind.DELETE, (b"",)
    size = sum(map(len, parts))
    return QueuedRecord(kind, ledger.ledger_id, parts, size, flags, tag=(ledger, part))


def packed(ledger_ids: Sequence[int]) -> QueuedRecord:
    """Make a record that marks 1 to IDS_MAX ledgers as deleted (rule 16a)."""
    body = struct.pack(f">{len(ledger_ids)}q", *ledger_ids)
    return QueuedRecord(Kind.DELETED, ledger_ids[0], (body,), len(body))


def deleted_in(record: StoredRecord) -> Sequence[int]:
    """The ledgers that a record marks as deleted."""
    if record.kind is Kind.DELETE:
        return (record.ledger_id,)
    return packed_in(record.body) if record.kind is Kind.DELETED else ()


def packed_in(body: bytes) -> Sequence[int]:
    """The ids of deleted ledgers in the body of a record that `packed` made."""
    return struct.unpack(f">{len(body) // _ID_BYTES}q", body)


def owner_of(record: QueuedRecord) -> tuple[StoredLedger, Part | None]:
    """The ledger and the part of a record that `to_log` made."""
    assert isinstance(record.tag, tuple)
    ledger, part = record.tag
    return ledger, part


def apply_stored(ledger: StoredLedger, segment: int, stored: StoredRecord) -> None:
    """Apply a record that was read back from `segment` to its ledger, which is not deleted yet."""
    key = stored.body[:KEY_BYTES]
    match stored.kind:
        case Kind.RUN:
            run = Run(stored.body[KEY_BYTES:])
            part = ledger.replica.apply(replica.RunStored(run, key, bool(stored.flags & REPLACES)))
            assert isinstance(part, Part), "StoredLedger.accept made it"
            part.segment, part.offset = segment, stored.offset
            part.size, part.crc, part.body = stored.size, stored.crc, None
        case Kind.FENCE:
            ledger.replica.apply(replica.FenceSet(key))
        case Kind.LAC:
            (lac,) = _LAC.unpack(stored.body[KEY_BYTES:])
            ledger.replica.apply(replica.LacKept(lac, key))
        case Kind.ROW:
            version, attempt = _ROW.unpack_from(stored.body, KEY_BYTES)
            body = stored.body[KEY_BYTES + _ROW.size :]
            copy = RowCopy(RowName(version, attempt), body)
            ledger.replica.apply(replica.RowKept(copy, key))
        case Kind.LIMBO:
            counter, limbo = _LIMBO.unpack(stored.body)
            ledger.replica.apply(replica.LimboSet(counter, bool(limbo)))
        case Kind.DROP:
            ledger.replica.apply(replica.EntriesDropped(key))
        case Kind.DELETE | Kind.DELETED:
            ledger.replica.apply(replica.LedgerDeleted())
    ledger.touch()


def _key(ledger_key: bytes) -> bytes:
    return ledger_key or bytes(KEY_BYTES)
