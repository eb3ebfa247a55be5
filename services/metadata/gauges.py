"""Gauges of the cluster for operators: the present state of the databases, not counts of events.

They are updated periodically, not when scraped, so that scraping is cheap and never waits for a
database.
"""

import asyncio
import logging
from typing import Final, get_args

from prometheus_client import CollectorRegistry, Gauge

from quorumlog.errors import QuorumLogError
from quorumlog.wire.bodies import BookieState
from services.metadata.cookies import CookieStore
from services.metadata.liveness import Liveness
from services.metadata.repairs import RepairStore

log = logging.getLogger(__name__)

_UPDATE_S: Final = 2.0


class ClusterGauges:
    """Every metadata service exports the same values: use one service's, or the maximum."""

    def __init__(
        self,
        registry: CollectorRegistry,
        repairs: RepairStore,
        cookies: CookieStore,
        liveness: Liveness,
    ) -> None:
        """The gauges are zero until the first update."""
        self._repairs = repairs
        self._cookies = cookies
        self._liveness = liveness
        self._ledgers = Gauge(
            "quorumlog_under_replicated_ledgers",
            "Ledgers with a member that lacks entries, now.",
            registry=registry,
        )
        self._items = Gauge(
            "quorumlog_repair_items", "Items of the repair queue, now.", registry=registry
        )
        self._waiting = Gauge(
            "quorumlog_repair_items_waiting",
            "Items that failed and wait for their next try.",
            registry=registry,
        )
        self._oldest = Gauge(
            "quorumlog_repair_oldest_seconds",
            "Age of the oldest item.",
            registry=registry,
        )
        self._bookies = Gauge(
            "quorumlog_bookies", "Registered bookies by state.", ("state",), registry=registry
        )

    async def run(self) -> None:
        """Update for ever; while a database is away the last known values stay."""
        while True:
            try:
                await self._update()
            except QuorumLogError:
                pass
            except Exception:
                # An unreadable row must not end the tasks beside this one: expiry, changes.
                log.exception("gauges-failed")
            await asyncio.sleep(_UPDATE_S)

    async def _update(self) -> None:
        found = await self._repairs.summary()
        self._ledgers.set(found.ledgers)
        self._items.set(found.items)
        self._waiting.set(found.waiting)
        self._oldest.set(found.oldest_s)
        states = [
            bookie.state
            for bookie in (await self._liveness.bookies(await self._cookies.list())).bookies
        ]
        for state in get_args(BookieState):
            self._bookies.labels(state).set(states.count(state))
