"""Migrations of the database's tables: numbered SQL files, each applied once."""

import re
from pathlib import Path
from typing import Final

from services.metadata.database import Connection

_FOLDER: Final = Path(__file__).parent / "migrations"
_LOCK: Final = 0x71756F72  # any number that no other application of this database uses


async def migrate(connection: Connection) -> list[str]:
    """Apply missing migrations in one transaction, and return their names.

    Several services may start at once: an advisory lock lets one work while the others wait. Witnesses are
    not checked (rule 18a): these tables are those in place, and what the rows say stays.
    Raises: ValueError if the database is newer than this code.
    """
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1)", _LOCK)
        await connection.execute(
            "CREATE TABLE IF NOT EXISTS migrations (number integer PRIMARY KEY, name text NOT NULL,"
            " applied_at timestamptz NOT NULL DEFAULT now())"
        )
        rows = await connection.fetch("SELECT number FROM migrations")
        applied = {row["number"] for row in rows}
        known = {int(path.name[:4]): path for path in migration_files()}
        if unknown := applied - known.keys():
            raise ValueError(f"the database has migrations that this version lacks: {unknown}")
        missing = [known[number] for number in sorted(known.keys() - applied)]
        for path in missing:
            await connection.execute(path.read_text(encoding="utf-8"))
            await connection.execute(
                "INSERT INTO migrations (number, name) VALUES ($1, $2)",
                int(path.name[:4]),
                path.name,
            )
        return [path.name for path in missing]


def migration_files() -> list[Path]:
    """The numbered files, in order."""
    return sorted(
        path for path in _FOLDER.glob("*.sql") if re.fullmatch(r"\d{4}_[a-z_]+", path.stem)
    )
