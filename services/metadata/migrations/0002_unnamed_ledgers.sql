-- Ledgers that were made for a log and that no log names (yet, or any more): rule 22. Follows the
-- logs' rows; `since` is when a ledger was made, or when its log let go of it.
CREATE TABLE unnamed_ledgers (
    ledger_id bigint PRIMARY KEY REFERENCES ledgers,
    since timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX unnamed_ledgers_by_age ON unnamed_ledgers (since, ledger_id);
INSERT INTO unnamed_ledgers SELECT ledger_id, created_at FROM ledgers WHERE log IS NOT NULL;
