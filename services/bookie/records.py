"""The rules' records as the log's, both ways."""

import struct
from typing import Final

from quorumlog.protocol.record import Run
from quorumlog.protocol.replica import LacKept, LedgerFenced, LimboSet, Record, RunStored
from services.bookie.ledger import Ledger
from services.bookie.log import KEY_BYTES, REPLACES, Kind, LogRecord
from services.bookie.parts import Part
from services.bookie.replay import Placed

_LAC: Final = struct.Struct(">q")
_LIMBO: Final = struct.Struct(">QB")


def to_log(ledger: Ledger, record: Record) -> LogRecord:
    """A record of the rules as one of the log; its tag says whose it is, and its part."""
    part: Part | None = None
    flags = 0
    kind: Kind
    parts: tuple[bytes, ...]
    match record:
        case RunStored():
            kind, parts = Kind.RUN, (_key(record.ledger_key), record.run.body)
            part = ledger.fresh.pop()
            flags = REPLACES if record.replaces else 0
        case LedgerFenced():
            kind, parts = Kind.FENCE, (_key(record.ledger_key),)
        case LacKept():
            lac = _LAC.pack(record.last_add_confirmed)
            kind, parts = Kind.LAC, (_key(record.ledger_key), lac)
        case LimboSet():
            kind, parts = Kind.LIMBO, (_LIMBO.pack(record.counter, record.limbo),)
    size = sum(map(len, parts))
    return LogRecord(kind, ledger.ledger_id, parts, size, flags, tag=(ledger, part))


def dropped(ledger: Ledger, *, keep_stub: bool) -> LogRecord:
    """Give up a ledger's entries, and the record that says so."""
    replica = ledger.replica
    key = _key(replica.ledger_key or b"")
    ledger.drop()
    ledger.is_dropped = not keep_stub
    if keep_stub:
        # The ledger is CLOSED: no normal add is right any more.
        replica.stub(key)
    else:
        replica.accepted_count += 1
    kind = Kind.DROP if keep_stub else Kind.DELETE
    return LogRecord(kind, ledger.ledger_id, (key,), len(key), tag=(ledger, None))


def owner_of(record: LogRecord) -> tuple[Ledger, Part | None]:
    """The ledger and the part that `to_log` noted."""
    assert isinstance(record.tag, tuple)
    ledger, part = record.tag
    return ledger, part


def apply_stored(ledger: Ledger, placed: Placed) -> None:
    """Take over a record that was read back."""
    stored = placed.record
    key = stored.body[:KEY_BYTES]
    match stored.kind:
        case Kind.RUN:
            run = Run(stored.body[KEY_BYTES:])
            ledger.replica.apply(RunStored(run, key, bool(stored.flags & REPLACES)))
            part = ledger.fresh.pop()
            part.segment, part.offset = placed.segment, stored.offset
            part.size, part.crc, part.body = stored.size, stored.crc, None
        case Kind.FENCE:
            ledger.replica.apply(LedgerFenced(key))
        case Kind.LAC:
            (lac,) = _LAC.unpack(stored.body[KEY_BYTES:])
            ledger.replica.apply(LacKept(lac, key))
        case Kind.LIMBO:
            counter, limbo = _LIMBO.unpack(stored.body)
            ledger.replica.apply(LimboSet(counter, bool(limbo)))
        case Kind.DROP:
            ledger.drop()
            ledger.replica.apply(LedgerFenced(key))
        case Kind.DELETE:
            ledger.drop()
            ledger.is_dropped = True
    ledger.touch()


def _key(ledger_key: bytes) -> bytes:
    return ledger_key or bytes(KEY_BYTES)
