"""A cluster of an earlier release is upgraded service by service, and back, while clients write and read.

The order is that of docs/guides/upgrades.md. Everything that clients see is judged at the end as in a storm
(tests/cluster/chaos): nothing that was acknowledged is lost, no id is missing, nothing is there twice.
"""

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from loadtest.cluster import Cluster, ServicePlace, running
from tests.cluster.chaos.clients import Clients
from tests.cluster.chaos.report import Report
from tests.cluster.upgrade.releases import Release
from tests.support import history, log_history
from tests.support.waiting import SETTLED_S, UNHURRIED, until

ORDER: Final = ("metadata", "bookie", "autorecovery", "gateway")
"""Who answers comes before who asks; and autorecovery, which judges gateways, before them."""
COUNTS: Final = {"metadata": 2, "bookie": 4, "autorecovery": 1, "gateway": 2}
ACKS: Final = 40
"""Acknowledgements with each mixture of releases."""
WRITERS: Final = 3
_DEFECTS: Final = ("unhandled-error", "request-failed", "channel-broke", "answer-broke")
"""Events of the services' logs that no operator's action explains: the first is a 500."""


@dataclass(slots=True)
class Upgrade:
    """What was done and found."""

    seed: int = 1
    replaced: int = 0
    back: int = 0
    seen: Report = field(default_factory=Report)
    defects: Counter[str] = field(default_factory=Counter)
    """Events of the logs that must not be there, by process and event."""

    @property
    def has_failed(self) -> bool:
        """Whether the claim does not hold."""
        return self.seen.has_failed or bool(self.defects)

    def last_line(self) -> str:
        """The last line of `make upgrade`."""
        return (
            f"upgrade: {self.replaced} services replaced, {self.back} back, {self.seen.acknowledged} acknowledged,"
            f" {self.seen.count('lost')} lost"
        )


def names(kinds: tuple[str, ...]) -> list[str]:
    """The processes of these kinds, in order."""
    return [f"{kind}-{number + 1}" for kind in kinds for number in range(COUNTS[kind])]


@dataclass(frozen=True, slots=True)
class Releases:
    """From which release to which."""

    earlier: Release
    later: Release


class Storm:
    """One cluster on its way."""

    def __init__(
        self, cluster: Cluster, releases: Releases, report: Upgrade, notify: Callable[[str], None]
    ) -> None:
        self._cluster, self._releases, self._report, self._notify = (
            cluster,
            releases,
            report,
            notify,
        )
        self._clients = Clients(cluster, report.seed, report.seen)

    async def run(self) -> None:
        """Upgrade all services, take back what can be taken back, and judge."""
        seen = self._report.seen
        try:
            await self._clients.run(self._replace_all, writers=WRITERS)
            self._notify("everything is recovered and read")
            await self._clients.learn()
        finally:
            seen.violations += history.check(self._clients.history)
            seen.violations += log_history.check(self._clients.log_history.events)
            self._report.defects = defects_of(self._cluster)

    async def _replace_all(self) -> None:
        await self._more()
        for name in names(ORDER):
            await self._replace(name, self._releases.later)
            self._report.replaced += 1
        for name in names(tuple(reversed(ORDER))):
            await self._replace(name, self._releases.earlier)
            self._report.back += 1

    async def _replace(self, name: str, release: Release) -> None:
        """Stop a process, and start it as the other release."""
        cluster = self._cluster
        await cluster.stop(name)
        cluster.run_by(name, *release.prefix)
        cluster.start(name)
        await cluster.until_up(name)
        await self._more()
        self._notify(f"{name}: {release.name}, {self._report.seen.acknowledged} acknowledged")

    async def _more(self) -> None:
        """Ledgers and logs go on with this mixture."""
        seen, events = self._report.seen, self._clients.log_history.events
        wanted, produced = seen.acknowledged + ACKS, _produced(events) + 1
        await until(
            lambda: seen.acknowledged >= wanted and _produced(events) >= produced,
            "appends to ledgers and logs are acknowledged",
            SETTLED_S,
        )


def _produced(events: list[Any]) -> int:
    return sum(isinstance(event, log_history.Produced) for event in events)


def defects_of(cluster: Cluster) -> Counter[str]:
    """What the logs of the processes tell that must not be there."""
    return Counter(
        f"{name}: {event}"
        for name in names(ORDER)
        for event in events_of(cluster.log(name))
        if event in _DEFECTS
    )


def events_of(log: str) -> Iterator[str]:
    """The names of events in a log."""
    for line in log.splitlines():
        if line.startswith("{"):
            yield json.loads(line).get("event", "")


@asynccontextmanager
async def storm(
    releases: Releases, report: Upgrade, notify: Callable[[str], None]
) -> AsyncIterator[Storm]:
    """A cluster of its own, of the earlier release."""
    place = ServicePlace(prefix=releases.earlier.prefix)
    async with running(
        None,
        bookies=COUNTS["bookie"],
        gateways=COUNTS["gateway"],
        metadata_services=COUNTS["metadata"],
        environment=UNHURRIED,
        places=dict.fromkeys(names(ORDER), place),
    ) as cluster:
        yield Storm(cluster, releases, report, notify)
