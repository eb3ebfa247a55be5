"""The gateway's public face: HTTP in, calls of the engine out. Nothing here knows of quorums."""
