"""Migrations of the database's tables: numbered SQL files, each applied once. Also checks that
KEY_FILE can decrypt all rows, and encrypts rows again (docs/adr/0029-keys-at-rest.md).

An expanding migration only adds objects, which older processes ignore. A contracting migration removes objects that
older processes may need. Thus two releases can share tables during an upgrade (docs/guides/upgrades.md).
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
_LOCK: Final = 0x71756F72  # no other code uses this number in this database
_TABLE_LOCK_MS: Final = 1000
"""How long a migration waits for a table that is being read, for example by a dump. Meanwhile other
requests for the table wait too, so the limit is below their deadline."""

_SEALED_AT_ONCE: Final = 500
"""Rows per transaction (chosen by judgement). Changes of these ledgers wait for the row locks."""


class Kind(StrEnum):
    """The effect of a migration on processes of an earlier release."""

    EXPAND = "expand"
    """An older process reads and writes as before."""
    CONTRACT = "contract"
    """An older process may need the objects that the migration removes."""


@dataclass(frozen=True, slots=True)
class Migrated:
    """The names of the migrations that a start applied, and of waiting migrations."""

    applied: tuple[str, ...]
    waiting: tuple[str, ...]
    """Contracting migrations that wait for an operator's permission."""


class TablesTooNew(ValueError):
    """A later release changed the tables in a way that this release does not support."""


async def migrate(connection: Connection, *, contract_through: int = 0) -> Migrated:
    """Apply missing migrations in one transaction. A contracting migration waits until
    `contract_through` reaches its number, because older processes may still be running.

    Several services may start at once. An advisory lock makes all services but one wait. Witnesses
    are not checked (rule 18a), because a migration does not change the meaning of rows.
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
                f"the tables are too new for this release, because a later release applied {', '.join(refused)}: start"
                " that release or a later release (docs/guides/upgrades.md)"
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
    """The kind of a migration, from the file's name."""
    return Kind.CONTRACT if path.name.endswith(".contract.sql") else Kind.EXPAND


class KeyMissing(Exception):
    """Rows may be encrypted under a key that KEY_FILE lacks."""


async def check_keys(connection: Connection) -> None:
    """Check that KEY_FILE has all keys of rows, and record the first key. Raises: KeyMissing."""
    ids = connection.key_ring.ids
    records = await connection.fetch("SELECT id FROM sealing_keys ORDER BY id")
    if missing := {record["id"] for record in records} - set(ids):
        raise KeyMissing(f"KEY_FILE lacks keys that encrypt rows: add {', '.join(sorted(missing))}")
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
        """Record the key with which this process encrypts. The record may be missing after a restore,
        or after a process with another first key encrypted all rows again.
        """
        await _note_key(connection)

    @transactional
    async def reseal(self, connection: Connection, *, after: int = -1) -> Resealed:
        """Encrypt the keys of some ledgers above `after` with the first key of KEY_FILE. Versions are
        unchanged, because no field changes. After the last page, the other keys are not needed.

        Raises: InvalidRequest if KEY_FILE is not set.
        """
        ring = connection.key_ring
        if not ring.ids:
            raise InvalidRequest("this metadata service encrypts no keys: set KEY_FILE first")
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
