"""Reads of the newest record of a key, compared with JetStream's last message of a subject. Also
measures the bytes that a gateway receives for a read of all records of a key.

The log has many sealed ledgers with indexes of their keys, and each key is in many ledgers.
JetStream has a stream with three replicas and one message per key, with fewer keys. Its client
gets the last message of a subject with a direct get. Both clients are Python libraries.
"""

import argparse
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Self

import aiohttp
import psutil
import pyarrow as pa

from loadtest.bench.goals import Goal
from loadtest.bench.measure import Figures, Meter, for_each, payload_of, repeated
from loadtest.bench.plan import ROUNDS, TIME, Columns, Plan, Work
from loadtest.cluster import Cluster, running
from loadtest.jetstream import JetStream
from loadtest.program import Teller
from loadtest.waiting import until
from quorumlog.client import Client

_OURS, _PEER = "quorumlog", "JetStream"
_LOG: Final = "bench"
_BATCH: Final = 250
"""Records of one append."""
_VALUE_BYTES: Final = 100
_ARROW: Final = {"Content-Type": "application/vnd.apache.arrow.stream"}
_READS: Final = 20
"""Number of filtered reads in a round."""


@dataclass(slots=True)
class Ours:
    """A cluster with a log whose sealed ledgers are indexed."""

    cluster: Cluster
    client: Client
    seconds: float
    keys: int
    total: int
    """Size of all records in bytes."""

    @classmethod
    @asynccontextmanager
    async def running(
        cls, seconds: float, records: int, keys: int, ledgers: int
    ) -> AsyncIterator[Self]:
        """Run a cluster with a log of this size until the end of the block."""
        async with (
            running(None, bookies=3, gateways=1) as cluster,
            Client(*cluster.gateways) as client,
            aiohttp.ClientSession() as session,
        ):
            log = await client.create_log(_LOG, merge_below_bytes=0)
            url = f"{cluster.gateways[0]}/v1/logs/{_LOG}/records"
            value, each = payload_of(_VALUE_BYTES), records // ledgers

            async def append(first: int) -> None:
                numbers = range(first, first + _BATCH)
                names = [f"key-{number * 7919 % keys}" for number in numbers]
                table = pa.table({"value": [value] * _BATCH, "key": [n.encode() for n in names]})
                sink = pa.BufferOutputStream()
                with pa.ipc.new_stream(sink, table.schema) as writer:
                    writer.write_table(table)
                data = sink.getvalue().to_pybytes()
                async with session.post(url, data=data, headers=_ARROW) as answer:
                    answer.raise_for_status()

            for first in range(0, records, each):
                await for_each(range(first, first + each, _BATCH), append, 8)
                await log.roll()
            ours = cls(cluster, client, seconds, keys, records * (_VALUE_BYTES + len("key-123456")))
            await until(
                ours._is_indexed(ledgers), "all sealed ledgers are indexed", deadline_s=1800
            )
            yield ours

    def _is_indexed(self, ledgers: int) -> Any:
        url = f"{self.cluster.url('gateway-1')}/metrics"

        async def check() -> bool:
            async with self.cluster.session() as session, session.get(url) as answer:
                lines = (await answer.text()).splitlines()
            name = "quorumlog_log_key_indexes_total "
            return any(
                line.startswith(name) and float(line.split()[1]) >= ledgers for line in lines
            )

        return check

    async def newest(self) -> Figures:
        """Repeatedly get the newest record of a random key."""
        log, dice = self.client.log(_LOG), random.Random("keys")

        async def get() -> None:
            assert await log.get(f"key-{dice.randrange(self.keys)}") is not None

        meter = Meter({"client": [os.getpid()], **self.cluster.pids({"gateway": "gateway"})})
        return await repeated(meter, [get], self.seconds)

    async def filtered(self) -> Figures:
        """Read all records of random keys, and count the bytes that the gateway received."""
        log, dice = self.client.log(_LOG), random.Random()
        gateway = psutil.Process(self.cluster.pid("gateway-1"))
        before, found = gateway.io_counters().read_chars, 0
        meter = Meter({"client": [os.getpid()]})
        with meter:
            for _ in range(_READS):
                key = f"key-{dice.randrange(self.keys)}"
                found += len([record async for record in log.records(key=key)])
        size = (gateway.io_counters().read_chars - before) / _READS
        return {
            "records each": found / _READS,
            "ms each": meter.seconds / _READS * 1e3,
            "KB each": size / 1e3,
            "% of bytes": 100 * size / self.total,
        }


OPTIONS: Final = {
    "time": TIME,
    "rounds": ROUNDS,
    "records": (10_000_000, "number of records"),
    "keys": (1_000_000, "number of keys"),
    "ledgers": (100, "number of sealed ledgers"),
    "peer_keys": (100_000, "number of keys in JetStream"),
}


def plan(asked: argparse.Namespace, _teller: Teller) -> Plan:
    """Plan rounds of reads of the newest record, and of all records of a key."""
    newest, filtered = "the newest record of a key", "all records of a key"
    works = [
        Work(_OURS, newest, Ours.newest),
        Work(_PEER, newest, JetStream.newest, (asked.peer_keys, _VALUE_BYTES)),
        Work(_OURS, filtered, Ours.filtered),
    ]
    goals = [
        Goal(f"{_OURS}: {newest}", "p50 ms", "<=", 5),
        Goal(f"{_OURS}: {filtered}", "% of bytes", "<=", 1),
    ]
    return Plan(
        works,
        {
            _OURS: lambda _folder, seconds: Ours.running(
                seconds, asked.records, asked.keys, asked.ledgers
            ),
            _PEER: JetStream.running,
        },
        (Columns("medians of the rounds"),),
        asked.time,
        asked.rounds,
        f"{asked.records:,} records, {asked.keys:,} keys, {asked.ledgers} sealed ledgers",
        goals=goals,
        may_fail=(_PEER,),
    )
