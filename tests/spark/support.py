"""What Spark's tests share: a cluster whose loop runs beside them, and a small HTTP client."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, TypeVar

from loadtest.cluster import Cluster, running
from loadtest.stores import Stores
from quorumlog.spark.http import Gateways

T = TypeVar("T")

_START_S: Final = 600.0


class Beside:
    """An event loop in a thread: Spark's calls block, and the cluster must go on meanwhile."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` gives."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_START_S)

    def close(self) -> None:
        """End the loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_START_S)
        self._loop.close()


class SparkCluster:
    """A cluster for tests that block."""

    def __init__(self, cluster: Cluster, beside: Beside) -> None:
        self.cluster, self._beside = cluster, beside
        self.urls = ",".join(cluster.gateways)
        self.http = Gateways(self.urls)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Let the cluster do something: `cluster.kill(…)`, say."""
        return self._beside.run(work)

    def create(self, name: str, **settings: Any) -> str:
        """A new log."""
        self.http.request("PUT", f"/v1/logs/{name}", value=settings, is_repeatable=True)
        return name

    def append(self, log: str, *values: str) -> None:
        """One batch of records."""
        self.http.request(
            "POST",
            f"/v1/logs/{log}/entries",
            value={"entries": [{"text": value} for value in values]},
            is_repeatable=False,
        )

    def values(self, log: str) -> list[str]:
        """All records of a log as text."""
        found: list[str] = []
        at = 0
        while True:
            page = self.http.get(
                f"/v1/logs/{log}/entries",
                {"from": at or "earliest", "limit": 10_000, "encoding": "text"},
            )
            if not page["entries"]:
                return found
            found += [entry["text"] for entry in page["entries"]]
            at = page["next"]


@contextmanager
def spark_cluster(stores: Stores, **settings: Any) -> Iterator[SparkCluster]:
    """Run a cluster until the end of the block."""
    with ExitStack() as stack:
        beside = Beside()
        stack.callback(beside.close)
        life = running(stores, **settings)
        cluster = beside.run(life.__aenter__())
        stack.callback(lambda: beside.run(life.__aexit__(None, None, None)))
        found = SparkCluster(cluster, beside)
        stack.callback(found.http.close)
        yield found
