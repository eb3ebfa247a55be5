"""The BookKeeper protocol as state machines without IO, clock or randomness.

Read `messages` first: it defines events and effects. A machine takes one event and returns effects
(`step(event) -> list[Effect]`). A driver performs the effects and passes the answers back. The
package may import `errors`, CRC32C, and standard modules without side effects (pyproject.toml).

| module | what it is |
|---|---|
| `ids` `quorum` `metadata` `record` | members, write sets, a ledger's metadata, entries as bytes |
| `writer` `window` `slots` | appends: runs confirmed in order, ensemble changes, the close |
| `recovery` `tally` | closes a ledger whose writer is gone |
| `reader` | reads ranges of confirmed entries from the bookies that have them |
| `repair` | copies to one member of a closed fragment the entries that the member lacks |
| `placement` | chooses the bookies of an ensemble |
| `replica` | the bookie: which requests it carries out or refuses, and what it may answer |
| `changes` | which changes of ledgers, members and logs are legal; what a publication changes |
| `log` `batch` | named logs on ledgers: record batches, offsets, producers |
"""
