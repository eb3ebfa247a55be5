"""The Python SDK. It sends requests to gateways only, and raises their errors as classes of `errors`.

async with Client("http://127.0.0.1:8080", "http://127.0.0.1:8081") as client:
    ledger = await client.create_ledger()
    await ledger.append(b"hello")
    async for entry in ledger.entries():
        print(entry.entry_id, entry.payload)

    log = await client.create_log("events")
    await log.producer("me").append(b"exactly once")
    async for record in log.tail():
        print(record.offset, record.value)

    async with log.consumer("billing") as consumer:
        async for record in consumer:
            print(record.offset)
            await consumer.commit()

    async with log.table() as table:
        await table.caught_up()
        print(table["customer-7"].value)

    async for job in log.queue("mail").jobs(concurrency=20):
        print(job.record.offset)

`quorumlog.client.sync` has the same names for programs without an event loop.

This folder belongs to the base package, so it may import only aiohttp, orjson, `errors`, `header` and
problem documents.
"""

from quorumlog.client.batching import Batching
from quorumlog.client.client import Client
from quorumlog.client.consumer import Consumer
from quorumlog.client.ledger import Ledger
from quorumlog.client.log import Log
from quorumlog.client.producer import Producer, Unsettled
from quorumlog.client.queue import Job, Queue, RefusedJob
from quorumlog.client.records import (
    Appended,
    Entry,
    LogAppended,
    LogPage,
    LogRecord,
    Page,
    Paged,
    Record,
    Start,
)
from quorumlog.client.shown import ClusterInfo, ConsumerInfo, LedgerInfo, LogInfo, QueueInfo
from quorumlog.client.table import Table
from quorumlog.client.transaction import Transaction, TransactionLedger
from quorumlog.errors import ClientBroke, ClientClosed, ConnectionLost

__all__ = [
    "Appended",
    "Batching",
    "Client",
    "ClientBroke",
    "ClientClosed",
    "ClusterInfo",
    "ConnectionLost",
    "Consumer",
    "ConsumerInfo",
    "Entry",
    "Job",
    "Ledger",
    "LedgerInfo",
    "Log",
    "LogAppended",
    "LogInfo",
    "LogPage",
    "LogRecord",
    "Page",
    "Paged",
    "Producer",
    "Queue",
    "QueueInfo",
    "Record",
    "RefusedJob",
    "Start",
    "Table",
    "Transaction",
    "TransactionLedger",
    "Unsettled",
]
