"""Somebody who uses the cluster as one should while others attack it, and must not notice.

A process of its own, with an address of its own: what delays the attacker delays nobody here. The
attacker writes the name of each phase to standard input, a line each; after the last line comes the
verdict, as JSON, on standard output. `python -m tests.outside.attack.bystander GATEWAY GATEWAY`
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import sys
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, Final

import aiohttp
import orjson

PEER: Final = "127.0.0.200"
LEDGERS: Final = 2
PACE_S: Final = 0.02
"""Between appends to one ledger: the bystander is no load of its own."""
SLOW_PACE_S: Final = 0.2
"""Between reads, and between ledgers that are made and deleted."""
PATIENCE_S: Final = 240.0
"""A request that is told to come again for so long did not come through."""
CALL_S: Final = 90.0
OCTETS: Final = {"Content-Type": "application/octet-stream"}
LINES: Final = {"Accept": "application/x-ndjson"}


class Noticed(Exception):
    """Something that a bystander must not notice."""


class Bystander:
    """Appends, follows, reads, makes and deletes; keeps books of all that was acknowledged."""

    def __init__(self, session: aiohttp.ClientSession, gateways: list[str]) -> None:
        self._session = session
        self._gateways = gateways
        self._phase = ""
        self._is_over = asyncio.Event()
        self.latencies: dict[str, list[float]] = {}
        self.retried: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.lost: list[str] = []

    def enter(self, phase: str) -> None:
        """From now on what is measured is of this phase."""
        self._phase = phase
        self.latencies.setdefault(phase, [])

    def end(self) -> None:
        """Stop appending; `run` then judges."""
        self._is_over.set()

    async def run(self) -> None:
        """Use the cluster until `end`, then read all back."""
        ledgers = [await self._ledger(number) for number in range(LEDGERS)]
        log = await self._log()
        subjects = [*ledgers, log]
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        async with asyncio.TaskGroup() as group:
            for subject in subjects:
                group.create_task(self._noticing(subject.append_all()))
                group.create_task(self._noticing(subject.follow()))
                group.create_task(self._noticing(subject.read_now_and_then()))
            group.create_task(self._noticing(self._make_and_delete()))
        for subject in subjects:
            await self._noticing(subject.judge())

    async def _noticing(self, work: Any) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 — an answer that makes no sense is noticed as well
            self.failures.append(f"{self._phase}: {error!r}")

    async def _ledger(self, number: int) -> "Subject":
        gateway = self._gateways[number % len(self._gateways)]
        made = await self.call("POST", f"{gateway}/v1/ledgers", {}, b"")
        return Subject(self, gateway, self._other(number), f"/v1/ledgers/{made['ledger_id']}")

    async def _log(self) -> "Subject":
        path = f"/v1/logs/the-bystanders-{os.getpid()}"
        await self.call("PUT", f"{self._gateways[-1]}{path}", {}, b"")
        return Subject(self, self._gateways[-1], self._gateways[0], path)

    def _other(self, number: int) -> str:
        return self._gateways[(number + 1) % len(self._gateways)]

    async def _make_and_delete(self) -> None:
        for number in itertools.count():
            if self.is_over:
                return
            gateway = self._gateways[number % len(self._gateways)]
            made = await self.call("POST", f"{gateway}/v1/ledgers", {}, b"")
            path = f"{gateway}/v1/ledgers/{made['ledger_id']}"
            await self.call("POST", f"{path}/entries", OCTETS, b"x")
            await self.call("POST", f"{path}/close", {}, b"")
            await self.call("DELETE", path, {}, None)
            self.counts["ledgers made and deleted"] += 1
            await self.pause(SLOW_PACE_S)

    @property
    def is_over(self) -> bool:
        """Whether no more is to be appended."""
        return self._is_over.is_set()

    async def pause(self, seconds: float) -> None:
        """Wait for so long, or until the end."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_over.wait(), seconds)

    async def append(self, url: str, payload: bytes) -> dict[str, Any]:
        """Append and measure, the tries that were refused with it."""
        loop, phase = asyncio.get_running_loop(), self._phase
        started = loop.time()
        reported = await self.call("POST", url, OCTETS, payload)
        self.latencies[phase].append((loop.time() - started) * 1000)
        self.counts["appends"] += 1
        return reported

    async def call(
        self, method: str, url: str, headers: dict[str, str], data: bytes | None
    ) -> dict[str, Any]:
        """Ask until it is done; only a 429 and a 503 that say so may be asked again.

        Raises: Noticed.
        """
        loop = asyncio.get_running_loop()
        end, is_repeated = loop.time() + PATIENCE_S, False
        while True:
            async with self._session.request(method, url, headers=headers, data=data) as answer:
                body = await answer.read()
                if answer.status < 300:
                    return dict(orjson.loads(body)) if body else {}
                if answer.status == 404 and method == "DELETE" and is_repeated:
                    return {}  # the earlier request deleted it, though nobody could say so
                problem = orjson.loads(body)
                if not _may_come_again(answer.status, problem) or loop.time() > end:
                    raise Noticed(f"{method} {url}: {answer.status} {body.decode()[:600]}")
                self.note_retry()
                is_repeated |= problem["outcome"] == "unknown"
                await asyncio.sleep(float(answer.headers.get("Retry-After", "1")))

    @contextlib.asynccontextmanager
    async def lines(self, url: str) -> AsyncIterator[aiohttp.ClientResponse | None]:
        """A stream of lines; None where the gateway says to come again."""
        async with self._session.get(url, headers=LINES) as answer:
            if answer.status == 200:
                yield answer
                return
            body = await answer.read()
            if not _may_come_again(answer.status, orjson.loads(body)):
                raise Noticed(f"GET {url}: {answer.status} {body.decode()[:600]}")
            self.note_retry()
            yield None
            await asyncio.sleep(float(answer.headers.get("Retry-After", "1")))

    def note_retry(self) -> None:
        """A request was told to come again."""
        self.retried[self._phase] += 1

    def verdict(self) -> dict[str, Any]:
        """What is told to the attacker."""
        return {
            "phases": {
                phase: {
                    "appends": len(times),
                    "p50_ms": statistics.median(paced(times)) if times else 0.0,
                    "max_ms": max(times, default=0.0),
                    "retried": self.retried[phase],
                }
                for phase, times in self.latencies.items()
            },
            "counts": dict(self.counts),
            "failures": self.failures,
            "lost": self.lost,
        }


def _may_come_again(status: int, problem: dict[str, Any]) -> bool:
    return status in (429, 503) and bool(problem["retryable"])


def paced(times_ms: list[float]) -> list[float]:
    """What appends that are sent at a steady pace would have taken: who waits for an answer before the
    next append measures a stall once only, however long it is.
    """
    step = PACE_S * 1000
    return [t - late * step for t in times_ms for late in range(max(1, int(t / step)))]


class Subject:
    """A ledger or a log: all that was acknowledged of it, and what its readers saw."""

    def __init__(self, bystander: Bystander, gateway: str, other: str, path: str) -> None:
        self._bystander, self._gateway, self._other, self.path = bystander, gateway, other, path
        self._is_log = path.startswith("/v1/logs/")
        self._id = "offset" if self._is_log else "entry_id"
        self._noun = "records" if self._is_log else "entries"
        self._acknowledged: list[str] = []
        self._is_complete = False
        """No more is appended; the last append may be under way when the end is told."""
        self._seen = 0
        """The follower has seen so many, in order."""

    async def append_all(self) -> None:
        """Append until the end."""
        try:
            while not self._bystander.is_over:
                await self._append()
                await self._bystander.pause(PACE_S)
        finally:
            self._is_complete = True

    async def _append(self) -> None:
        text = f"{self.path}:{len(self._acknowledged)}"
        reported = await self._bystander.append(
            f"{self._gateway}{self.path}/{self._noun}", text.encode()
        )
        if reported.get("entry_id", reported.get("first_offset")) != len(self._acknowledged):
            raise Noticed(f"{text} became {reported}: somebody else appended, or it is there twice")
        self._acknowledged.append(text)

    async def follow(self) -> None:
        """Read what comes, through the other gateway, until all is there that was acknowledged."""
        while not (self._is_complete and self._seen >= len(self._acknowledged)):
            url = f"{self._other}{self.path}/{self._noun}?encoding=text&wait_ms=1000&from={self._seen}"
            async with self._bystander.lines(url) as answer:
                if answer is None:
                    continue
                async for line in answer.content:
                    if not self._see(orjson.loads(line)):
                        break

    def _see(self, entry: dict[str, Any]) -> bool:
        """Take a line; False where it says to come again."""
        if _may_come_again(entry.get("status", 0), entry):
            self._bystander.note_retry()
            return False
        expected = f"{self.path}:{self._seen}"
        if entry.get(self._id) != self._seen or entry.get("text") != expected:
            raise Noticed(f"the follower expects {expected} and gets {entry}")
        self._seen += 1
        self._bystander.counts["followed"] += 1
        return True

    async def read_now_and_then(self) -> None:
        """Read the last page again and again."""
        while not self._bystander.is_over:
            first = max(0, len(self._acknowledged) - 20)
            for place in (self._gateway, self._other):
                page = await self._page(place, first)
                self._check(page, first)
                self._bystander.counts["pages read"] += 1
            await self._bystander.pause(SLOW_PACE_S)

    async def _page(self, gateway: str, first: int) -> list[dict[str, Any]]:
        url = f"{gateway}{self.path}/{self._noun}?encoding=text&from={first}&limit=1000"
        reported = await self._bystander.call("GET", url, {}, None)
        page: list[dict[str, Any]] = reported[self._noun]
        return page

    def _check(self, page: list[dict[str, Any]], first: int) -> None:
        for number, entry in enumerate(page, first):
            expected = f"{self.path}:{number}"
            if entry[self._id] != number or entry.get("text") != expected:
                self._bystander.lost.append(f"{expected} is there as {entry}")

    async def judge(self) -> None:
        """Read all back, and close: what was acknowledged is there once, in order, and nobody else
        has ended it.
        """
        row = await self._bystander.call("GET", f"{self._other}{self.path}", {}, None)
        if not self._is_log and row["state"] != "OPEN":
            self._bystander.lost.append(f"{self.path} is {row['state']}: somebody else ended it")
        count = 0
        while page := await self._page(self._other, count):
            self._check(page, count)
            count += len(page)
        if count < len(self._acknowledged):
            self._bystander.lost.append(
                f"{self.path} has {count} of {len(self._acknowledged)} acknowledged"
            )
        await self._bystander.call("POST", f"{self._gateway}{self.path}/close", {}, b"")


async def _main(gateways: list[str], peer: str) -> None:
    connector = aiohttp.TCPConnector(local_addr=(peer, 0), limit=0)
    timeout = aiohttp.ClientTimeout(CALL_S)
    token = os.environ.get("QUORUMLOG_TOKEN", "")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers
    ) as session:
        bystander = Bystander(session, gateways)
        bystander.enter("start")
        loop = asyncio.get_running_loop()
        lines = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        running = asyncio.create_task(bystander.run())
        while line := await lines.readline():
            bystander.enter(line.decode().strip())
        bystander.end()
        await running
        sys.stdout.write(orjson.dumps(bystander.verdict()).decode() + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.outside.attack.bystander")
    parser.add_argument("gateways", nargs="+", metavar="GATEWAY")
    parser.add_argument("--peer", default=PEER)
    asked = parser.parse_args()
    asyncio.run(_main(asked.gateways, asked.peer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
