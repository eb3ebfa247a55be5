"""The cost of checking a token at the gateway's edge, in microseconds per request.

The benchmark times only the check, in this process and without sockets. A whole request takes some
hundred microseconds more, which vary between runs by more than the check takes. The best of three
tries is reported.
"""

import argparse
import asyncio
from collections.abc import Sequence
from time import perf_counter as clock
from typing import Any, Final, cast

from aiohttp.test_utils import make_mocked_request

from loadtest.bench.measure import Figures
from loadtest.bench.plan import Columns, Plan, Work, itself
from loadtest.program import Teller
from quorumlog.net.gateway_clients import TokenClient
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata
from quorumlog.protocol.quorum import Quorum
from quorumlog.wire.token_bodies import TokenList, TokenRow
from services.gateway.edge.access.callers import Callers
from services.gateway.edge.access.guard import Guard
from services.gateway.edge.entries import EntryRoutes
from services.gateway.edge.log_records import RecordRoutes
from services.gateway.edge.tokens import AccessTokenCreate

_REQUESTS: Final = 20_000
_TRIES: Final = 3
_APPENDS: Final = (
    RecordRoutes.operations["append_records"],
    EntryRoutes.operations["append_entries"],
)
_LOG, _LEDGER = (one.path for one in _APPENDS)
_TABLE: Final = {("POST", one.path): one.scope for one in _APPENDS}


class _Listed:
    """A client of the metadata service that lists two thousand tokens."""

    def __init__(self, grants: Sequence[str]) -> None:
        self.secret, self.rows = "", []
        for _ in range(2000):
            self.secret, drawn = AccessTokenCreate(name="a", grants=list(grants)).drawn()
            self.rows.append(
                TokenRow(**drawn.model_dump(), created_at="2026-01-02T03:04:05Z", expires_at=None)
            )

    async def list(self, known: str | None = None) -> TokenList:
        """The list of tokens, which is requested once, before the measurement."""
        del known
        version = "00000000-0000-4000-8000-000000000000"
        return TokenList(version=version, tokens=tuple(self.rows), ticket_key=bytes(32))


class _Open(asyncio.Transport):
    """The connection of a client that never disconnects."""

    def is_closing(self) -> bool:
        """Always False."""
        return False


_ROW: Final = LedgerMetadata(
    ledger_id=7,
    quorum=Quorum(3, 3, 2),
    digest=DigestKind.CRC32C,
    fragments=(Fragment(0, ("b1@1", "b2@1", "b3@1")),),
    custom=(("namespace", "team-a"),),
)


async def _ledger(_ledger_id: int) -> LedgerMetadata:
    """The metadata of a ledger, as from the gateway's cache."""
    return _ROW


async def _microseconds(grants: Sequence[str], path: str, info: dict[str, str]) -> float:
    listed = _Listed(grants)
    callers = Callers(cast("TokenClient", listed))
    guard = Guard(
        _TABLE, callers, ledger=_ledger, transactions=None, stream_log=str, body_bytes_max=1
    )
    headers = {"Authorization": f"Bearer {listed.secret}"}
    match: Any = type("MatchInfo", (dict,), {"add_app": lambda *_: None})(info)
    request = make_mocked_request("POST", path, headers, match_info=match, transport=_Open())
    await guard.admit(request, path)
    started = clock()
    for _ in range(_REQUESTS):
        await guard.admit(request, path)
        guard.leave(request, None)
    return (clock() - started) / _REQUESTS * 1e6


async def _best(_: object, grants: Sequence[str], path: str, info: dict[str, str]) -> Figures:
    return {"us": min([await _microseconds(grants, path, info) for _ in range(_TRIES)])}


_ORDERS: Final = (_LOG, {"name": "orders-1"})
_WORKS: Final = (
    ("a grant on everything", ["append:*"], *_ORDERS),
    ("a prefix of logs", ["append:logs/orders-*"], *_ORDERS),
    (
        "the last of 32 prefixes",
        [*(f"append:logs/other-{n}-*" for n in range(31)), "append:logs/orders-*"],
        *_ORDERS,
    ),
    ("a namespace of ledgers", ["append:ledgers/team-*"], _LEDGER, {"ledger_id": "7"}),
)
OPTIONS: Final = {"rounds": (1, "rounds, whose medians are reported")}


def plan(asked: argparse.Namespace, _teller: Teller) -> Plan:
    """Plan a measurement for each kind of grant."""
    return Plan(
        [Work("guard", what, _best, tuple(given)) for what, *given in _WORKS],
        {"guard": itself},
        (Columns("the check of a token", ("us",)),),
        rounds=asked.rounds,
        loop=asyncio.new_event_loop,
    )
