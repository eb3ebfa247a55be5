"""`make chaos-spark TIME=…`: Spark writes and copies while it, and the gateways, are killed.

Each round writes ROWS numbers onto a log, by tasks that fail, through a proxy that loses the answer
of the first commit; a gateway is killed while the rows are on their way, and the driver as soon as
the commit can be seen. Then a stream copies that log onto another one, and its driver is killed
RESTARTS times at random points. In the end each number is on both logs exactly once, and no ledger
is left that is on no log.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import pyarrow as pa

from loadtest.cluster import Cluster, running
from loadtest.ports import free_ports
from loadtest.stores import Stores, scratch
from loadtest.waiting import DeadlineMissed, until
from quorumlog.errors import QuorumLogError
from quorumlog.spark.http import Gateways
from quorumlog.wire.columns import MEDIA
from services.local.config import ROOT
from services.local.process import Program, start

_WAIT_S: Final = 900.0
"""For a driver that nobody kills, on a machine that may be shared and slow."""

_SETTLED_S: Final = 600.0
"""For what was not published to go: a transaction's expiry, or the five minutes of a log's own
ledgers, then the sweep."""

_COMMIT: Final = re.compile(rb"POST /v1/transactions/[^ /]+/commit ")
_PARTITIONS: Final = 8


@dataclass(slots=True)
class Counts:
    """What was done, and what is wrong."""

    rows: int = 0
    lost: int = 0
    doubled: int = 0
    orphans: int = 0
    gateway_kills: int = 0
    driver_kills: int = 0
    answers_lost: int = 0

    @property
    def is_right(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.lost or self.doubled or self.orphans)

    def __str__(self) -> str:
        """The last line."""
        return (
            f"chaos-spark: {self.rows} rows, {self.lost} lost, {self.doubled} doubled, "
            f"{self.orphans} orphans, {self.gateway_kills} gateway kills, "
            f"{self.driver_kills} driver kills"
        )


class LossyProxy:
    """Stands before a gateway and loses the answer of the first commit that passes."""

    def __init__(self, url: str, counts: Counts) -> None:
        self._host, port = url.removeprefix("http://").split(":")
        self._port, self._counts = int(port), counts
        self.is_armed = False

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Its URL, until the end of the block."""
        port = free_ports(1)[0]
        server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            up_reader, up_writer = await asyncio.open_connection(self._host, self._port)
            state = {"loses": False}
            back = asyncio.ensure_future(self._back(up_reader, writer, state))
            try:
                while chunk := await reader.read(1 << 16):
                    if self.is_armed and _COMMIT.match(chunk):
                        self.is_armed, state["loses"] = False, True
                    up_writer.write(chunk)
                    await up_writer.drain()
            finally:
                up_writer.close()
                back.cancel()
                await asyncio.wait({back})
        writer.close()

    async def _back(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, state: dict[str, bool]
    ) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(1 << 16):
                if state["loses"]:
                    # The commit is done, and nobody will hear of it.
                    self._counts.answers_lost += 1
                    break
                writer.write(chunk)
                await writer.drain()
        writer.close()


@dataclass(slots=True)
class Chaos:
    """One run over one cluster."""

    cluster: Cluster
    proxies: list[LossyProxy]
    urls: str
    folder: Path
    rows: int
    restarts: int
    chance: random.Random
    counts: Counts
    http: Gateways = field(init=False)

    def __post_init__(self) -> None:
        """Ask the gateways themselves, not the proxies."""
        self.http = Gateways(",".join(self.cluster.gateways))

    async def round(self, number: int) -> None:
        """Write, copy, and count what came of it."""
        source, target = f"source-{number}", f"target-{number}"
        for log in (source, target):
            await self._ask("PUT", f"/v1/logs/{log}", {"roll_bytes": 8 << 20})
        asked = {
            "urls": self.urls,
            "rows": self.rows,
            "rows_per_batch": max(1, self.rows // (2 * self.restarts + 4)),
            "partitions": _PARTITIONS,
            "seed": self.chance.randrange(1 << 30),
            "source": source,
            "target": "",
            "checkpoint": str(self.folder / f"checkpoint-{number}"),
        }
        for proxy in self.proxies:
            proxy.is_armed = True
        await self._batch(asked, source)
        await self._stream(asked | {"target": target}, target)
        for log in (source, target):
            await asyncio.to_thread(self._count, log)
        self.counts.rows += self.rows
        await self.settle(all_ledgers=False)
        _tell(f"round {number}: {self.counts}")

    async def _batch(self, asked: dict[str, Any], log: str) -> None:
        """Kill a gateway while rows are on their way, and the driver once the commit is seen."""
        before = await self._ledgers()
        async with self._driver(asked) as driver:
            await until(
                lambda: self._has_more(before, driver), "tasks write", _WAIT_S, passing=_PASSING
            )
            await self._hurt_a_gateway()
            await until(
                lambda: self._is_at(log, self.rows, driver),
                "the batch is committed",
                _WAIT_S,
                passing=_PASSING,
            )
            self._kill(driver)

    async def _stream(self, asked: dict[str, Any], log: str) -> None:
        """Kill the driver again and again after one to three more batches, then let it end."""
        at = 0
        for number in range(self.restarts):
            async with self._driver(asked) as driver:
                at += asked["rows_per_batch"] * self.chance.randrange(1, 3)
                await until(
                    lambda: self._is_at(log, at, driver),  # noqa: B023 - awaited here
                    f"the stream is at {at}",
                    _WAIT_S,
                    passing=_PASSING,
                )
                await asyncio.sleep(self.chance.uniform(0, 0.5))
                if number % 4 == 1:
                    await self._hurt_a_gateway()
                self._kill(driver)
        async with self._driver(asked) as driver:
            await until(lambda: driver.poll() is not None, "the stream ends", _WAIT_S)
            if driver.returncode:
                raise RuntimeError(f"the driver failed:\n{self._log().read_text()[-3000:]}")

    @contextlib.asynccontextmanager
    async def _driver(self, asked: dict[str, Any]) -> AsyncIterator["subprocess.Popen[bytes]"]:
        argv = (sys.executable, "-m", "loadtest.spark_driver", json.dumps(asked))
        path = os.pathsep.join((str(ROOT / "shared"), str(ROOT)))
        process = start(
            Program("driver", argv, {**os.environ, "PYTHONPATH": path}, ROOT), self._log()
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _kill(self, driver: "subprocess.Popen[bytes]") -> None:
        """SIGKILL to all of it: driver, JVM and Python workers."""
        if driver.poll() is None:
            os.killpg(driver.pid, signal.SIGKILL)
            self.counts.driver_kills += 1
            _tell("the driver is killed")

    def _log(self) -> Path:
        return self.folder / "driver.log"

    async def _hurt_a_gateway(self) -> None:
        """Kill one and start it again. The other one is asked meanwhile."""
        name = f"gateway-{self.chance.randrange(1, 3)}"
        await self.cluster.kill(name)
        self.counts.gateway_kills += 1
        await self.cluster.restart(name)
        _tell(f"{name} was killed")

    async def _has_more(self, before: set[int], driver: "subprocess.Popen[bytes]") -> bool:
        self._check_alive(driver)
        return len(await self._ledgers() - before) > 1

    async def _is_at(self, log: str, offset: int, driver: "subprocess.Popen[bytes]") -> bool:
        found = await self._ask("GET", f"/v1/logs/{log}")
        if found["next_offset"] >= min(offset, self.rows):
            return True
        self._check_alive(driver)
        return False

    def _check_alive(self, driver: "subprocess.Popen[bytes]") -> None:
        if driver.poll() not in (None, 0):
            raise RuntimeError(f"the driver failed:\n{self._log().read_text()[-3000:]}")

    async def _ask(self, method: str, path: str, value: Any = None) -> Any:
        answer = await asyncio.to_thread(
            self.http.request, method, path, value=value, is_repeatable=True
        )
        return answer.json()

    async def _ledgers(self) -> set[int]:
        found = await asyncio.to_thread(self.http.pages, "/v1/ledgers", "ledgers")
        return {int(ledger["ledger_id"]) for ledger in found}

    def _count(self, log: str) -> None:
        """Compare a log with the numbers that should be on it."""
        seen = bytearray(self.rows)
        at, is_end = 0, False
        while not is_end:
            answer = self.http.request(
                "GET",
                f"/v1/logs/{log}/entries",
                params={"from": at, "limit": 10_000, "max_bytes": 8 << 20},
                headers={"Accept": MEDIA},
                is_repeatable=True,
            )
            page = pa.ipc.open_stream(answer.body).read_all()
            for value in page.column("value").to_pylist():
                number = int(value)
                self.counts.doubled += seen[number]
                seen[number] = 1
            at, is_end = int(answer.headers["Next-Offset"]), page.num_rows == 0
        self.counts.lost += seen.count(0)

    async def settle(self, *, all_ledgers: bool) -> None:
        """Wait until what was not published is gone; what stays is counted.

        `all_ledgers`: the empty ones too that a log drops as it goes on, which wait five minutes
        for a roll that might still name them (rule 22); else those of transactions.
        """

        async def is_clean() -> bool:
            return not await self._left(all_ledgers=all_ledgers)

        with contextlib.suppress(DeadlineMissed):
            await until(is_clean, "nothing is left of what was not published", _SETTLED_S)
        self.counts.orphans += len(await self._left(all_ledgers=all_ledgers))

    async def _left(self, *, all_ledgers: bool) -> set[int]:
        """Ledgers that are on no log."""
        found = await asyncio.to_thread(self.http.pages, "/v1/ledgers", "ledgers")
        logs = await asyncio.to_thread(self.http.pages, "/v1/logs", "logs")
        named = {int(item["ledger_id"]) for log in logs for item in log["ledgers"]}
        mine = {int(f["ledger_id"]) for f in found if all_ledgers or "transaction" in f}
        return mine - named


_PASSING: Final = (QuorumLogError, aiohttp.ClientError, OSError)


async def storm(
    stores: Stores | None,
    *,
    rows: int,
    restarts: int,
    time_s: float,
    seed: int,
    waits_for_all: bool = False,
) -> Counts:
    """Rounds until the time is over, at least one.

    `waits_for_all`: until ledgers that a log dropped are gone too, which takes five minutes.
    """
    counts = Counts()
    loop = asyncio.get_running_loop()
    end = loop.time() + time_s
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(scratch("ql-spark-"))
        cluster = await stack.enter_async_context(running(stores, bookies=4, gateways=2))
        proxies = [LossyProxy(url, counts) for url in cluster.gateways]
        urls = [await stack.enter_async_context(proxy.listening()) for proxy in proxies]
        chaos = Chaos(
            cluster,
            proxies,
            ",".join(urls),
            Path(tempfile.mkdtemp(dir=folder)),
            rows,
            restarts,
            random.Random(seed),
            counts,
        )
        stack.callback(chaos.http.close)
        number = 0
        while number == 0 or loop.time() < end:
            await chaos.round(number)
            number += 1
        if waits_for_all:
            await chaos.settle(all_ledgers=True)
    return counts


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def main() -> None:
    """Run it and print what came of it, last."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.spark_chaos")
    parser.add_argument("--time", default="60s", help="rounds until then, at least one")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--restarts", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    found = re.fullmatch(r"(\d+)([smh]?)", asked.time)
    if found is None:
        raise SystemExit(f"TIME={asked.time!r} is no time: 90s, 2m, 1h")
    time_s = int(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]
    print(f"seed {asked.seed}, {asked.rows} rows, {asked.restarts} restarts a round", flush=True)
    counts = asyncio.run(
        storm(
            None,
            rows=asked.rows,
            restarts=asked.restarts,
            time_s=time_s,
            seed=asked.seed,
            waits_for_all=True,
        )
    )
    print(f"answers of commits that were lost: {counts.answers_lost}")
    print(counts)
    raise SystemExit(not counts.is_right)


if __name__ == "__main__":
    main()
