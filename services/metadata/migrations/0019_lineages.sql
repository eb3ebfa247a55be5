-- In which log of its name a ledger was placed, and what was before it there: bookies' copies of the row say it, so that
-- a rebuild sees a ledger that is missing between others, and tells a log from one that had its name before (rule 18b).
-- Null: the ledger was placed before this column was there.
ALTER TABLE ledgers ADD COLUMN lineage jsonb;
