"""Migrations of the database's tables: numbered SQL files, each applied once. Also checks that
KEY_FILE can decrypt all rows, and encrypts them again (docs/adr/0029-keys-at-rest.md).

A migration expands (adds what older processes ignore) or contracts (removes what they may need), so
that two releases can use the same tables during an upgrade (docs/guides/upgrades.md).
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from quorumlog.errors import InvalidRequest
from quorumlog.wire.bodies import Resealed
from services.metadata import audit
from services.metadata.database import Connection, RowStore, transactional

_FOLDER: Final = Path(__file__).parent / "migrations"
_FILE: Final = re.compile(r"(\d{4})_[a-z_]+(\.contract)?\.sql")
_LOCK: Final = 0x71756F72  # nothing else that uses this database locks this number
_TABLE_LOCK_MS: Final = 1000
"""How long a migration waits for a table that is being read, for example by a dump. Later requests
for the table wait behind the migration, so the limit is below their deadline."""

_SEALED_AT_ONCE: Final = 500
"""Rows per transaction, chosen by judgement: changes of these ledgers wait for the row locks."""


class Kind(StrEnum):
    """How a migration affects a process of an earlier release."""

    EXPAND = "expand"
    """An older process reads and writes as before."""
    CONTRACT = "contract"
    """An older process may need what the migration removes."""


@dataclass(frozen=True, slots=True)
class Migrated:
    """The files that a start applied, and those that wait, by name."""

    applied: tuple[str, ...]
    waiting: tuple[str, ...]
    """Contracting migrations that no operator has allowed yet."""


class TablesTooNew(ValueError):
    """A later release changed the tables in a way that this release does not support."""


async def migrate(connection: Connection, *, contract_through: int = 0) -> Migrated:
    """Apply missing migrations in one transaction. A contracting migration waits until
    `contract_through` reaches its number, since an older process may still run.

    Several services may start at once: an advisory lock lets one work while the others wait.
    Witnesses are not checked (rule 18a), since a migration does not change what rows say.
    Raises: TablesTooNew; LockNotAvailableError while another session has locked a table.
    """
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1)", _LOCK)
        await connection.execute(f"SET LOCAL lock_timeout = {_TABLE_LOCK_MS}")
        await connection.execute(
            "CREATE TABLE IF NOT EXISTS migrations (number integer PRIMARY KEY, name text NOT NULL,"
            " kind text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())"
        )
        rows = await connection.fetch("SELECT number, name, kind FROM migrations ORDER BY number")
        known = {number_of(path): path for path in migration_files()}
        unknown = [row for row in rows if row["number"] not in known]
        if refused := [row["name"] for row in unknown if row["kind"] != Kind.EXPAND]:
            raise TablesTooNew(
                f"a later release changed the tables: {', '.join(refused)}. This release does not work with them; start"
                " the release that made the change, or a later one (docs/guides/upgrades.md)"
            )
        missing = [
            known[number] for number in sorted(known.keys() - {row["number"] for row in rows})
        ]
        contracting = [path for path in missing if kind_of(path) is Kind.CONTRACT]
        waiting = [path for path in contracting if number_of(path) > contract_through]
        applied = [path for path in missing if path not in waiting]
        for path in applied:
            await connection.execute(path.read_text(encoding="utf-8"))
            await connection.execute(
                "INSERT INTO migrations (number, name, kind) VALUES ($1, $2, $3)",
                number_of(path),
                path.name,
                kind_of(path),
            )
        return Migrated(tuple(path.name for path in applied), tuple(path.name for path in waiting))


def migration_files() -> list[Path]:
    """The numbered SQL files, in order."""
    return sorted(path for path in _FOLDER.glob("*.sql") if _FILE.fullmatch(path.name))


def number_of(path: Path) -> int:
    """The number of a migration."""
    return int(path.name[:4])


def kind_of(path: Path) -> Kind:
    """The kind of a migration, by the name of its file."""
    return Kind.CONTRACT if path.name.endswith(".contract.sql") else Kind.EXPAND


class KeyMissing(Exception):
    """Rows may be encrypted under a key that KEY_FILE lacks."""


async def check_keys(connection: Connection) -> None:
    """Check that KEY_FILE has all keys of rows, and record its first key. Raises: KeyMissing."""
    ids = connection.key_ring.ids
    records = await connection.fetch("SELECT id FROM sealing_keys ORDER BY id")
    if missing := {record["id"] for record in records} - set(ids):
        raise KeyMissing(
            f"KEY_FILE has no key {', '.join(sorted(missing))}: add it, since it encrypts rows"
        )
    await _note_key(connection)


async def _note_key(connection: Connection) -> None:
    await connection.execute(
        "INSERT INTO sealing_keys (id) SELECT unnest($1::text[]) ON CONFLICT DO NOTHING",
        connection.key_ring.ids[:1],
    )


class SealingStore(RowStore):
    """The store of ledgers' encrypted keys."""

    @transactional
    async def note_key(self, connection: Connection) -> None:
        """Record the key under which this process encrypts. The record is missing if the database
        was restored, or if a process with another first key encrypted all rows again.
        """
        await _note_key(connection)

    @transactional
    async def reseal(self, connection: Connection, *, after: int = -1) -> Resealed:
        """Encrypt the keys of some ledgers above `after` under the first key of KEY_FILE. Versions
        stay, since no field changes. After the last page KEY_FILE no longer needs its other keys.

        Raises: InvalidRequest if KEY_FILE is not set.
        """
        ring = connection.key_ring
        if not ring.ids:
            raise InvalidRequest("this process of the metadata service has no KEY_FILE")
        records = await connection.fetch(
            "SELECT ledger_id, body::text AS body FROM ledgers WHERE body IS NOT NULL AND ledger_id > $1"
            " ORDER BY ledger_id LIMIT $2 FOR UPDATE",
            after,
            _SEALED_AT_ONCE,
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
        is_last = len(records) < _SEALED_AT_ONCE
        if is_last:
            await connection.execute(
                "DELETE FROM sealing_keys WHERE id <> ALL($1::text[])", ring.ids[:1]
            )
        if changed:
            await audit.keep(connection)
        return Resealed(resealed=len(changed), next=None if is_last else records[-1]["ledger_id"])
