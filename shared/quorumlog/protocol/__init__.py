"""The BookKeeper protocol as state machines without IO, clock or randomness.

Read `messages` first: it defines events and effects. A machine takes one event and returns effects
(`step(event) -> list[Effect]`). A driver performs the effects and passes the answers back. The
package may import `errors`, CRC32C, and standard modules without side effects (pyproject.toml).

| module | contents |
|---|---|
| `ids` `quorum` `metadata` `record` | members, write sets, a ledger's metadata, entries as bytes |
| `writer` `window` `slots` | appends: confirms runs in order, changes ensembles, closes ledgers |
| `recovery` `tally` | closes a ledger whose writer is gone |
| `reader` | reads ranges of confirmed entries from the bookies that have them |
| `repair` | copies to one member of a closed fragment the entries that the member lacks |
| `placement` | chooses the bookies of an ensemble |
| `replica` | a ledger at one bookie: decides which requests to accept, and how to answer them |
| `changes` | checks that changes of ledgers, members and logs are legal |
| `log` `batch` | named logs on ledgers: record batches, offsets, producers |
"""
