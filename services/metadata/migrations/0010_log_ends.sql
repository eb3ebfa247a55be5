-- How far a bookie's log reached on its disk, by its own word: a directory whose log ends before that
-- is one that went back to a snapshot (rule 15). A column of its own, which changes no version.
ALTER TABLE cookies ADD COLUMN log_end bigint NOT NULL DEFAULT 0;
