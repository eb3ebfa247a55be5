-- The cluster's identity, ledgers, logs, and everything that is written together with them.

CREATE TABLE cluster (
    is_only boolean PRIMARY KEY DEFAULT true CHECK (is_only),
    cluster_id uuid NOT NULL DEFAULT gen_random_uuid(),
    created_at timestamptz NOT NULL DEFAULT now(),
    -- When an operator last accepted a loss of changes (rule 18a). Transactions that were OPEN then
    -- do not expire, and unnamed ledgers stay: the lost history may have committed or named them.
    loss_accepted_at timestamptz,
    -- When the tables were last rebuilt from bookies (rule 18d). After a rebuild, a bookie without
    -- a cookie waits for another rebuild, because it may have been away during the first.
    rebuilt_at timestamptz,
    -- Bookies that never return, as an operator declared: no check waits for their copies.
    lost_bookies text[] NOT NULL DEFAULT '{}'
);
INSERT INTO cluster DEFAULT VALUES;

-- A row stays for ever, as a tombstone without a body, so that an id is used once (rule 17).
CREATE TABLE ledgers (
    ledger_id bigint PRIMARY KEY CHECK (ledger_id >= 0),
    version bigint NOT NULL CHECK (version >= 1),
    body jsonb,
    state text GENERATED ALWAYS AS (body ->> 'state') STORED
        CHECK (state IN ('OPEN', 'IN_RECOVERY', 'CLOSED')),
    log text GENERATED ALWAYS AS (body ->> 'log') STORED,
    created_at timestamptz NOT NULL DEFAULT now(),
    changed_at timestamptz NOT NULL DEFAULT now(),
    -- The body's length as text: which rows fit on a page is decided without reading bodies.
    body_bytes integer GENERATED ALWAYS AS (octet_length(body::text)) STORED,
    -- The change that made this version. A bookie's copy of the row names its change too, which
    -- shows whether the copy belongs to this database's history (rule 18b).
    attempt uuid,
    -- The offset of the log at which the ledger begins, also after the log released it. Copies of
    -- the row on bookies have the offset, so that a log can be rebuilt from them (rule 18f).
    first_offset bigint,
    -- The log in which the ledger was placed, and the ledgers before it there. By copies of the
    -- row, a rebuild notices missing ledgers, and earlier logs of the name (rule 18f).
    lineage jsonb,
    -- The name by which grants allow access to the row. Lists find visible rows by ranges of an
    -- index.
    owner text COLLATE "C" GENERATED ALWAYS AS (
        CASE WHEN body ->> 'log' IS NULL THEN 'ledgers/' || coalesce(body #>> '{custom,namespace}', '')
             ELSE 'logs/' || (body ->> 'log') END) STORED
);
CREATE INDEX ledgers_live ON ledgers (ledger_id) WHERE body IS NOT NULL;
CREATE INDEX ledgers_by_state ON ledgers (state, ledger_id) WHERE body IS NOT NULL;
CREATE INDEX ledgers_by_log ON ledgers (log, ledger_id) WHERE log IS NOT NULL;
CREATE INDEX ledgers_by_owner ON ledgers (owner, ledger_id) WHERE body IS NOT NULL;

-- The bookies that each ledger names, in fragments or repairs. This table mirrors the ledgers'
-- bodies.
CREATE TABLE ledger_members (
    name text NOT NULL,
    ledger_id bigint NOT NULL REFERENCES ledgers,
    incarnation bigint NOT NULL,
    PRIMARY KEY (name, ledger_id, incarnation)
);
CREATE INDEX ledger_members_of ON ledger_members (ledger_id);

-- The ledgers that have a pair of custom metadata, by the pair's hash. Pairs never change. A GIN
-- index would not do: it has no order, so that one page would cost as much as all pages.
CREATE TABLE ledger_tags (
    tag bytea NOT NULL,
    ledger_id bigint NOT NULL REFERENCES ledgers,
    PRIMARY KEY (tag, ledger_id)
);
CREATE INDEX ledger_tags_of ON ledger_tags (ledger_id);

-- Tokens of applied changes, by which a lost answer is settled (rule 6). They are never deleted.
CREATE TABLE attempts (
    attempt uuid PRIMARY KEY,
    target text NOT NULL,
    at timestamptz NOT NULL DEFAULT now()
);

-- Callers choose only ids above MAXVALUE: lower ids on bookies show how far this sequence went.
CREATE SEQUENCE ledger_ids AS bigint MINVALUE 1 MAXVALUE 4503599627370495 NO CYCLE;

CREATE FUNCTION next_ledger_id() RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    candidate bigint;
BEGIN
    LOOP
        candidate := nextval('ledger_ids');
        IF NOT EXISTS (SELECT FROM ledgers WHERE ledger_id = candidate) THEN
            RETURN candidate;
        END IF;
    END LOOP;
END
$$;

-- A notification is a line of `GET /v1/changes` (`Change` in wire/bodies.py).
CREATE FUNCTION announce_ledger() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('ledger_changes', json_build_object('kind', 'change', 'ledger_id', NEW.ledger_id,
        'version', NEW.version, 'state', NEW.state, 'deleted', NEW.state IS NULL)::text);
    RETURN NULL;
END
$$;
CREATE TRIGGER announce_ledger AFTER INSERT OR UPDATE ON ledgers
    FOR EACH ROW EXECUTE FUNCTION announce_ledger();

-- A version of a repair item is never used again, not even by a later item of the same ledger and
-- member. So a worker with a claim on a deleted item can't clear entries of the later item.
CREATE SEQUENCE repair_versions AS bigint;

-- The entries that members lack (rule 8), with one row per ledger and member. Workers claim rows.
CREATE TABLE repairs (
    ledger_id bigint NOT NULL REFERENCES ledgers,
    member text NOT NULL,
    ranges int8multirange NOT NULL,
    version bigint NOT NULL DEFAULT nextval('repair_versions'),
    survivors smallint NOT NULL DEFAULT 32767,
    failures integer NOT NULL DEFAULT 0,
    detail text NOT NULL DEFAULT '',
    worker text,
    next_try_at timestamptz NOT NULL DEFAULT now(),
    created_at timestamptz NOT NULL DEFAULT now(),
    -- Whether another member may take this member's place. It is false for entries that a writer
    -- reports as missed (rule 8), because the member may only be restarting.
    moves boolean NOT NULL DEFAULT false,
    PRIMARY KEY (ledger_id, member)
);
CREATE INDEX repairs_in_order ON repairs (survivors, next_try_at, ledger_id, member);
-- Finds items that wait for their next try.
CREATE INDEX repairs_waiting ON repairs (next_try_at) WHERE worker IS NULL;
-- Finds the items of a bookie in any incarnation.
CREATE INDEX repairs_by_name ON repairs (split_part(member, '@', 1));

-- Operators' settings for all processes of autorecovery. For an absent field, each process uses the
-- setting with which it was started. `triggers` counts the requests to audit everything now.
CREATE TABLE repair_settings (
    is_only boolean PRIMARY KEY DEFAULT true CHECK (is_only),
    body jsonb NOT NULL DEFAULT '{}',
    triggers bigint NOT NULL DEFAULT 0,
    changed_at timestamptz NOT NULL DEFAULT now()
);
INSERT INTO repair_settings DEFAULT VALUES;

-- The data directory that a bookie's name stands for (rule 15).
CREATE TABLE cookies (
    name text PRIMARY KEY,
    version bigint NOT NULL,
    cookie jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    changed_at timestamptz NOT NULL DEFAULT now(),
    -- A decommissioned bookie is not listed. Its row stays, so that an incarnation is used once.
    retired_at timestamptz,
    -- The end of the bookie's log on disk, as the bookie reported it. A directory whose log ends
    -- earlier went back to a snapshot. The column is separate, since a report changes no version.
    log_end bigint NOT NULL DEFAULT 0,
    -- When the directory registered. An older ledger of which the directory holds nothing was on
    -- another directory (rule 15b). '-infinity': the directory is older than this database knows.
    born_at timestamptz NOT NULL DEFAULT '-infinity'
);

-- The cookies of these members' bookies, locked until the transaction ends: a registration takes
-- the same locks exclusively. The locks come first, since each statement of a volatile function
-- sees what was committed before it. Row locks would be written to disk, and many readers would
-- starve a writer.
CREATE FUNCTION hold_incarnations(members text[]) RETURNS SETOF cookies LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    names text[] := ARRAY(SELECT DISTINCT split_part(member, '@', 1) COLLATE "C" AS name
        FROM unnest(members) AS member ORDER BY name);
BEGIN
    PERFORM pg_advisory_xact_lock_shared(hashtextextended('cookie ' || name, 0))
        FROM unnest(names) AS name;
    RETURN QUERY SELECT * FROM cookies c WHERE c.name = ANY(names) AND c.retired_at IS NULL;
END
$$;

-- Logs by name. A deleted log's row keeps its version, so that no late change applies to a later
-- log.
CREATE TABLE logs (
    name text PRIMARY KEY,
    version bigint NOT NULL CHECK (version >= 1),
    body jsonb,
    created_at timestamptz NOT NULL DEFAULT now(),
    changed_at timestamptz NOT NULL DEFAULT now(),
    body_bytes integer GENERATED ALWAYS AS (octet_length(body::text)) STORED,
    -- The change that made this version, since versions of two histories may be equal.
    attempt uuid
);
CREATE FUNCTION announce_log() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('ledger_changes', json_build_object('kind', 'change', 'log', NEW.name)::text);
    RETURN NULL;
END
$$;
CREATE TRIGGER announce_log AFTER INSERT OR UPDATE ON logs
    FOR EACH ROW EXECUTE FUNCTION announce_log();
CREATE INDEX logs_live ON logs (name) WHERE body IS NOT NULL;
CREATE INDEX logs_by_owner ON logs ((('logs/' || name) COLLATE "C")) WHERE body IS NOT NULL;

-- Ledgers that were created for a log, which does not name them yet or any longer (rule 22). This
-- table mirrors the logs' rows. `since`: when the ledger was created, or when its log released it.
CREATE TABLE unnamed_ledgers (
    ledger_id bigint PRIMARY KEY REFERENCES ledgers,
    since timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX unnamed_ledgers_by_age ON unnamed_ledgers (since, ledger_id);

-- Leases only avoid duplicate work. A lease's token grows with every new holder.
CREATE TABLE leases (
    name text PRIMARY KEY,
    holder text NOT NULL,
    token bigint NOT NULL,
    expires_at timestamptz NOT NULL
);

-- Transactions, which publish ledgers onto a log together, or not at all (rule 28).
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
-- All tasks of one version of an app share one OPEN transaction.
CREATE UNIQUE INDEX transactions_open_by_version ON transactions (log, app, app_version)
    WHERE state = 'OPEN' AND app IS NOT NULL;
CREATE INDEX transactions_by_expiry ON transactions (expires_at) WHERE state = 'OPEN';
CREATE INDEX transactions_by_end ON transactions (ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX transactions_open_of_log ON transactions (log) WHERE state = 'OPEN';

-- Ledgers of OPEN transactions. A log's ledger is here, in `unnamed_ledgers`, or named by the log.
CREATE TABLE transaction_ledgers (
    ledger_id bigint PRIMARY KEY REFERENCES ledgers,
    transaction text NOT NULL REFERENCES transactions,
    partition bigint,
    attempt bigint
);
CREATE INDEX transaction_ledgers_of ON transaction_ledgers (transaction, ledger_id);

-- The last version that an app published onto a log, and its transaction.
CREATE TABLE app_versions (
    log text NOT NULL,
    app text NOT NULL,
    version bigint NOT NULL,
    transaction text NOT NULL REFERENCES transactions,
    PRIMARY KEY (log, app)
);
CREATE INDEX app_versions_of ON app_versions (transaction);

-- Ledgers that bookies keep, since they hold copies of rows whose change this database lacks (rule
-- 18c). Only operators read this table. Bookies ask with the copies' tokens in each collector
-- round.
CREATE TABLE kept_ledgers (
    ledger_id bigint NOT NULL,
    attempt uuid NOT NULL,
    holder text NOT NULL,
    PRIMARY KEY (ledger_id, attempt, holder)
);

-- Ledgers that were not CLOSED when a loss of changes was accepted (rule 18d). Before such a ledger
-- ends, bookies are asked for copies of its row: entries may be acknowledged under a lost row.
CREATE TABLE unproven_ledgers (ledger_id bigint PRIMARY KEY);

-- Users' access tokens (docs/adr/0021-access-tokens.md). `hash` is SHA-256 of the token's secret.
CREATE TABLE access_tokens (
    id text PRIMARY KEY,
    hash bytea NOT NULL UNIQUE,
    body jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz
);

-- The version of `access_tokens`, new after each change, so that gateways read only changed lists.
CREATE TABLE access_token_list (
    is_only boolean PRIMARY KEY DEFAULT true CHECK (is_only),
    version uuid NOT NULL DEFAULT gen_random_uuid(),
    -- Gateways sign browsers' tickets with this key of 244 random bits.
    ticket_key bytea NOT NULL DEFAULT
        decode(replace(gen_random_uuid()::text || gen_random_uuid()::text, '-', ''), 'hex')
);
INSERT INTO access_token_list DEFAULT VALUES;

-- The audit log (docs/adr/0022-audit-log.md), written in the transactions of audited changes.
CREATE TABLE audit (
    number bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT now(),
    id uuid NOT NULL UNIQUE,
    who text NOT NULL,
    remote text NOT NULL,
    via text NOT NULL,
    operation text NOT NULL,
    target text NOT NULL
);

-- Ids of the keys that encrypt rows of ledgers (docs/adr/0029-keys-at-rest.md). A service whose
-- KEY_FILE lacks one of these keys does not serve.
CREATE TABLE sealing_keys (
    id text PRIMARY KEY,
    since timestamptz NOT NULL DEFAULT now()
);

-- Ledgers of other logs that forks name (rule 27a): a ledger is deleted only in a transaction that
-- sees no row for it here. This table mirrors the forks' rows. A rebuild may add a row for a ledger
-- that has none yet.
CREATE TABLE shared_ledgers (
    ledger_id bigint NOT NULL,
    log text NOT NULL,
    PRIMARY KEY (log, ledger_id)
);
CREATE INDEX shared_ledgers_of ON shared_ledgers (ledger_id);

-- The log from which a log was forked. A deleted log's name stays reserved while a fork of it, or a
-- fork of such a fork, exists. A deleted fork's row counts only while that fork has forks itself.
CREATE TABLE forks (
    fork text PRIMARY KEY,
    source text NOT NULL
);
CREATE INDEX forks_of ON forks (source);
