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
