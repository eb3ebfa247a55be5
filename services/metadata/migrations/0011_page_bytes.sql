-- How long a row is as text: a page ends by bytes, and which rows fit is decided without reading their bodies.
ALTER TABLE ledgers ADD COLUMN body_bytes integer
    GENERATED ALWAYS AS (octet_length(body::text)) STORED;
ALTER TABLE logs ADD COLUMN body_bytes integer
    GENERATED ALWAYS AS (octet_length(body::text)) STORED;
