-- Names of the keys with which rows of ledgers are sealed (docs/adr/0029-keys-at-rest.md): a service without one of
-- them does not serve.
CREATE TABLE sealing_keys (
    id text PRIMARY KEY,
    since timestamptz NOT NULL DEFAULT now()
);
