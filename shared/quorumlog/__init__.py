"""quorumlog: replicated, append-only ledgers and logs over HTTP (the BookKeeper protocol)."""
