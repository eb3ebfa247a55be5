"""What an operator does about a database that went back, by the runbook (deploy/monitoring).

Waits until all bookies run, puts the right database back or rebuilds its rows from the bookies' copies by
the shipped decisions (protocol/rebuild.py), accepts what is missing then, and starts gateways and
autorecovery anew. What the rebuild can't decide stays as it is: the cluster goes on waiting.
"""

import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from quorumlog.protocol import rebuild
from quorumlog.protocol.rebuild import Action, Bookies, Decision, Held, Known, Registered, decide
from quorumlog.wire.bodies import STAND_IN, Change, Cookie, CookieRow
from services.bookie.cookie import LocalCookie
from services.metadata.attempts import ACCEPTED
from services.metadata.rebuild import Survey
from tests.model.sim.plan import SECOND
from tests.model.sim.services.metadata import CLUSTER_ID
from tests.model.sim.services.tables import Registration, highest_assigned

if TYPE_CHECKING:
    from tests.model.sim.services.cluster import Cluster

UNNOTICED: Final = 10 * SECOND
"""Nothing is told as missing for so long: the operator takes the database for the right one."""
_UNWRITTEN_IDS: Final = 1000
"""As in services/metadata/rebuild_store.py."""
_LEFT: Final = (Action.WAIT, Action.CONFLICT)


class Operator:
    """Looks once a second."""

    def __init__(self, cluster: "Cluster") -> None:
        self._cluster = cluster
        self._net = cluster.net
        self._judge = cluster.judge
        self._not_before = 0
        self._wants_right = False
        self.waiting: dict[int, str] = {}
        """Ledgers that the last rebuild could not decide, and why."""
        self.rebuilds = 0

    @property
    def missing(self) -> set[str]:
        """What the metadata processes tell."""
        database = self._cluster.database
        found = {token for process in database.processes for token in process.memory.missing}
        return found - database.tables.attempts.keys()

    @property
    def _refused(self) -> list[str]:
        """Bookies that have their disks, may start again, and are refused by a database without their cookies."""
        return [
            node.name
            for node in self._cluster.nodes.values()
            if node.directory.refusal and not (node.directory.is_emptied or node.is_dead_for_good)
        ]

    def went_back(self, *, not_before: int, wants_right: bool) -> None:
        """Somebody restored a database: when the operator looks, and whether the right one can be had."""
        self._not_before, self._wants_right = not_before, wants_right

    async def watch(self) -> None:
        """Look now and then."""
        while True:
            await self._net.pause(1.0)
            self.look()

    def look(self) -> None:
        """Do what can be done now."""
        database, restores, now = self._cluster.database, self._judge.restores, self._net.now
        if now < self._not_before or database.down_until > now:
            return
        if not (self.missing or self._refused):
            if restores.right is not None and now - restores.since > UNNOTICED:
                restores.settled(database.tables.attempts)
            return
        nodes = self._cluster.nodes.values()
        # One whose disk was lost may come when all is decided, as bookies do that are started after a rebuild.
        if any(
            not (node.is_alive or node.is_dead_for_good) and node.directory.cookie for node in nodes
        ):
            return
        if restores.right is not None and self._wants_right and self._put_back():
            return
        self._rebuild()
        if not self.waiting:
            self._accept()

    def _put_back(self) -> bool:
        """The right tables again, unless the older ones have taken changes meanwhile. Marks that they took are
        known to have been answered as well.
        """
        database, restores = self._cluster.database, self._judge.restores
        assert restores.right is not None
        strays = {
            token: target
            for token, target in database.tables.attempts.items()
            if token not in restores.right.attempts
        }
        if any(target not in ("mark", ACCEPTED) for target in strays.values()):
            self._wants_right = False
            return False
        database.put_back()
        database.tables.accept(strays)
        restores.settled(database.tables.attempts)
        return True

    def _rebuild(self) -> None:
        database, nodes = self._cluster.database, self._cluster.nodes
        tables = database.tables
        cookies = {
            name: node.directory.cookie
            for name, node in nodes.items()
            if node.is_alive and not node.directory.is_emptied and node.directory.cookie is not None
        }
        answering = {name: cookie.incarnation for name, cookie in cookies.items()}
        written = self._stand_in(answering)
        registered = {
            name: Registered(one.row.cookie.incarnation, one.born_at)
            for name, one in tables.cookies.items()
            if not one.is_retired
        }
        bookies = Bookies(answering, frozenset(nodes.keys() - answering), registered)
        contained = frozenset(t for t, target in tables.attempts.items() if target != ACCEPTED)
        ids = sorted({i for name in answering for i in (nodes[name].ledgers | nodes[name].deleted)})
        self.waiting.clear()
        done: dict[int, Decision] = {}
        for ledger_id in ids:
            found = (nodes[name].held(ledger_id) for name in answering)
            held = [one for one in found if one is not None]
            row = tables.rows.get(ledger_id)
            is_deleted = ledger_id in tables.rows and row is None
            known = Known(row, is_deleted, contained)
            decision = decide(known, held, bookies)
            if decision.action in _LEFT:
                self.waiting[ledger_id] = decision.why
            elif decision.action is not Action.SAME:
                self._write(ledger_id, decision, held)
                done[ledger_id] = decision
        tables.last_id = max(tables.last_id, highest_assigned(ids) + _UNWRITTEN_IDS)
        tables.is_rebuilt = True
        written |= self._put_cookies(cookies)
        if done or written:
            self.rebuilds += 1
            self._record(done)

    def _stand_in(self, answering: Mapping[str, int]) -> bool:
        """Write the cookies that the shipped rebuild writes before the first row (rule 15b)."""
        nodes, cookies = self._cluster.nodes, self._cluster.database.tables.cookies
        survey = Survey()
        for ledger_id in {
            i for name in answering for i in (nodes[name].ledgers | nodes[name].deleted)
        }:
            held = (nodes[name].held(ledger_id) for name in answering)
            rows = [row for one in held if one is not None for row in one.rows]
            survey.note(rows)
        present = dict(answering)
        for name, one in cookies.items():
            if not one.is_retired:
                present[name] = max(one.row.cookie.incarnation, present.get(name, 0))
        added = rebuild.stand_ins(survey.incarnations, present)
        for name, incarnation in sorted(added.items()):
            is_retired = name not in survey.named
            cookie = Cookie(
                incarnation=incarnation,
                cluster_id=CLUSTER_ID,
                instance=STAND_IN,
                may_fix=is_retired,
            )
            if name not in cookies or cookies[name].row.cookie.incarnation < incarnation:
                self._net.note("operator", "stands in for", f"{name}@{incarnation}")
                self._put(cookie, name, is_retired=is_retired)
        return bool(added)

    def _put_cookies(self, found: Mapping[str, LocalCookie]) -> bool:
        """Last, the cookies of those that answered, where they are missing or older."""
        cookies, written = self._cluster.database.tables.cookies, False
        for name, local in sorted(found.items()):
            present = cookies.get(name)
            before = (-1, -1)
            if present is not None:
                before = present.row.cookie.incarnation, present.row.cookie.boots
            if before < (local.incarnation, local.boots):
                url = self._cluster.nodes[name].directory.url
                self._put(local.cookie.model_copy(update={"url": url}), name)
                written = True
        return written

    def _put(self, cookie: Cookie, name: str, *, is_retired: bool = False) -> None:
        cookies = self._cluster.database.tables.cookies
        before = cookies.get(name)
        version = 1 if before is None else before.row.version + 1
        is_same = before is not None and before.row.cookie.instance == cookie.instance
        born_at = before.born_at if before is not None and is_same else ""
        row = CookieRow(name=name, version=version, cookie=cookie)
        cookies[name] = Registration(row, born_at, is_retired)

    def _write(self, ledger_id: int, decision: Decision, held: list[Held]) -> None:
        tables = self._cluster.database.tables
        row = decision.row
        tables.rows[ledger_id] = row
        tables.versions[ledger_id] = (
            tables.versions.get(ledger_id, 0) + 1 if row is None else row.version
        )
        if row is None:
            for key in [key for key in tables.repairs if key[0] == ledger_id]:
                del tables.repairs[key]
        for copy in (copy for one in held for copy in one.rows):
            made = f"create ledger {ledger_id}" if copy.version == 1 else f"ledger {ledger_id}"
            made = f"delete ledger {ledger_id}" if copy.deletion else made
            if copy.attempt and tables.attempts.get(copy.attempt, ACCEPTED) == ACCEPTED:
                tables.record(copy.attempt, made)
        self._judge.rebuilt(ledger_id, row)

    def _record(self, done: Mapping[int, Decision]) -> None:
        """The rebuild is a change, and the rows are announced."""
        database = self._cluster.database
        self._net.note("operator", "rebuilds", *sorted(done))
        token = str(uuid.UUID(int=self._net.rng.getrandbits(128)))
        database.tables.record(token, "rebuild")
        process = database.processes[0]
        process.heard.add(token)
        process.memory.note_committed(token, ())
        database.committed()
        for ledger_id, decision in done.items():
            row = decision.row
            process.notify(
                Change(
                    kind="change",
                    ledger_id=ledger_id,
                    version=database.tables.versions[ledger_id],
                    state=None if row is None else row.state,
                    deleted=row is None,
                )
            )

    def _accept(self) -> None:
        """What bookies know is asked again, and each that comes back must answer: all do."""
        database, nodes = self._cluster.database, self._cluster.nodes
        tokens = self.missing
        self._net.note("operator", "accepts", len(tokens))
        database.tables.accept(tokens)
        held = (i for node in nodes.values() for i in (node.ledgers | node.deleted))
        database.tables.last_id = max(database.tables.last_id, highest_assigned(held))
        self._start_anew()
        for process in database.processes:
            process.heard.clear()  # a witness stands for all that came before it
        self._judge.settle(database.tables.cores())
        self._judge.restores.settled(database.tables.attempts)

    def _start_anew(self) -> None:
        """Gateways and autorecovery from before may hold rows of the lost history: the last step of the runbook."""
        for index in range(len(self._cluster.gateways)):
            self._cluster.kill_gateway(index)
        for index in range(len(self._cluster.healers)):
            self._cluster.kill_healer(index)
