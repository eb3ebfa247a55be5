-- The cluster's identity, ledgers and everything that is written in the same transaction as they.

CREATE TABLE cluster (
    is_only boolean PRIMARY KEY DEFAULT true CHECK (is_only),
    cluster_id uuid NOT NULL DEFAULT gen_random_uuid(),
    created_at timestamptz NOT NULL DEFAULT now()
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
    changed_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX ledgers_live ON ledgers (ledger_id) WHERE body IS NOT NULL;
CREATE INDEX ledgers_by_state ON ledgers (state, ledger_id) WHERE body IS NOT NULL;
CREATE INDEX ledgers_by_log ON ledgers (log, ledger_id) WHERE log IS NOT NULL;

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

-- Ids that the service gives stay below 2^53 and skip those that callers took.
CREATE SEQUENCE ledger_ids AS bigint MINVALUE 1 MAXVALUE 9007199254740991 NO CYCLE;

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

-- What members lack (rule 8), one row a ledger and member; workers claim rows.
CREATE TABLE repairs (
    ledger_id bigint NOT NULL REFERENCES ledgers,
    member text NOT NULL,
    ranges int8multirange NOT NULL,
    version bigint NOT NULL DEFAULT 1,
    survivors smallint NOT NULL DEFAULT 32767,
    failures integer NOT NULL DEFAULT 0,
    detail text NOT NULL DEFAULT '',
    worker text,
    next_try_at timestamptz NOT NULL DEFAULT now(),
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (ledger_id, member)
);
CREATE INDEX repairs_in_order ON repairs (survivors, next_try_at, ledger_id, member);

-- Which data a bookie's name stands for (rule 15).
CREATE TABLE cookies (
    name text PRIMARY KEY,
    version bigint NOT NULL,
    cookie jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    changed_at timestamptz NOT NULL DEFAULT now()
);

-- Idempotency keys of create; an expired one may be used again.
CREATE TABLE create_keys (
    key text PRIMARY KEY,
    ledger_id bigint NOT NULL REFERENCES ledgers,
    expires_at timestamptz NOT NULL
);
CREATE INDEX create_keys_by_expiry ON create_keys (expires_at);

-- Named logs; a deleted one keeps its version, so that a late change can't meet a namesake.
CREATE TABLE logs (
    name text PRIMARY KEY,
    version bigint NOT NULL CHECK (version >= 1),
    body jsonb,
    created_at timestamptz NOT NULL DEFAULT now(),
    changed_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX logs_live ON logs (name) WHERE body IS NOT NULL;

-- Leases spare duels, no more; a token grows with every new holder.
CREATE TABLE leases (
    name text PRIMARY KEY,
    holder text NOT NULL,
    token bigint NOT NULL,
    expires_at timestamptz NOT NULL
);
