"""Transactions as task attempts leave them, on the model: sealed ledgers that a commit may publish."""

from collections.abc import Sequence
from dataclasses import replace

from quorumlog.protocol import batch
from quorumlog.protocol.batch import Record
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata, Writer
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.transaction import Sealed, TransactionLedger
from tests.model.logs.model import Cluster, Ledger
from tests.model.logs.rewrites import key_of


def write(cluster: Cluster, transaction: str, values: Sequence[Sequence[str]]) -> Sealed:
    """A sealed ledger of a transaction, an entry for each of `values`."""
    found = cluster.transactions[transaction]
    ledger_id = next(cluster.numbers)
    entries: list[bytes] = []
    records_before = 0
    for records in values:
        made = tuple(Record(value.encode(), key_of(value)) for value in records)
        entries.append(
            batch.placed(batch.encode(made), append_time_ms=0, records_before=records_before)
        )
        records_before += len(made)
    row = LedgerMetadata(
        ledger_id,
        Quorum(3, 3, 2),
        DigestKind.CRC32C,
        (Fragment(0, ("b0@1", "b1@1", "b2@1")),),
        writer=Writer("task", "http://task"),
        log=found.log,
    ).closed(last_entry=len(entries) - 1, length=sum(map(len, entries)))
    cluster.ledgers[ledger_id] = Ledger(row, entries, since_s=cluster.now())
    if found.is_open:
        joined = (*found.ledgers, TransactionLedger(ledger_id))
        cluster.transactions[transaction] = replace(found, ledgers=joined)
    else:
        cluster.ledgers[ledger_id].since_s = float("-inf")
    return Sealed(ledger_id, len(entries) - 1)
