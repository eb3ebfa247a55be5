"""Seals rows anew after the key file got another first key, and knows which keys are needed (docs/adr/0029-keys-at-rest.md)."""

from typing import Final

from quorumlog.errors import InvalidRequest
from quorumlog.wire.bodies import Resealed
from services.metadata import audit
from services.metadata.database import Connection, RowStore, transactional

_AT_ONCE: Final = 500
"""Rows of one transaction, whose locks changes of these ledgers wait for (taste)."""


class KeyMissing(Exception):
    """Rows may be sealed with a key that the key file lacks."""


async def check_keys(connection: Connection) -> None:
    """Check that the rows can be opened, and note the key that seals from now on. Raises: KeyMissing."""
    ids = connection.key_ring.ids
    records = await connection.fetch("SELECT id FROM sealing_keys ORDER BY id")
    if missing := {record["id"] for record in records} - set(ids):
        raise KeyMissing(
            f"KEY_FILE has no key {', '.join(sorted(missing))}: rows are sealed with it"
        )
    await _note_key(connection)


async def _note_key(connection: Connection) -> None:
    await connection.execute(
        "INSERT INTO sealing_keys (id) SELECT unnest($1::text[]) ON CONFLICT DO NOTHING",
        connection.key_ring.ids[:1],
    )


class SealingStore(RowStore):
    """The sealed keys of ledgers."""

    @transactional
    async def note_key(self, connection: Connection) -> None:
        """Note the key that this process seals with: a database that was restored since, or sealed anew by a process
        with another first key, lacks it.
        """
        await _note_key(connection)

    @transactional
    async def reseal(self, connection: Connection, *, after: int = -1) -> Resealed:
        """Encrypt the keys of some ledgers above `after` under the first key of the key file. The rows say what they said: their versions stay. After
        the last one the older keys are needed no more. Raises: InvalidRequest without keys.
        """
        ring = connection.key_ring
        if not ring.ids:
            raise InvalidRequest("this process of the metadata service has no KEY_FILE")
        records = await connection.fetch(
            "SELECT ledger_id, body::text AS body FROM ledgers WHERE body IS NOT NULL AND ledger_id > $1"
            " ORDER BY ledger_id LIMIT $2 FOR UPDATE",
            after,
            _AT_ONCE,
        )
        changed = {
            record["ledger_id"]: ring.sealed(
                record["ledger_id"], ring.opened(record["ledger_id"], record["body"])
            )
            for record in records
            if not ring.is_current(record["body"])
        }
        await _note_key(connection)
        await connection.execute(
            "UPDATE ledgers l SET body = made.body::jsonb"
            " FROM unnest($1::bigint[], $2::text[]) AS made (id, body) WHERE l.ledger_id = made.id",
            list(changed),
            list(changed.values()),
        )
        is_last = len(records) < _AT_ONCE
        if is_last:
            await connection.execute(
                "DELETE FROM sealing_keys WHERE id <> ALL($1::text[])", ring.ids[:1]
            )
        if changed:
            await audit.keep(connection)
        return Resealed(resealed=len(changed), next=None if is_last else records[-1]["ledger_id"])
