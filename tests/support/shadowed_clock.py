"""A database whose `now()` can be moved: a function of that name comes first on the search path, in every connection."""

from loadtest.stores import Stores
from tests.support.database import sql

_SETUP = """
CREATE SCHEMA clock;
CREATE TABLE clock.moved (ahead interval NOT NULL);
INSERT INTO clock.moved VALUES ('0');
CREATE FUNCTION clock.now() RETURNS timestamptz LANGUAGE sql STABLE
    AS 'SELECT pg_catalog.now() + ahead FROM clock.moved';
DO $$ BEGIN
    EXECUTE format('ALTER DATABASE %I SET search_path = clock, pg_catalog, public', current_database());
END $$;
"""


async def shadow(stores: Stores) -> None:
    """Make the clock of an empty database movable, before any service connects."""
    await sql(stores, _SETUP)


async def move(stores: Stores, ahead: str) -> None:
    """Set the clock so far ahead of the real one ('30 days')."""
    await sql(stores, f"UPDATE clock.moved SET ahead = '{ahead}'")
