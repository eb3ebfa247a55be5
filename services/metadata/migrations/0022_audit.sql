-- The audit log (docs/adr/0022-audit-log.md): who asked for the changes of the same transactions.
CREATE TABLE audit (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT now(),
    id uuid NOT NULL UNIQUE,
    who text NOT NULL,
    remote text NOT NULL,
    via text NOT NULL,
    operation text NOT NULL,
    target text NOT NULL
);
