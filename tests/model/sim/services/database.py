"""The simulated metadata service's Postgres, as the shipped code of a start asks it, and its earlier states."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from quorumlog.wire.bodies import CookieRow
from services.metadata.database import SERVER
from tests.model.sim.services.net import Net
from tests.model.sim.services.restores import Restores
from tests.model.sim.services.tables import Tables

if TYPE_CHECKING:
    from services.metadata.memory import Memory, Presented
    from tests.model.sim.services.metadata import Metadata

T = TypeVar("T")

_PAST_MAX: Final = 64
"""Earlier states that are kept: of the older ones every other goes."""


class Database:
    """The primary: all metadata processes use it. Which server that is may change."""

    def __init__(self, net: Net, restores: Restores) -> None:
        self.tables = Tables()
        self.server = 1
        """Of Postgres: one that takes over is another one."""
        self.down_until = 0
        self.processes: list[Metadata] = []
        self.restores = restores
        self._net = net
        self._past = [Tables()]
        """After each change, ascending; the first state is the empty database."""

    def committed(self) -> None:
        """A change was made."""
        if not self._net.plan.has_restores:
            return
        if self.restores.lost:
            # A sender may repeat a lost change once the loss is accepted: then the database contains it.
            self.restores.lost -= self.tables.attempts.keys()
        self._past.append(self.tables.copy())
        if len(self._past) > _PAST_MAX:
            half = _PAST_MAX // 2
            self._past[1:half] = self._past[2:half:2]

    def go_back(self, which: int, *, is_new_server: bool) -> bool:
        """Any earlier state takes the place of this one: every other time one of the last few. False where
        none would lose a change, or an operator has still to decide about an earlier loss.
        """
        old = self._past[:-1]
        if not old or self.restores.right is not None:
            return False
        nth = len(old) - 1 - which // 2 % 6 if which % 2 else which * len(old) // 60
        nth = max(nth, 0)
        right, self.tables = self.tables, old[nth].copy()
        del self._past[nth + 1 :]
        self.restores.went_back(right, self.tables, self._net.now)
        self._net.note("database", "back by", len(right.attempts) - len(self.tables.attempts))
        self._replaced(is_new_server=is_new_server)
        return True

    def put_back(self) -> None:
        """The right tables again."""
        assert self.restores.right is not None
        self.tables = self.restores.right
        self._past.append(self.tables.copy())
        self._net.note("database", "right again")
        self._replaced(is_new_server=True)

    def _replaced(self, *, is_new_server: bool) -> None:
        self.server += is_new_server
        for process in self.processes:
            process.stream.end()


class AskingDatabase:
    """What `services.metadata.inquiry` uses of its process's database."""

    def __init__(self, metadata: "Metadata") -> None:
        self._metadata = metadata
        self.asked_about: str | None = None

    @property
    def memory(self) -> "Memory":
        return self._metadata.memory

    @property
    def has_asked(self) -> bool:
        return self.asked_about == str(self._metadata.database.server)

    async def run(self, work: Callable[[Any], Awaitable[T]]) -> T:
        """On a connection: this one."""
        self._metadata.check_database()
        return await work(self)

    async def learn(self, presented: "Presented") -> None:
        self._metadata.check_database()
        self._metadata.compare(presented)

    async def fetchval(self, statement: str) -> str:
        assert statement == SERVER
        return str(self._metadata.database.server)

    async def execute(self, _skip_ids: str, highest: int) -> None:
        tables = self._metadata.database.tables
        tables.last_id = max(tables.last_id, highest)


class Registered:
    """The bookies that are registered, and whose heartbeats came: what the inquiry asks cookies and liveness for."""

    def __init__(self, database: Database, urls: Callable[[], dict[str, str]]) -> None:
        self._database, self._urls = database, urls

    async def list(self) -> list[CookieRow]:
        cookies = self._database.tables.cookies
        return [one.row for _, one in sorted(cookies.items()) if not one.is_retired]

    async def bookie_urls(self) -> dict[str, str]:
        return self._urls()
