-- Which change made a row's version: a bookie's copy of the row names it, and who compares the two learns whether the
-- copy is of this database's history (rule 18b). Null: the row was changed last before this column was there.
ALTER TABLE ledgers ADD COLUMN attempt uuid;
