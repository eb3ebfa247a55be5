"""The simulated metadata service keeps the contract of the real one: the tests of tests/unit/metadata, which
run on Postgres and Redis, run here on its dictionaries.

Left out is what it has not: logs, transactions and the limits of HTTP. It answers 404 there.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any, Final, cast

import pytest

from quorumlog.net.metadata_client import MetadataClient, RepairClient
from quorumlog.protocol.ids import member_incarnation, member_name
from quorumlog.wire.bodies import BookieList
from tests.model.sim.services.cookies import Cookies
from tests.model.sim.services.database import Database
from tests.model.sim.services.metadata import Metadata, url_of
from tests.model.sim.services.net import Net, Process, Session
from tests.model.sim.services.plan import draw
from tests.model.sim.services.restores import Restores
from tests.support.virtual import VirtualLoop, run_virtual
from tests.unit.metadata import (
    test_changes,
    test_ledgers,
    test_listing,
    test_members,
    test_repairs,
    test_went_back,
)
from tests.unit.metadata.support import PATIENT_S, Service

Claim = Callable[..., Awaitable[None]]

OF_HTTP: Final = (
    test_ledgers.test_a_bad_body_is_a_4xx,
    test_ledgers.test_a_bad_address_is_a_4xx,
    test_ledgers.test_heads_are_asked_for_in_limits,
    test_ledgers.test_a_version_in_the_header_must_be_the_rows,
    test_repairs.test_a_range_beyond_the_ids_is_refused,
    test_changes.test_a_client_that_loses_its_service_gets_a_gap,
    test_changes.test_an_answer_of_another_service_is_no_verdict,
    test_changes.test_a_row_of_another_ledger_is_no_answer,
)
"""How requests are parsed and sockets break. That is not simulated: clients are the shipped ones."""
OF_LOGS: Final = (test_changes.test_every_change_of_a_log_is_announced,)
"""The simulated service has no logs."""

CALM: Final = replace(draw(1), loss=0.0, straggler=0.0, answer_loss=0.0, delay=(200, 2000))


def claims_of(module: ModuleType) -> list[Claim]:
    """The tests that need nothing but a service and its clients, each with each of its arguments."""
    found: list[Claim] = []
    for name, test in inspect.getmembers(module, inspect.iscoroutinefunction):
        if not name.startswith("test_") or test in (*OF_HTTP, *OF_LOGS):
            continue
        marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
        given = [partial(test, **given_by(m.args[0], value)) for m in marks for value in m.args[1]]
        found += [
            claim
            for claim in given or [test]
            if set() < free_of(claim) <= {"service", "worker", "other"}
        ]
    return found


def given_by(names: str | tuple[str, ...], value: Any) -> dict[str, Any]:
    """What a test is given by one value of a parameter, or of several."""
    return {names: value} if isinstance(names, str) else dict(zip(names, value, strict=True))


def free_of(claim: Claim) -> set[str]:
    """What a claim is yet to be given."""
    parameters = inspect.signature(claim).parameters.values()
    return {each.name for each in parameters if each.default is each.empty}


def name_of(claim: Claim) -> str:
    """The test, and what it is given."""
    if isinstance(claim, partial):
        return "-".join((claim.func.__name__, *map(str, claim.keywords.values())))
    return str(cast("Any", claim).__name__)


OF_MEMBERS: Final = claims_of(test_members)
"""Their bookies are registered, as that module's own service has them."""

CLAIMS: Final = [
    claim
    for module in (test_ledgers, test_listing, test_repairs, test_changes, test_went_back)
    for claim in claims_of(module)
]


class _Imagined(Cookies):
    """Names that no bookie ever registered count as registered: `tests.unit.metadata.support.imagine_bookies`."""

    def registered(self, members: Collection[str]) -> dict[str, int]:
        found = {member_name(member): member_incarnation(member) for member in members}
        return found | super().registered(members)


def simulated(loop: VirtualLoop, *, are_imagined: bool) -> Service:
    """A service of the simulation, with a network that loses nothing."""
    net = Net(loop, CALM, is_reported=False)
    database = Database(net, Restores())
    no_bookies = BookieList(bookies=())
    metadata = Metadata(1, database, net, lambda: no_bookies, lambda *_rows, **_when: None)
    if are_imagined:
        metadata.cookies = _Imagined(metadata)
    session = cast("Any", Session(Process("client", net)))
    client = MetadataClient([url_of(1)], session, deadline_s=PATIENT_S, try_s=PATIENT_S)
    return Service(url_of(1), client, session)


@pytest.mark.parametrize("claim", [*CLAIMS, *OF_MEMBERS], ids=name_of)
def test_the_simulated_service_keeps_the_contract(claim: Claim) -> None:
    async def main() -> None:
        is_of_members = claim in OF_MEMBERS
        loop = cast("VirtualLoop", asyncio.get_running_loop())
        service = simulated(loop, are_imagined=not is_of_members)
        if is_of_members:
            await test_members.register_all(service)
        given = {
            "service": service,
            "worker": RepairClient(service.client, "worker-1"),
            "other": RepairClient(service.client, "worker-2"),
        }
        await claim(**{name: given[name] for name in free_of(claim)})

    run_virtual(main, seed=1)
