-- Rule 18d. Ledgers that were not CLOSED when the loss of changes was accepted: a later row of theirs may be lost, under
-- which entries were acknowledged. Whoever ends such a ledger first asks all bookies for copies of its row.
CREATE TABLE unproven_ledgers (ledger_id bigint PRIMARY KEY);
INSERT INTO unproven_ledgers SELECT ledger_id FROM ledgers, cluster
    WHERE state <> 'CLOSED' AND body IS NOT NULL AND loss_accepted_at IS NOT NULL;
-- Bookies that never return, by an operator's word: nobody waits for the copies that they may hold.
ALTER TABLE cluster ADD COLUMN lost_bookies text[] NOT NULL DEFAULT '{}';
-- Which change made a row's version: versions of two lines of history may be equal. Null: the row was changed last before
-- this column was there.
ALTER TABLE logs ADD COLUMN attempt uuid;
