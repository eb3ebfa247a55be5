"""The scopes that are searched to their end, small ones first."""

from typing import Final

from tests.explore.scope import Scope

QUICK: Final = (
    Scope("one entry, one recoverer"),
    Scope("one entry, one recoverer, Qw = 2", shape=(2, 2, 1)),
    Scope("two bookies, both must acknowledge", shape=(2, 2, 2)),
    Scope("two entries, striped", shape=(3, 2, 2), entries=2),
    Scope("two entries, no recoverer", entries=2, window=2, recoverers=0),
    Scope("an ensemble change", recoverers=0, spares=1, timeouts=1, closes=True),
    Scope("one entry, writer closes too", closes=True),
    Scope("one entry, deleted and dropped", deletes=True),
)
"""Those that fit the tests together."""

MINUTES: Final = (
    Scope("one entry, one crash with full loss", crashes=1),
    Scope("two entries, window 1", entries=2),
)
"""About a minute each."""

HOURS: Final = (
    Scope("one entry, a spare, one timeout", spares=1, timeouts=1, states_max=40_000_000),
    Scope("one entry, two recoverers", recoverers=2, states_max=40_000_000),
    Scope("two entries, window 2", entries=2, window=2, states_max=40_000_000),
)

DEFAULT: Final = (*QUICK, *MINUTES)

ALL: Final = (*DEFAULT, *HOURS)
