"""Operators' settings for autorecovery: one row, valid for all processes and over restarts."""

from typing import Final

import asyncpg
import orjson

from quorumlog.wire.repair_bodies import RepairSettings, RepairSettingsPut
from services.metadata.database import Database

GET: Final = "SELECT body::text AS body, triggers FROM repair_settings WHERE is_only"
_CHANGED: Final = "changed_at = now() WHERE is_only RETURNING body::text AS body, triggers"


class RepairSettingsStore:
    """The row of settings."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def get(self) -> RepairSettings:
        """The present settings."""
        return _settings_of(await self._database.run(lambda connection: connection.fetchrow(GET)))

    async def change(self, change: RepairSettingsPut) -> RepairSettings:
        """Change the given fields; concurrent changes of different fields both apply."""
        given = change.model_dump_json()
        return _settings_of(
            await self._database.run(
                lambda connection: connection.fetchrow(
                    f"UPDATE repair_settings SET body = body || $1::text::jsonb, {_CHANGED}", given
                )
            )
        )

    async def trigger(self) -> RepairSettings:
        """Ask every process to run a full audit now."""
        return _settings_of(
            await self._database.run(
                lambda connection: connection.fetchrow(
                    f"UPDATE repair_settings SET triggers = triggers + 1, {_CHANGED}"
                )
            )
        )


def _settings_of(record: asyncpg.Record | None) -> RepairSettings:
    assert record is not None, "the migration made the row"
    fields = orjson.loads(record["body"]) | {"triggers": record["triggers"]}
    return RepairSettings.model_validate_json(orjson.dumps(fields))
