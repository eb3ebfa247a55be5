"""The BookKeeper protocol as state machines without IO, clock or randomness.

Read `messages` first: it is the language. A machine takes one event and gives effects; who drives
it performs them and brings the answers back (`step(event) -> list[Effect]`). May use `errors`, the
CRC32C package, and of the standard library only what has no side effects (pyproject.toml).

| module | what it is |
|---|---|
| `ids` `quorum` `metadata` `record` | the words: members, write sets, a ledger's row, entries as bytes |
| `writer` `window` `missed` | appends: runs confirmed in order, ensemble changes, the close |
| `recovery` `tally` | closing a ledger whose writer is gone |
| `reader` | ranges of confirmed entries from whichever bookie has them |
| `repair` | giving one member of a closed fragment what it should hold |
| `placement` | which bookies an ensemble is made of |
| `replica` | the other side: what one bookie takes, refuses and may say |
| `changes` | what one row may become: of a ledger, of a log, by a publication |
| `log` `batch` | named logs on ledgers: record batches, offsets, producers |
"""
