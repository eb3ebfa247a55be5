"""What operators watch of the cluster, as the databases have it now: true gauges, not counts of events.

They are read from time to time, not when somebody scrapes, so that scraping costs nothing and never
waits for a database.
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

_LOOK_S: Final = 2.0


class ClusterGauges:
    """Every metadata service tells the same: take one of them, or the maximum."""

    def __init__(
        self,
        registry: CollectorRegistry,
        repairs: RepairStore,
        cookies: CookieStore,
        liveness: Liveness,
    ) -> None:
        """Nothing is told before the first look."""
        self._repairs = repairs
        self._cookies = cookies
        self._liveness = liveness
        self._ledgers = Gauge(
            "quorumlog_under_replicated_ledgers",
            "Ledgers of which a member lacks entries, now.",
            registry=registry,
        )
        self._items = Gauge(
            "quorumlog_repair_items", "Items of the repair queue, now.", registry=registry
        )
        self._waiting = Gauge(
            "quorumlog_repair_items_waiting",
            "Of these, the ones that failed and wait for their next try.",
            registry=registry,
        )
        self._oldest = Gauge(
            "quorumlog_repair_oldest_seconds",
            "For how long the oldest item has been there.",
            registry=registry,
        )
        self._bookies = Gauge(
            "quorumlog_bookies", "Registered bookies by state.", ("state",), registry=registry
        )

    async def follow(self) -> None:
        """Look for ever; while a database is away the last known values stand."""
        while True:
            try:
                await self._look()
            except QuorumLogError:
                pass
            except Exception:
                # A row that can't be read must not end what runs beside: expiry, the changes.
                log.exception("gauges-failed")
            await asyncio.sleep(_LOOK_S)

    async def _look(self) -> None:
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
