-- Rule 15b. When the directory registered that a name stands for: a ledger that is older, and that the directory holds
-- nothing of, was another directory's. '-infinity': the directory is older than this database knows.
ALTER TABLE cookies ADD COLUMN born_at timestamptz NOT NULL DEFAULT '-infinity';

-- The registered incarnations of these members' names, which stay so until the transaction ends: a registration takes the same
-- locks exclusively. The locks come first, and each statement of a volatile function sees what was committed before it.
-- Locks of names, not of rows: a row lock would be written to disk, and many readers would starve one writer.
CREATE FUNCTION hold_incarnations(members text[]) RETURNS SETOF cookies LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    names text[] := ARRAY(SELECT DISTINCT split_part(member, '@', 1) COLLATE "C" AS name
        FROM unnest(members) AS member ORDER BY name);
BEGIN
    PERFORM pg_advisory_xact_lock_shared(hashtextextended('cookie ' || name, 0))
        FROM unnest(names) AS name;
    RETURN QUERY SELECT * FROM cookies c WHERE c.name = ANY(names) AND c.retired_at IS NULL;
END
$$;

-- Ids that callers choose and ids that this sequence assigns never meet: bookies tell how far the assigned ones went.
ALTER SEQUENCE ledger_ids MAXVALUE 4503599627370495;
