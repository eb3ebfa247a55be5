"""`python -m loadtest.bench_tokens`: what the check of a token costs a request at the gateway's edge, in microseconds.

The check itself is timed, in this process, without sockets: a request takes some hundred microseconds more, which
differ from run to run by more than the check.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final, cast

from aiohttp.test_utils import make_mocked_request

from quorumlog.net.gateway_clients import TokenClient
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata
from quorumlog.protocol.quorum import Quorum
from quorumlog.wire.token_bodies import TokenList, TokenRow
from services.gateway.edge import entries, log_records
from services.gateway.edge.access.callers import Callers
from services.gateway.edge.access.guard import Guard
from services.gateway.edge.tokens import AccessTokenCreate

_ROUNDS: Final = 20_000
_LOG: Final = log_records.APPEND.path
_LEDGER: Final = entries.APPEND.path
_TABLE: Final = {
    ("POST", _LOG): log_records.APPEND.scope,
    ("POST", _LEDGER): entries.APPEND.scope,
}


class _Listed:
    """Two thousand tokens, as the metadata service lists them."""

    def __init__(self, grants: Sequence[str]) -> None:
        self.secret, self.rows = "", []
        for _ in range(2000):
            self.secret, drawn = AccessTokenCreate(name="a", grants=list(grants)).drawn()
            self.rows.append(
                TokenRow(**drawn.model_dump(), created_at="2026-01-02T03:04:05Z", expires_at=None)
            )

    async def list(self, known: str | None = None) -> TokenList:
        """The list; the one question before the measurement gets it."""
        del known
        version = "00000000-0000-4000-8000-000000000000"
        return TokenList(version=version, tokens=tuple(self.rows), ticket_key=bytes(32))


class _Open(asyncio.Transport):
    """The connection of a client that stays."""

    def is_closing(self) -> bool:
        """Never."""
        return False


_ROW: Final = LedgerMetadata(
    ledger_id=7,
    quorum=Quorum(3, 3, 2),
    digest=DigestKind.CRC32C,
    fragments=(Fragment(0, ("b1@1", "b2@1", "b3@1")),),
    custom=(("namespace", "team-a"),),
)


async def _ledger(_ledger_id: int) -> LedgerMetadata:
    """A row as the gateway's cache has it."""
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
    started = time.perf_counter()
    for _ in range(_ROUNDS):
        await guard.admit(request, path)
        guard.leave(request, None)
    return (time.perf_counter() - started) / _ROUNDS * 1e6


async def main() -> None:
    """Print a line for each kind of grant."""
    for title, grants, path, info in (
        ("a grant on everything", ["append:*"], _LOG, {"name": "orders-1"}),
        ("a prefix of logs", ["append:logs/orders-*"], _LOG, {"name": "orders-1"}),
        (
            "the last of 32 prefixes",
            [*(f"append:logs/other-{n}-*" for n in range(31)), "append:logs/orders-*"],
            _LOG,
            {"name": "orders-1"},
        ),
        ("a namespace of ledgers", ["append:ledgers/team-*"], _LEDGER, {"ledger_id": "7"}),
    ):
        least = min([await _microseconds(grants, path, info) for _ in range(3)])
        print(f"{title}: {least:.1f} µs")


if __name__ == "__main__":
    asyncio.run(main())
