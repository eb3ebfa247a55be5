"""Named logs on ledgers. Read `row` first (what a log is), then `messages` (the machines' language).

| module | what it is |
|---|---|
| `row` | a log's row, and the only ways in which it may change |
| `route` | where requests to a log go: to the owner here, to another gateway, or they wait |
| `handover` | what may change the owner: search, open, heal, delete, drain |
| `takeover` | becoming the owner: recover, measure, replay, create, swap |
| `owner` | owning: appends, acknowledgements, and settling what an end left open |
| `job` | what reads or changes the row for an owner: a check, a roll, a publication, a release |
| `tenancy` | what an owner holds: the row as it knows it, and the ledger that it writes |
| `pipeline` | the appends to one ledger: entries, offsets, acknowledgements |
| `producers` `clock` | what makes a retry harmless; what time it is |

The machines know nothing of HTTP, tasks or locks. `services/gateway/logs/driver.py` drives them, and
`tests/model/explore/logs.py` searches small worlds of them to their end. May use what `protocol` may.
"""

from quorumlog.protocol.log.row import (
    ANSWERS_MAX,
    LIMITS,
    LOG_LEDGERS_MAX,
    PRODUCERS_MAX,
    ROW_ANSWERS_MAX,
    Answer,
    Expiry,
    LogItem,
    LogMetadata,
    LogSettings,
    LogState,
    Producer,
    bounded,
)

__all__ = [
    "ANSWERS_MAX",
    "LIMITS",
    "LOG_LEDGERS_MAX",
    "PRODUCERS_MAX",
    "ROW_ANSWERS_MAX",
    "Answer",
    "Expiry",
    "LogItem",
    "LogMetadata",
    "LogSettings",
    "LogState",
    "Producer",
    "bounded",
]
