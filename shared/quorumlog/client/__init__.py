"""The Python SDK: talks to gateways only, and raises what the server raised.

async with Client("http://127.0.0.1:8080") as client:
    ledger = await client.create_ledger()
    await ledger.append(b"hello")
    async for entry in ledger.entries():
        print(entry.entry_id, entry.payload)
"""

from quorumlog.client.client import Client
from quorumlog.client.ledger import Appended, Entry, Ledger, Page
from quorumlog.client.transport import ConnectionLost

__all__ = ["Appended", "Client", "ConnectionLost", "Entry", "Ledger", "Page"]
