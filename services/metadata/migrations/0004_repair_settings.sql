-- What operators set for all of autorecovery: a field that is absent is as each process was told at
-- its start. `triggers` counts the times that somebody asked to have everything looked at now.
CREATE TABLE repair_settings (
    is_only boolean PRIMARY KEY DEFAULT true CHECK (is_only),
    body jsonb NOT NULL DEFAULT '{}',
    triggers bigint NOT NULL DEFAULT 0,
    changed_at timestamptz NOT NULL DEFAULT now()
);
INSERT INTO repair_settings DEFAULT VALUES;

-- Whether another member may take the place. What a writer knows was missed (rule 8) is for that
-- very member: it may be restarting.
ALTER TABLE repairs ADD COLUMN moves boolean NOT NULL DEFAULT false;
UPDATE repairs SET moves = true;

-- What waits for its next try.
CREATE INDEX repairs_waiting ON repairs (next_try_at) WHERE worker IS NULL;
