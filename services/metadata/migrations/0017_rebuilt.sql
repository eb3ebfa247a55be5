-- When the tables were rebuilt from the bookies last (rule 18d): a bookie whose cookie is missing waits then for another
-- rebuild, since it may have been away.
ALTER TABLE cluster ADD COLUMN rebuilt_at timestamptz;
