-- When an operator last accepted the loss of answered changes (rule 18a). A transaction that was OPEN then may have been
-- committed in the lost history, and a ledger that no log named may have been named: neither ends by itself.
ALTER TABLE cluster ADD COLUMN loss_accepted_at timestamptz;
