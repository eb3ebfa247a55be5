"""Named logs on ledgers. Read `row` first (a log's metadata), then `messages` (events and effects).

| module | contents |
|---|---|
| `row` | a log's metadata, and all changes of it |
| `route` | sends requests to the owner here or to another gateway, or makes them wait |
| `handover` | steps that may change the owner: search, open, heal, delete, drain |
| `takeover` | makes this process the owner: recover, measure, replay, create, swap |
| `owner` | the owner: appends, acknowledges, and settles open requests when it ends |
| `job` | an owner's change of metadata: a check, a roll, a publication, a release |
| `rewrite` | copies the records of sealed ledgers into a ledger that replaces them |
| `indexing` `keys` | builds the index of the keys of a sealed ledger; the index's format |
| `tenancy` | an owner's state: the log's metadata and the ledger that it writes |
| `pipeline` | the appends to one ledger: entries, offsets, acknowledgements |
| `producers` `clock` | deduplicates retries; provides times |

The machines are independent of HTTP, tasks and locks. `services/gateway/logs/driver.py` drives
them, and `tests/model/explore/logs.py` explores small cases exhaustively. The package may import
the same modules as `protocol`.
"""

from quorumlog.protocol.log.row import (
    ANSWERS_MAX,
    LIMITS,
    LOG_LEDGERS_MAX,
    NO_KEYS,
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
    ledgers_of,
)

__all__ = [
    "ANSWERS_MAX",
    "LIMITS",
    "LOG_LEDGERS_MAX",
    "NO_KEYS",
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
    "ledgers_of",
]
