-- At which offset of its log a ledger begins: bookies' copies of the row say it, so that a log can be rebuilt from them
-- (rule 18b). Follows the logs' rows, as `unnamed_ledgers` does; a ledger that its log let go of keeps the place.
ALTER TABLE ledgers ADD COLUMN first_offset bigint;
-- Nobody is told of these changes: no version is new.
ALTER TABLE ledgers DISABLE TRIGGER announce_ledger;
UPDATE ledgers SET first_offset = (item ->> 'first_offset')::bigint
    FROM logs, jsonb_array_elements(logs.body -> 'items') AS item
    WHERE ledgers.ledger_id = (item ->> 'ledger_id')::bigint AND ledgers.body IS NOT NULL;
ALTER TABLE ledgers ENABLE TRIGGER announce_ledger;
