"""A cluster in its own process, for programs with a JVM: the Spark tests, chaos test and benchmark.

A fork from any thread but the main one ends py4j's connection of the main thread, and Spark then
forgets its active session. So the process that has the session must not start the cluster's
processes. It sends commands as lines of JSON to the standard input of this process; the end of the
input ends the cluster.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TypeVar

from loadtest.cluster import Cluster, running
from loadtest.stores import Stores
from loadtest.waiting import until_sync
from quorumlog.spark.http import Gateways

T = TypeVar("T")

_WAIT_S: Final = 300.0


class SparkCluster:
    """A running cluster in another process, with a blocking interface."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        reported = self._answer()
        self._urls: dict[str, str] = reported["urls"]
        self.data = Path(reported["data"])
        self.headers: dict[str, str] = reported["headers"]
        """The headers that requests to internal listeners need."""
        gateways = (url for name, url in self._urls.items() if name.startswith("gateway-"))
        self.urls = ",".join(gateways)
        self.http = Gateways(self.urls)

    @property
    def pid(self) -> int:
        """The process id of the parent of all processes of the cluster."""
        return self._process.pid

    def url(self, name: str) -> str:
        """The URL at which a process listens."""
        return self._urls[name]

    def kill(self, name: str) -> None:
        """Kill a process of the cluster (SIGKILL)."""
        self._ask("kill", name)

    def restart(self, name: str, *prefix: str) -> None:
        """Start a killed process, and wait until it is ready. `prefix`: a command that runs it."""
        self._ask("restart", name, *prefix)

    def _ask(self, *command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the cluster's process ended; its last lines are on standard error")
        return json.loads(line)

    def until(self, predicate: Callable[[], T], what: str) -> T:
        """Call `predicate` until its result is true, and return the result."""
        return until_sync(predicate, what, _WAIT_S)

    def create(self, name: str, **settings: Any) -> str:
        """Create a log and return its name."""
        self.http.request("PUT", f"/v1/logs/{name}", value=settings, is_repeatable=True)
        return name

    def append(self, log: str, *values: str) -> None:
        """Append one batch of records."""
        self.http.request(
            "POST",
            f"/v1/logs/{log}/records",
            value={"records": [{"text": value} for value in values]},
            is_repeatable=False,
        )

    def values(self, log: str) -> list[str]:
        """All records of a log as text; asserts that their offsets are dense."""
        found: list[str] = []
        at: int | None = None
        while True:
            page = self.http.get(
                f"/v1/logs/{log}/records",
                {
                    "from": "earliest" if at is None else at,
                    "limit": 10_000,
                    "encoding": "text",
                    "max_bytes": 8 << 20,
                },
            )
            entries = page["records"]
            if not entries:
                return found
            first = entries[0]["offset"] if at is None else at
            assert [e["offset"] for e in entries] == list(range(first, first + len(entries)))
            found += [entry["text"] for entry in entries]
            at = page["next"]

    def offset(self, plain: dict[str, int]) -> dict[str, dict[str, Any]]:
        """The offset of a Spark stream. `plain`: the offset in each log, by name."""
        return {
            name: {"0": at, "created_at": self.http.get(f"/v1/logs/{name}")["created_at"]}
            for name, at in plain.items()
        }

    def ledgers(self) -> set[int]:
        """The ids of all ledgers."""
        return {int(ledger["ledger_id"]) for ledger in self.http.pages("/v1/ledgers", "ledgers")}

    def on_log(self, log: str) -> set[int]:
        """The ids of a log's ledgers."""
        return {int(item["ledger_id"]) for item in self.http.get(f"/v1/logs/{log}")["ledgers"]}


@contextmanager
def spark_cluster(stores: Stores | None, **settings: Any) -> Iterator[SparkCluster]:
    """Run a cluster in another process until the end of the block."""
    wanted = {"stores": asdict(stores) if stores else None, "settings": settings}
    process = subprocess.Popen(
        [sys.executable, "-m", "loadtest.spark_cluster", json.dumps(wanted)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    try:
        cluster = SparkCluster(process)
        try:
            yield cluster
        finally:
            cluster.http.close()
    finally:
        process.stdin.close()
        process.wait(_WAIT_S)
        assert process.stdout is not None
        process.stdout.close()


async def _serve(wanted: Any) -> None:
    stores = Stores(**wanted["stores"]) if wanted["stores"] else None
    async with running(stores, **wanted["settings"]) as cluster:
        urls = {name: cluster.url(name) for name in cluster.names}
        _say({"urls": urls, "data": str(cluster.data), "headers": cluster.headers})
        while line := await asyncio.to_thread(sys.stdin.readline):
            await _do(cluster, *json.loads(line))
            _say("done")


async def _do(cluster: Cluster, verb: str, name: str, *prefix: str) -> None:
    if verb == "kill":
        await cluster.kill(name)
    else:
        cluster.start(name, prefix=prefix)
        await cluster.until_up(name)


def _say(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_serve(json.loads(sys.argv[1])))
