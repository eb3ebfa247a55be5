"""The scopes that are searched to their end, small ones first."""

from typing import Final

from tests.model.explore.scope import EndScope, LogScope, Scope

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

LOG_REPEAT: Final = LogScope("log: one request and its repeat", repeats=1)
LOG_ROLL: Final = LogScope("log: one request, one roll", rolls=1, ledgers=2)
LOG_TWO: Final = LogScope("log: two requests", ("p0", "p1"), ledgers=2)
LOG_PUBLICATION: Final = LogScope(
    "log: one record, one publication", ("a",), publishes=1, ledgers=2
)
LOG_TWICE: Final = LogScope(
    "log: one record, a publication asked for twice", ("a",), publishes=2, forces=0
)
LOG_REPEAT_ROLL: Final = LogScope(
    "log: a request, its repeat, one roll", repeats=1, rolls=1, forces=0
)

LOG_OVERWRITE: Final = LogScope(
    "log: one request, a publication over it", publishes=1, overwrites=True, forces=0
)
LOG_TRUNCATION: Final = LogScope(
    "log: a repeat, one roll, one truncation", repeats=1, rolls=1, truncations=1, forces=0
)
LOG_DELETION: Final = LogScope(
    "log: one request, deleted and created again", deletions=1, forces=0, ledgers=3
)
LOG_NAMESAKE: Final = LogScope(
    "log: two records, deleted and created again", ("a", "b"), deletions=1, forces=0, ledgers=2
)
LOG_LOST: Final = LogScope(
    "log: two records, the last ledger is lost with the database", ("a", "b"), losses=1, forces=0
)
LOG_FORGOTTEN: Final = LogScope(
    "log: a repeat, its producer forgotten", ("p0", "q0"), repeats=1, forces=0, remembers=1
)

LOG_REFUSALS: Final = LogScope(
    "log: two records, too little room", ("a", "b"), refusals=1, forces=0
)

LOGS_QUICK: Final = (
    LOG_REPEAT,
    LOG_REFUSALS,
    LOG_TWO,
    LOG_TWICE,
    LOG_REPEAT_ROLL,
    LogScope("log: a gateway dies", repeats=1, kills=1, forces=0),
    LOG_OVERWRITE,
    LOG_TRUNCATION,
    LOG_DELETION,
    LOG_LOST,
    LOG_FORGOTTEN,
    LogScope("log: one request, taken over, a head reread", heads=1, ledgers=2),
    LogScope("log: one request, one roll, a head reread", rolls=1, heads=1, forces=0),
)
"""Worlds of one log and two gateways that fit the tests."""

LOGS_MINUTES: Final = (
    LOG_NAMESAKE,
    LOG_ROLL,
    LOG_PUBLICATION,
    LogScope("log: a request, its repeat, taken over twice", repeats=1, forces=2, ledgers=2),
    LogScope("log: a repeat, taken over, too little room", repeats=1, refusals=2, ledgers=2),
    LogScope("log: two records, taken over, too little room", ("a", "b"), refusals=1, ledgers=2),
    LogScope("log: a record, a roll, too little room", ("a", "b"), rolls=1, refusals=1, forces=0),
    LogScope("log: one request, one roll, taken over", rolls=1),
    LogScope("log: a request, its repeat, two rolls", repeats=1, rolls=2, forces=0, ledgers=4),
    LogScope("log: a roll, a gateway dies", repeats=1, rolls=1, kills=1, forces=0),
    LogScope(
        "log: a repeat, a publication over it, a gateway dies",
        repeats=1,
        publishes=1,
        overwrites=True,
        kills=1,
        forces=0,
    ),
    LogScope("log: a repeat, deleted and created again", repeats=1, deletions=1, forces=0),
    LogScope("log: one request, deleted, taken over", deletions=1),
    LogScope("log: one request, deleted, a head reread", deletions=1, heads=1, forces=0),
    LogScope("log: one request, deleted, a gateway dies", deletions=1, kills=1, forces=0),
    LogScope(
        "log: a forgotten producer's repeat, a gateway dies",
        ("p0", "q0"),
        repeats=1,
        kills=1,
        remembers=1,
        forces=0,
    ),
)
"""Up to about a minute each."""

LOGS_HOURS: Final = (
    LogScope(
        "log: a truncation, a gateway dies", repeats=1, rolls=1, truncations=1, kills=1, forces=0
    ),
    LogScope(
        "log: a forgotten producer's repeat, taken over", ("p0", "q0"), repeats=1, remembers=1
    ),
    LogScope("log: a repeat, a roll, taken over", repeats=1, rolls=1, states_max=20_000_000),
    LogScope(
        "log: a repeat, two rolls, one publication",
        repeats=1,
        rolls=2,
        publishes=1,
        forces=0,
        ledgers=4,
        states_max=20_000_000,
    ),
)

END_COPIES: Final = EndScope("ends: copies of an end, two bookies beside its members", others=2)
END_STRIPED: Final = EndScope("ends: copies of a striped ledger's end", (3, 2, 1), others=1)
LAC: Final = EndScope("ends: the LAC of three entries", entries=3)
ENDS: Final = (
    END_COPIES,
    END_STRIPED,
    EndScope("ends: copies of an end that needs all members", (2, 2, 2), others=2, earlier=1),
    EndScope("ends: copies of an open row", others=2, earlier=1, is_open=True),
    LAC,
    EndScope("ends: the LAC of a striped ledger", (3, 2, 2), entries=3),
    EndScope("ends: the LAC by one acknowledgement", (3, 3, 1), entries=2),
)
"""What others than the writer may say of a ledger: seconds each."""

DEFAULT: Final = (*QUICK, *ENDS, *LOGS_QUICK, *MINUTES, *LOGS_MINUTES)

ALL: Final = (*DEFAULT, *HOURS, *LOGS_HOURS)
