"""The cookies of the simulated metadata service (rules 15 and 15b), and what a bookie that registers asks besides.

What a cookie may become is judged by the service's own code. Bookies register by the code that ships: `registration.py`.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

from quorumlog.errors import NoSuchBookie, VersionConflict
from quorumlog.protocol import changes
from quorumlog.protocol.ids import member_incarnation, member_name
from quorumlog.wire.bodies import Cookie, CookiePut, CookieRow, HeartbeatTaken
from quorumlog.wire.rebuild_bodies import RebuildState
from services.metadata.cookies import check_cookie
from tests.model.sim.services.net import Request
from tests.model.sim.services.repairs import CHANGES, READS, RUNS, ModelRoute
from tests.model.sim.services.tables import Registration, Tables

if TYPE_CHECKING:
    from tests.model.sim.services.metadata import Metadata


class Cookies:
    """The cookies as one process changes them."""

    def __init__(self, metadata: "Metadata") -> None:
        self._metadata = metadata
        cookie = r"/v1/bookies/(?P<name>[^/]+)/cookie"
        heartbeat = r"/v1/services/(?P<kind>[^/]+)/(?P<name>[^/]+)/heartbeat"
        self.routes: tuple[ModelRoute, ...] = (
            ("GET", cookie, self._get, READS),
            ("PUT", cookie, self._put, CHANGES),
            ("GET", "/v1/rebuild", lambda _request: self._state(), RUNS),
            # The operator of the simulation knows where all bookies are.
            ("PUT", heartbeat, lambda _request, **_who: HeartbeatTaken(recorded=False), RUNS),
        )

    @property
    def _tables(self) -> Tables:
        return self._metadata.tables

    def registered(self, members: Collection[str]) -> dict[str, int]:
        """The registered incarnations of these members' bookies."""
        names = set(map(member_name, members))
        return {
            name: one.row.cookie.incarnation
            for name, one in self._tables.cookies.items()
            if name in names and not one.is_retired
        }

    def hold(self, added: Collection[str], *, ledger_id: int | None = None) -> None:
        """Check that a change may add these members. Raises: StaleMember."""
        changes.check_members(sorted(added), self.registered(added), ledger_id=ledger_id)

    def _get(self, _request: Request, name: str) -> CookieRow:
        if name not in self._tables.cookies:
            raise NoSuchBookie("no bookie of this name is registered", bookie=name)
        return self._tables.cookies[name].row

    def _put(self, request: Request, name: str) -> CookieRow:
        body = CookiePut.model_validate_json(request.body)
        tables, target = self._tables, f"cookie {name}"
        stored = tables.cookies.get(name)
        old = None if stored is None else stored.row
        if old is not None and self._metadata.is_settled(body.attempt, target):
            return old
        if (None if old is None else old.version) != body.version:
            current = None if old is None else old.model_dump(mode="json")
            raise VersionConflict(f"another cookie of {name}", bookie=name, current=current)
        before: Cookie | None = None if old is None else old.cookie
        check_cookie(name, before, body.cookie, self._metadata.memory.cluster_id)
        born_at = "" if stored is None else stored.born_at
        if before is None or body.cookie.instance != before.instance:
            changes.check_new_incarnation(name, body.cookie.incarnation, self._named(name))
            born_at = self._metadata.utc
        row = CookieRow(name=name, version=(body.version or 0) + 1, cookie=body.cookie)
        tables.cookies[name] = Registration(row, born_at)
        tables.record(body.attempt, target)
        self._metadata.net.note("registered", f"{name}@{body.cookie.incarnation}", row.version)
        return row

    def _named(self, name: str) -> int:
        """The highest incarnation of a bookie that ledgers or repairs name."""
        members = {member for _, member in self._tables.repairs}
        for row in self._tables.rows.values():
            members.update(() if row is None else row.all_members)
        found = [member_incarnation(m) for m in members if member_name(m) == name]
        return max(found, default=-1)

    def _state(self) -> RebuildState:
        tables = self._tables
        is_empty = not (tables.rows or tables.cookies)
        return RebuildState(is_empty=is_empty, was_rebuilt=tables.is_rebuilt)
