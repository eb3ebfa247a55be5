"""`make bench`: measurements beside peers, in rounds."""
