"""Tracks the processes that were alive in the last hour, to show which of them are gone."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final, Never

from quorumlog.errors import QuorumLogError
from quorumlog.net.timers import time_text, wall_s
from quorumlog.protocol.ids import member_name
from quorumlog.wire.bodies import BookieInfo, ServiceInfo, ServiceList

_LOOK_S: Final = 5.0
"""Interval between two checks: the time for which a process counts as alive after a heartbeat."""
_GONE_KEPT_S: Final = 3600.0
SEEN_MAX: Final = 1000

_Key = tuple[str, str]
"""The kind of a service, and a bookie's name or another service's internal URL. A process that
restarts at the same URL replaces its predecessor."""


@dataclass(eq=False)
class Presence:
    """Remembers when each process was last seen alive."""

    _look_at_bookies: Callable[[], Sequence[BookieInfo]]
    """Returns the bookies that the directory read last."""
    _look_at_services: Callable[[], Awaitable[ServiceList]]
    _clock: Callable[[], float] = time.monotonic
    _seen: dict[_Key, tuple[ServiceInfo | None, float]] = field(default_factory=dict)
    """The last service info and time of each process; the process seen longest ago is first."""

    async def follow(self) -> Never:
        """Checks periodically which processes are alive. Never returns."""
        while True:
            with contextlib.suppress(QuorumLogError):
                self.shown(self._look_at_bookies(), await self._look_at_services())
            await asyncio.sleep(_LOOK_S)

    def shown(
        self, bookies: Sequence[BookieInfo], services: ServiceList
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Returns the JSON objects of these bookies and services, and of services that are gone.
        Lost bookies and gone services have `last_seen_at`, which is null after more than an hour.
        """
        found = {(one.kind, one.internal_url or one.url): one for one in services.services}
        for key, service in found.items():
            self._note(key, service)
        for bookie in bookies:
            if bookie.state != "lost":
                self._note(("bookie", member_name(bookie.id)), None)
        # While Redis is unavailable, the list may lack services that are alive.
        gone = {} if services.stale else self._seen
        shown = [bookie.model_dump(mode="json") for bookie in bookies]
        for one in shown:
            if one["state"] == "lost":
                one["last_seen_at"] = self._last_seen_at(("bookie", member_name(one["id"])))
        return shown, [
            *(service.model_dump(mode="json") for service in services.services),
            *(
                lost.model_dump(mode="json") | {"state": "gone", "last_seen_at": seen_at}
                for key, (lost, _) in gone.items()
                if lost is not None and key not in found and (seen_at := self._last_seen_at(key))
            ),
        ]

    def _note(self, key: _Key, service: ServiceInfo | None) -> None:
        self._seen.pop(key, None)
        self._seen[key] = service, self._clock()
        if len(self._seen) > SEEN_MAX:
            del self._seen[next(iter(self._seen))]

    def _last_seen_at(self, key: _Key) -> str | None:
        _, seen_s = self._seen.get(key, (None, -inf))
        age_s = self._clock() - seen_s
        return None if age_s >= _GONE_KEPT_S else time_text(wall_s() - age_s)
