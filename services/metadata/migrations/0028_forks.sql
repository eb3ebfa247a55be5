-- Ledgers that a fork names and that were made for other logs (rule 27a): such a ledger is deleted only in a transaction
-- that sees no row of it here. Follows the forks' rows. A rebuild may know of one before the ledger has a row.
CREATE TABLE shared_ledgers (
    ledger_id bigint NOT NULL,
    log text NOT NULL,
    PRIMARY KEY (log, ledger_id)
);
CREATE INDEX shared_ledgers_of ON shared_ledgers (ledger_id);

-- Which log a log was forked from: the name of a deleted one is taken while a fork of it, or a fork of such a fork, is
-- there. A row whose fork is deleted says nothing any more, unless that one has forks itself.
CREATE TABLE forks (
    fork text PRIMARY KEY,
    source text NOT NULL
);
CREATE INDEX forks_of ON forks (source);

-- A process of the release before knows nothing of these tables, and deletes what a fork names: it is refused. Whoever
-- deletes a ledger holds its row's lock, which a fork's creation takes before it adds a row.
CREATE FUNCTION keep_shared_ledger() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM shared_ledgers WHERE ledger_id = NEW.ledger_id) THEN
        RAISE EXCEPTION 'ledger % is named by a fork', NEW.ledger_id USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER keep_shared_ledger BEFORE UPDATE ON ledgers FOR EACH ROW
    WHEN (OLD.body IS NOT NULL AND NEW.body IS NULL) EXECUTE FUNCTION keep_shared_ledger();
