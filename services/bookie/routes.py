"""The bookie's routes: parameters, bodies and answers of each handler."""

from typing import Any, Final

from quorumlog.net.operations import Handler, Route, route
from quorumlog.net.parameters import Parameter
from quorumlog.wire.bodies import Body, BookieStatePut, BookieWitnesses
from quorumlog.wire.digest_bodies import DigestsAsked, DigestsBody
from quorumlog.wire.rebuild_bodies import RowsPage
from services.bookie import handlers
from services.bookie.bodies import (
    DamageBody,
    EntriesBody,
    HeldBody,
    HeldList,
    InfoBody,
    MaintenancePut,
    ProcessBody,
    VerdictBody,
)
from services.bookie.handlers import AFTER, FROM, KEY, KIND, LEDGER_ID, LIMIT, MEMBER, TO

_LEDGER: Final = "/v1/ledgers/{ledger_id}"


def _asking(
    method: str, path: str, handler: Handler, gives: type[Body], *given: Parameter[Any]
) -> Route:
    """A route of the protocol. Refusals and unknown answers are verdicts too, each with its own status."""
    return route(method, path, handler, LEDGER_ID, *given, MEMBER, gives=gives, refuses_with=gives)


ROUTES: Final = (
    route("GET", "/v1/channel", handlers.open_channel, status=101),
    route("GET", "/v1/info", handlers.info, gives=InfoBody),
    route("GET", "/v1/process", handlers.process, gives=ProcessBody),
    route("GET", "/v1/witnesses", handlers.witnesses, gives=BookieWitnesses),
    route("PUT", "/v1/state", handlers.put_state, takes=BookieStatePut, gives=InfoBody),
    route("PUT", "/v1/maintenance", handlers.put_maintenance, takes=MaintenancePut, gives=InfoBody),
    route("GET", "/v1/damage", handlers.damage, gives=DamageBody),
    route("GET", "/v1/ledgers", handlers.list_ledgers, AFTER, LIMIT, gives=HeldList),
    route("GET", "/v1/rows", handlers.list_rows, AFTER, LIMIT, gives=RowsPage),
    route("GET", _LEDGER, handlers.get_ledger, LEDGER_ID, gives=HeldBody),
    _asking("POST", f"{_LEDGER}/entries", handlers.add_entries, VerdictBody, KIND, KEY),
    _asking("GET", f"{_LEDGER}/entries", handlers.read_entries, EntriesBody, FROM, TO),
    _asking("POST", f"{_LEDGER}/fence", handlers.fence, VerdictBody, KEY),
    _asking("GET", f"{_LEDGER}/last-add-confirmed", handlers.last_add_confirmed, VerdictBody),
    route(
        "POST",
        f"{_LEDGER}/digests",
        handlers.digest_ranges,
        LEDGER_ID,
        takes=DigestsAsked,
        gives=DigestsBody,
    ),
)
