-- The cluster's identity, ledgers and everything that is written in the same transaction as they.

CREATE TABLE cluster (
    is_only boolean PRIMARY KEY DEFAULT true CHECK (is_only),
    cluster_id uuid NOT NULL DEFAULT gen_random_uuid(),
    created_at timestamptz NOT NULL DEFAULT now(),
    -- When an operator last accepted the loss of answered changes (rule 18a). A transaction that was OPEN then may have been
    -- committed in the lost history, and a ledger that no log named may have been named: neither ends by itself.
    loss_accepted_at timestamptz,
    -- When the tables were rebuilt from the bookies last (rule 18d): a bookie whose cookie is missing waits then for another
    -- rebuild, since it may have been away.
    rebuilt_at timestamptz,
    -- Bookies that never return, by an operator's word: nobody waits for the copies that they may hold.
    lost_bookies text[] NOT NULL DEFAULT '{}'
);
INSERT INTO cluster DEFAULT VALUES;

-- A row stays for ever: without a body it is a tombstone, so that an id is used once (rule 17).
CREATE TABLE ledgers (
    ledger_id bigint PRIMARY KEY CHECK (ledger_id >= 0),
    version bigint NOT NULL CHECK (version >= 1),
    body jsonb,
    state text GENERATED ALWAYS AS (body ->> 'state') STORED
        CHECK (state IN ('OPEN', 'IN_RECOVERY', 'CLOSED')),
    log text GENERATED ALWAYS AS (body ->> 'log') STORED,
    created_at timestamptz NOT NULL DEFAULT now(),
    changed_at timestamptz NOT NULL DEFAULT now(),
    -- How long a row is as text: a page ends by bytes, and which rows fit is decided without reading their bodies.
    body_bytes integer GENERATED ALWAYS AS (octet_length(body::text)) STORED,
    -- Which change made the version: a bookie's copy of the row names it, and who compares the two learns whether the copy
    -- is of this database's history (rule 18b).
    attempt uuid,
    -- At which offset of its log a ledger begins: bookies' copies of the row say it, so that a log can be rebuilt from them
    -- (rule 18f). Follows the logs' rows, as `unnamed_ledgers` does; a ledger that its log let go of keeps the place.
    first_offset bigint,
    -- In which log of its name a ledger was placed, and what was before it there: bookies' copies of the row say it, so that
    -- a rebuild sees a ledger that is missing between others, and tells a log from one that had its name before (rule 18f).
    lineage jsonb,
    -- What a grant names a row by, so that a list of what a caller may see is found by ranges of an index.
    owner text COLLATE "C" GENERATED ALWAYS AS (
        CASE WHEN body ->> 'log' IS NULL THEN 'ledgers/' || coalesce(body #>> '{custom,namespace}', '')
             ELSE 'logs/' || (body ->> 'log') END) STORED
);
CREATE INDEX ledgers_live ON ledgers (ledger_id) WHERE body IS NOT NULL;
CREATE INDEX ledgers_by_state ON ledgers (state, ledger_id) WHERE body IS NOT NULL;
CREATE INDEX ledgers_by_log ON ledgers (log, ledger_id) WHERE log IS NOT NULL;
CREATE INDEX ledgers_by_owner ON ledgers (owner, ledger_id) WHERE body IS NOT NULL;

-- Which ledgers name a bookie, in any fragment; follows `fragments` of the body.
CREATE TABLE ledger_members (
    name text NOT NULL,
    ledger_id bigint NOT NULL REFERENCES ledgers,
    incarnation bigint NOT NULL,
    PRIMARY KEY (name, ledger_id, incarnation)
);
CREATE INDEX ledger_members_of ON ledger_members (ledger_id);

-- Which ledgers have a pair of custom metadata, by the pair's hash. Pairs never change. A table and
-- no GIN index: that has no order, so a page would cost as much as all pages.
CREATE TABLE ledger_tags (
    tag bytea NOT NULL,
    ledger_id bigint NOT NULL REFERENCES ledgers,
    PRIMARY KEY (tag, ledger_id)
);
CREATE INDEX ledger_tags_of ON ledger_tags (ledger_id);

-- Rule 6: a change whose result got lost is settled by its token. Only ever inserted into.
CREATE TABLE attempts (
    attempt uuid PRIMARY KEY,
    target text NOT NULL,
    at timestamptz NOT NULL DEFAULT now()
);

-- Ids that callers choose are above those that this sequence assigns: bookies tell how far the assigned ones went.
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

CREATE FUNCTION announce_ledger() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify(
        'ledger_changes',
        concat_ws(' ', NEW.ledger_id, NEW.version, coalesce(NEW.state, 'deleted'))
    );
    RETURN NULL;
END
$$;
CREATE TRIGGER announce_ledger AFTER INSERT OR UPDATE ON ledgers
    FOR EACH ROW EXECUTE FUNCTION announce_ledger();

-- A version of an item is given once, though the item ends and another one comes in its place: who still holds a claim of
-- the first one clears nothing of the second.
CREATE SEQUENCE repair_versions AS bigint;

-- What members lack (rule 8), one row a ledger and member; workers claim rows.
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
    -- Whether another member may take the place. What a writer knows was missed (rule 8) is for that very member: it may be
    -- restarting.
    moves boolean NOT NULL DEFAULT false,
    PRIMARY KEY (ledger_id, member)
);
CREATE INDEX repairs_in_order ON repairs (survivors, next_try_at, ledger_id, member);
-- What waits for its next try.
CREATE INDEX repairs_waiting ON repairs (next_try_at) WHERE worker IS NULL;
-- What the queue holds for a bookie, whatever its incarnation.
CREATE INDEX repairs_by_name ON repairs (split_part(member, '@', 1));

-- What operators set for all of autorecovery: a field that is absent is as each process was told at
-- its start. `triggers` counts the times that somebody asked to have everything looked at now.
CREATE TABLE repair_settings (
    is_only boolean PRIMARY KEY DEFAULT true CHECK (is_only),
    body jsonb NOT NULL DEFAULT '{}',
    triggers bigint NOT NULL DEFAULT 0,
    changed_at timestamptz NOT NULL DEFAULT now()
);
INSERT INTO repair_settings DEFAULT VALUES;

-- Which data a bookie's name stands for (rule 15).
CREATE TABLE cookies (
    name text PRIMARY KEY,
    version bigint NOT NULL,
    cookie jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    changed_at timestamptz NOT NULL DEFAULT now(),
    -- A decommissioned bookie is no longer listed. Its row stays: an incarnation is used once.
    retired_at timestamptz,
    -- How far a bookie's log reached on its disk, by its own word: a directory whose log ends before that is one that went
    -- back to a snapshot. A column of its own, which changes no version.
    log_end bigint NOT NULL DEFAULT 0,
    -- When the directory registered that a name stands for: a ledger that is older, and that the directory holds nothing of,
    -- was another directory's (rule 15b). '-infinity': the directory is older than this database knows.
    born_at timestamptz NOT NULL DEFAULT '-infinity'
);

-- The registered incarnations of these members' names, which stay so until the transaction ends: a registration takes the same
-- locks exclusively. The locks come first, and each statement of a volatile function sees what was committed before it.
-- Locks of names, not of rows: a row lock would be written to disk, and many readers would starve one writer.
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

-- Named logs; a deleted one keeps its version, so that a late change can't meet a namesake.
CREATE TABLE logs (
    name text PRIMARY KEY,
    version bigint NOT NULL CHECK (version >= 1),
    body jsonb,
    created_at timestamptz NOT NULL DEFAULT now(),
    changed_at timestamptz NOT NULL DEFAULT now(),
    body_bytes integer GENERATED ALWAYS AS (octet_length(body::text)) STORED,
    -- Which change made the version: versions of two lines of history may be equal.
    attempt uuid
);
CREATE INDEX logs_live ON logs (name) WHERE body IS NOT NULL;
CREATE INDEX logs_by_owner ON logs ((('logs/' || name) COLLATE "C")) WHERE body IS NOT NULL;

-- Ledgers that were made for a log and that no log names (yet, or any more): rule 22. Follows the
-- logs' rows; `since` is when a ledger was made, or when its log let go of it.
CREATE TABLE unnamed_ledgers (
    ledger_id bigint PRIMARY KEY REFERENCES ledgers,
    since timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX unnamed_ledgers_by_age ON unnamed_ledgers (since, ledger_id);

-- Leases spare duels, no more; a token grows with every new holder.
CREATE TABLE leases (
    name text PRIMARY KEY,
    holder text NOT NULL,
    token bigint NOT NULL,
    expires_at timestamptz NOT NULL
);

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

-- Rule 18c. A bookie that holds a copy of a row whose change this database lacks keeps the ledger, and asks with the
-- copy's token at each round of its collector. What it was refused, for operators only: nothing is decided by it.
CREATE TABLE kept_ledgers (
    ledger_id bigint NOT NULL,
    attempt uuid NOT NULL,
    holder text NOT NULL,
    PRIMARY KEY (ledger_id, attempt, holder)
);

-- Rule 18d. Ledgers that were not CLOSED when the loss of changes was accepted: a later row of theirs may be lost, under
-- which entries were acknowledged. Whoever ends such a ledger first asks all bookies for copies of its row.
CREATE TABLE unproven_ledgers (ledger_id bigint PRIMARY KEY);

-- The users' access tokens (docs/adr/0021-access-tokens.md): `hash` is SHA-256 of the secret, which nobody keeps.
CREATE TABLE access_tokens (
    id text PRIMARY KEY,
    hash bytea NOT NULL UNIQUE,
    body jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz
);

-- Drawn anew by each change of the table above, so that gateways ask for the rows only after a change.
CREATE TABLE access_token_list (
    is_only boolean PRIMARY KEY DEFAULT true CHECK (is_only),
    version uuid NOT NULL DEFAULT gen_random_uuid(),
    -- Gateways sign tickets of browsers with it: 244 random bits.
    ticket_key bytea NOT NULL DEFAULT
        decode(replace(gen_random_uuid()::text || gen_random_uuid()::text, '-', ''), 'hex')
);
INSERT INTO access_token_list DEFAULT VALUES;

-- The audit log (docs/adr/0022-audit-log.md): who asked for the changes of the same transactions.
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

-- Names of the keys with which rows of ledgers are sealed (docs/adr/0029-keys-at-rest.md): a service without one of
-- them does not serve.
CREATE TABLE sealing_keys (
    id text PRIMARY KEY,
    since timestamptz NOT NULL DEFAULT now()
);

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
