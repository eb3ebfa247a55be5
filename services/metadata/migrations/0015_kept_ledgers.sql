-- Rule 18c. A bookie that holds a copy of a row whose change this database lacks keeps the ledger, and asks with the
-- copy's token at each round of its collector. What it was refused, for operators only: nothing is decided by it.
CREATE TABLE kept_ledgers (
    ledger_id bigint NOT NULL,
    attempt uuid NOT NULL,
    holder text NOT NULL,
    PRIMARY KEY (ledger_id, attempt, holder)
);
