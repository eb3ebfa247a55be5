"""The BookKeeper protocol as state machines without IO, clock or randomness."""
