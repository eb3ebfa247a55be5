-- Sealed ledgers that come onto a log together, or not at all (rule 28).
CREATE TABLE transactions (
    id text PRIMARY KEY,
    log text NOT NULL,
    app text,
    app_version bigint,
    state text NOT NULL DEFAULT 'OPEN' CHECK (state IN ('OPEN', 'COMMITTED', 'ABORTED')),
    is_duplicate boolean NOT NULL DEFAULT false,
    requested bigint[] NOT NULL DEFAULT '{}',
    published jsonb NOT NULL DEFAULT '[]',
    ttl_s integer NOT NULL,
    expires_at timestamptz NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    ended_at timestamptz,
    CHECK ((app IS NULL) = (app_version IS NULL))
);
-- All tasks of one version of an app share one transaction.
CREATE UNIQUE INDEX transactions_open_by_version ON transactions (log, app, app_version)
    WHERE state = 'OPEN' AND app IS NOT NULL;
CREATE INDEX transactions_by_expiry ON transactions (expires_at) WHERE state = 'OPEN';
CREATE INDEX transactions_by_end ON transactions (ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX transactions_open_of_log ON transactions (log) WHERE state = 'OPEN';

-- Ledgers of transactions that are OPEN; a ledger is here, or in `unnamed_ledgers`, or on its log.
CREATE TABLE transaction_ledgers (
    ledger_id bigint PRIMARY KEY REFERENCES ledgers,
    transaction text NOT NULL REFERENCES transactions,
    partition bigint,
    attempt bigint
);
CREATE INDEX transaction_ledgers_of ON transaction_ledgers (transaction, ledger_id);

-- Which version of an app came onto a log last, and with which transaction.
CREATE TABLE app_versions (
    log text NOT NULL,
    app text NOT NULL,
    version bigint NOT NULL,
    transaction text NOT NULL REFERENCES transactions,
    PRIMARY KEY (log, app)
);
CREATE INDEX app_versions_of ON app_versions (transaction);
