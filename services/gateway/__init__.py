"""The gateway: the client protocol over HTTP."""
