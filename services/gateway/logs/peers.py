"""Requests to the gateway that owns a log: one hop (rule 11)."""

from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

import orjson

from quorumlog.errors import UNKNOWN, QuorumLogError, WriterLost
from quorumlog.protocol.heads import LogHead
from quorumlog.protocol.log import Expiry
from quorumlog.protocol.log.messages import Append, Consult, OwnerLost, Publish, RecordsAppended
from quorumlog.protocol.metadata import Writer
from quorumlog.protocol.transaction import Transaction
from quorumlog.protocol.values import LedgerId, LogName, Number
from quorumlog.wire.bodies import Body, json_of, received
from services.gateway.engine.peers import Peers
from services.gateway.logs.accesses import Verdict

_APPEND_S: Final = 60.0
"""The sender asks meanwhile whether the owner lives; this timeout only ends abandoned requests."""
_ALIVE_S: Final = 2.0
_ACCESS_S: Final = 5.0
"""The keeper answers from memory, unless it deletes the log first."""
_ENDS_S: Final = 2.0
"""How long a list of logs waits for a gateway; then the bookies are asked about that gateway's logs."""


class EndsBody(Body):
    """The logs whose ends are asked for: name, last ledger, writer token."""

    logs: tuple[tuple[LogName, LedgerId, Number], ...]


class LogPeers:
    """The other gateways, for logs. Methods raise what the owner raised; a WriterLost with outcome
    `not-done` says that the asked process is not the owner.
    """

    def __init__(self, peers: Peers) -> None:
        """Sends requests through `peers`."""
        self._peers = peers

    async def append(self, owner: Writer, name: str, call: Append) -> RecordsAppended | OwnerLost:
        """Let the owner append."""
        query = {
            "expect": call.expect,
            "token": call.token,
            "since": call.since or None,
            "created": call.created_at,
        }
        told = await self._ask_owner(owner, name, "append", call.data, query)
        if isinstance(told, OwnerLost):
            return told
        return RecordsAppended(
            int(told["first_offset"]),
            int(told["last_offset"]),
            int(told["ledger_id"]),
            int(told["entry_id"]),
            is_duplicate=told["is_duplicate"] is True,
            highest_seq=told.get("highest_seq"),
        )

    async def roll(self, owner: Writer, name: str) -> OwnerLost | None:
        """Let the owner roll."""
        told = await self._ask_owner(owner, name, "roll", b"")
        return told if isinstance(told, OwnerLost) else None

    async def publish(self, owner: Writer, name: str, call: Publish) -> Transaction | OwnerLost:
        """Let the owner publish a transaction."""
        told = await self._ask_owner(owner, name, "publish", json_of(call))
        if isinstance(told, OwnerLost):
            return told
        return received(Transaction, orjson.dumps(told))

    async def consult(self, owner: Writer, name: str, call: Consult) -> bytes | OwnerLost:
        """Ask the owner of the log of positions."""
        told = await self._ask_owner(owner, name, "consult", call.data)
        return told if isinstance(told, OwnerLost) else orjson.dumps(told)

    async def access(self, keeper: Writer, name: str, expiry: Expiry, is_access: bool) -> Verdict:
        """Tell the keeper of a log of an access, or only ask whether the log lives. Raises: WriterLost, TimeoutError."""
        query = f"term={quote(expiry.term, safe='')}&idle_s={expiry.idle_s}&counts={int(is_access)}"
        path = f"/logs/{quote(name, safe='')}/access?{query}"
        told = await self._peers.ask(keeper, "POST", path, _ACCESS_S, data=b"")
        return Verdict(told["verdict"])

    async def ends(self, owner: Writer, heads: Sequence[LogHead]) -> Mapping[str, int]:
        """The ends of those of these logs that a gateway owns; none if it does not answer."""
        asked = [(head.name, head.last_ledger, head.writer_token) for head in heads]
        data = orjson.dumps({"logs": asked})
        try:
            told = await self._peers.ask(owner, "POST", "/log-ends", _ENDS_S, data=data)
        except (QuorumLogError, TimeoutError):
            return {}
        return {str(name): int(end) for name, end in told["ends"].items()}

    async def is_alive(self, owner: Writer) -> bool:
        """Whether that very process answers at its URL (rule 11)."""
        try:
            await self._peers.ask(owner, "GET", "/instance", _ALIVE_S)
        except (WriterLost, TimeoutError):
            return False
        return True

    async def _ask_owner(
        self,
        owner: Writer,
        name: str,
        verb: str,
        data: bytes,
        query: Mapping[str, int | str | None] | None = None,
    ) -> dict[str, Any] | OwnerLost:
        options = "&".join(f"{key}={n}" for key, n in (query or {}).items() if n is not None)
        path = f"/logs/{quote(name, safe='')}/{verb}?{options}".rstrip("?")
        try:
            return await self._peers.ask(owner, "POST", path, _APPEND_S, data=data)
        except WriterLost as error:
            if error.log is not None:
                raise
            return OwnerLost(error.detail, sent=error.outcome == UNKNOWN)
        except TimeoutError:
            return OwnerLost("it did not answer", sent=True)
