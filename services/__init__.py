"""The services of quorumlog: they meet over HTTP only."""
