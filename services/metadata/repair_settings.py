"""Operators' settings for autorecovery: one row, valid for all processes and over restarts."""

from typing import Final

import asyncpg
import orjson

from quorumlog.wire.bodies import received
from quorumlog.wire.repair_bodies import RepairSettings, RepairSettingsPut
from services.metadata import audit
from services.metadata.database import Connection, RowStore, plain, transactional

GET: Final = "SELECT body::text AS body, triggers FROM repair_settings WHERE is_only"
_CHANGED: Final = "changed_at = now() WHERE is_only RETURNING body::text AS body, triggers"


class RepairSettingsStore(RowStore):
    """The row of settings."""

    @plain  # an older setting decides nothing: leases and claims are refused then
    async def get(self, connection: Connection) -> RepairSettings:
        """The present settings."""
        return _settings_of(await connection.fetchrow(GET))

    @transactional
    async def change(self, connection: Connection, change: RepairSettingsPut) -> RepairSettings:
        """Change the given fields; concurrent changes of different fields both apply."""
        changed = _settings_of(
            await connection.fetchrow(
                f"UPDATE repair_settings SET body = body || $1::text::jsonb, {_CHANGED}",
                change.model_dump_json(),
            )
        )
        await audit.keep(connection)
        return changed

    @transactional
    async def trigger(self, connection: Connection) -> RepairSettings:
        """Ask every process to run a full audit now."""
        return _settings_of(
            await connection.fetchrow(
                f"UPDATE repair_settings SET triggers = triggers + 1, {_CHANGED}"
            )
        )


def _settings_of(record: asyncpg.Record | None) -> RepairSettings:
    assert record is not None, "the migration made the row"
    fields = orjson.loads(record["body"]) | {"triggers": record["triggers"]}
    return received(RepairSettings, orjson.dumps(fields))
