"""The scopes that are searched to their end, small ones first."""

from typing import Final

from tests.model.explore.scope import EndScope, LogScope, RewriteScope, Scope

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

_SEALED: Final = ((("a1",), ("b1~",)), (("a2",),), ((".c",),))
_KEYED: Final = ((("a1",), ("b1", "f1", "c-")), (("a-",), ("b2", "d1~")), (("e1",),))
_MERGE: Final = ("merge", 2)
_ALL: Final = ("merge", 9)
_PASS: Final = ("pass",)

REWRITE_ROLL: Final = RewriteScope(
    "rewrite: a merge, a roll",
    sealed=_SEALED,
    published=3,
    work=(_MERGE,),
    appended=("w1",),
    rolls=1,
)
REWRITE_FORK: Final = RewriteScope(
    "rewrite: a merge, a fork, a truncation",
    sealed=_SEALED,
    work=(_MERGE,),
    fork_at=2,
    truncations=1,
)
REWRITE_TWO: Final = RewriteScope("rewrite: two merges", sealed=_SEALED, work=(_ALL, _MERGE))
REWRITE_LOST: Final = RewriteScope(
    "rewrite: a merge fails and dies",
    sealed=_SEALED,
    work=(_MERGE,),
    lost=1,
    deaths=1,
    truncations=1,
)
REWRITE_INDEX: Final = RewriteScope(
    "rewrite: a merge, an index", sealed=_SEALED, work=(_MERGE, ("index",)), truncations=1
)
REWRITE_DELETION: Final = RewriteScope(
    "rewrite: a merge, deleted and created again", sealed=_SEALED, work=(_MERGE,), deletions=1
)
REWRITE_EXPIRY: Final = RewriteScope(
    "rewrite: a merge, records expire",
    sealed=((("a1", "b1~", ".d~"),), ((".c",),)),
    work=(_MERGE,),
    ages=True,
)
REWRITE_PASS: Final = RewriteScope(
    "rewrite: a pass, ledger by ledger, a truncation",
    sealed=_KEYED,
    work=(_PASS,),
    compacts=True,
    group_bytes=1,
    truncations=1,
)
REWRITE_FAILED_PASS: Final = RewriteScope(
    "rewrite: a pass, ledger by ledger, fails",
    sealed=_KEYED,
    work=(_PASS,),
    compacts=True,
    group_bytes=1,
    lost=1,
)
REWRITE_PARTS: Final = RewriteScope(
    "rewrite: a pass with too many keys", sealed=_KEYED, work=(_PASS,), compacts=True, keys_max=2
)
REWRITE_TOMBSTONE: Final = RewriteScope(
    "rewrite: a pass, a clean ledger, time passes",
    sealed=_KEYED,
    work=(_PASS,),
    compacts=True,
    clean=1,
    ages=True,
)

REWRITES_QUICK: Final = (
    RewriteScope(
        "rewrite: a merge, taken over", sealed=_SEALED, work=(_ALL,), appended=("w1",), forces=1
    ),
    RewriteScope(
        "rewrite: two passes, one dies",
        sealed=_KEYED,
        work=(_PASS, _PASS),
        compacts=True,
        deaths=1,
    ),
    REWRITE_ROLL,
    REWRITE_FORK,
    REWRITE_TWO,
    REWRITE_LOST,
    REWRITE_INDEX,
    REWRITE_DELETION,
    REWRITE_EXPIRY,
    REWRITE_PASS,
    REWRITE_FAILED_PASS,
    REWRITE_PARTS,
    REWRITE_TOMBSTONE,
)
"""Worlds of a log whose sealed ledgers are rewritten, a second or two each."""

REWRITES_MINUTES: Final = (
    RewriteScope(
        "rewrite: a merge, a fork, a sweep, deleted",
        sealed=_SEALED,
        work=(_MERGE,),
        fork_at=2,
        deletions=1,
        sweeps=1,
    ),
    RewriteScope(
        "rewrite: a merge, a fork, a sweep, a truncation",
        sealed=_SEALED,
        work=(_MERGE,),
        fork_at=2,
        truncations=1,
        sweeps=1,
    ),
    RewriteScope(
        "rewrite: a merge fails and dies, a sweep, a truncation",
        sealed=_SEALED,
        work=(_MERGE,),
        lost=1,
        deaths=1,
        sweeps=1,
        truncations=1,
    ),
    RewriteScope("rewrite: two merges, one fails", sealed=_SEALED, work=(_ALL, _MERGE), lost=1),
    RewriteScope(
        "rewrite: a merge, a roll, a truncation",
        sealed=_SEALED,
        work=(_MERGE,),
        appended=("w1",),
        rolls=1,
        truncations=1,
    ),
    RewriteScope(
        "rewrite: a merge, a record, a roll", ("x",), sealed=_SEALED, work=(_ALL,), rolls=1
    ),
    RewriteScope(
        "rewrite: a pass, a roll, time passes",
        sealed=_KEYED,
        work=(_PASS,),
        compacts=True,
        clean=1,
        ages=True,
        appended=("a3",),
        rolls=1,
    ),
    RewriteScope(
        "rewrite: two passes, one dies, time passes",
        sealed=_KEYED,
        work=(_PASS, _PASS),
        compacts=True,
        clean=1,
        ages=True,
        deaths=1,
    ),
    RewriteScope(
        "rewrite: a pass and a merge, time passes",
        sealed=_KEYED,
        work=(_PASS, _MERGE),
        compacts=True,
        clean=1,
        ages=True,
    ),
)
"""About half a minute each, at most."""

DEFAULT: Final = (
    *(*QUICK, *ENDS, *LOGS_QUICK, *REWRITES_QUICK),
    *(*MINUTES, *LOGS_MINUTES, *REWRITES_MINUTES),
)

ALL: Final = (*DEFAULT, *HOURS, *LOGS_HOURS)
