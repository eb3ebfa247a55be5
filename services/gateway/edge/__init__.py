"""The gateway's public face: HTTP in, calls of the engine and of logs out. It knows nothing of quorums.

May use `logs`, and of the engine only `interface`.
"""
