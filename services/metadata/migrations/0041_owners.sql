-- What a grant names a row by, so that a list of what a caller may see is found by ranges of an index.
ALTER TABLE ledgers ADD COLUMN owner text COLLATE "C" GENERATED ALWAYS AS (
    CASE WHEN body ->> 'log' IS NULL THEN 'ledgers/' || coalesce(body #>> '{metadata,namespace}', '')
         ELSE 'logs/' || (body ->> 'log') END) STORED;
CREATE INDEX ledgers_by_owner ON ledgers (owner, ledger_id) WHERE body IS NOT NULL;
CREATE INDEX logs_by_owner ON logs ((('logs/' || name) COLLATE "C")) WHERE body IS NOT NULL;
