-- A decommissioned bookie is no longer listed. Its row stays: an incarnation is used once (rule 15).
ALTER TABLE cookies ADD COLUMN retired_at timestamptz;

-- What the queue holds for a bookie, whatever its incarnation.
CREATE INDEX repairs_by_name ON repairs (split_part(member, '@', 1));
