-- A version of an item is given once, though the item ends and another one comes in its place: who still
-- holds a claim of the first one clears nothing of the second.
CREATE SEQUENCE repair_versions AS bigint;
SELECT setval('repair_versions', (SELECT coalesce(max(version), 0) + 1 FROM repairs));
ALTER TABLE repairs ALTER COLUMN version SET DEFAULT nextval('repair_versions');
