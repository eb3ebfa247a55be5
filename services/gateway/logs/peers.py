"""Sends requests to the gateway that owns a log. A request is forwarded only once (rule 11)."""

from collections.abc import Mapping, Sequence
from typing import Final
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
"""This timeout only ends abandoned requests. The sender also checks that the owner is alive."""
_ALIVE_S: Final = 2.0
_ACCESS_S: Final = 5.0
"""Timeout of a request to an expiry keeper, which may delete the log before it answers."""
_ENDS_S: Final = 2.0
"""Time for which a listing of logs waits for a gateway, before bookies report the ends instead."""


class EndsBody(Body):
    """Logs whose ends are requested, each as (name, last ledger, writer token)."""

    logs: tuple[tuple[LogName, LedgerId, Number], ...]


class LogPeers:
    """Sends requests for logs to other gateways. All methods raise the owner's errors. A WriterLost
    with outcome `not-done` means that the receiver is not the owner.
    """

    def __init__(self, peers: Peers) -> None:
        """Sends the requests through `peers`."""
        self._peers = peers

    async def forward(
        self, owner: Writer, name: str, call: Append | Publish | Consult | None
    ) -> RecordsAppended | Transaction | bytes | OwnerLost | None:
        """Forward a client's request to the log's owner. A `call` of None rolls the log."""
        options: dict[str, int | str | None] = {"call": "roll"}
        data = b""
        match call:
            case Append(data=data):
                options = {
                    "call": "append",
                    "expect": call.expect,
                    "token": call.token,
                    "since": call.since or None,
                    "created": call.created_at,
                }
            case Publish():
                options, data = {"call": "publish"}, json_of(call)
            case Consult(data):
                options = {"call": "consult"}
            case None:
                pass
        query = "&".join(f"{key}={value}" for key, value in options.items() if value is not None)
        path = f"/logs/{quote(name, safe='')}/forwarded?{query}"
        try:
            reported = await self._peers.send(owner, "POST", path, _APPEND_S, data)
        except WriterLost as error:
            if error.log is not None:
                raise
            return OwnerLost(error.detail, sent=error.outcome == UNKNOWN)
        except TimeoutError:
            return OwnerLost("the log's owner did not answer in time", sent=True)
        if isinstance(call, Append):
            return received(RecordsAppended, reported)
        if isinstance(call, Publish):
            return received(Transaction, reported)
        return None if call is None else reported

    async def access(self, keeper: Writer, name: str, expiry: Expiry, is_access: bool) -> Verdict:
        """Request the verdict of a log's expiry keeper. With `is_access`, also report an access.
        Raises: WriterLost, TimeoutError.
        """
        query = f"term={quote(expiry.term, safe='')}&idle_s={expiry.idle_s}&counts={int(is_access)}"
        path = f"/logs/{quote(name, safe='')}/access?{query}"
        reported = await self._peers.ask(keeper, "POST", path, _ACCESS_S, data=b"")
        return Verdict(reported["verdict"])

    async def ends(self, owner: Writer, heads: Sequence[LogHead]) -> Mapping[str, int]:
        """Return the ends of the logs in `heads` that `owner` owns; empty if it doesn't answer."""
        asked = [(head.name, head.last_ledger, head.writer_token) for head in heads]
        data = orjson.dumps({"logs": asked})
        try:
            reported = await self._peers.ask(owner, "POST", "/log-ends", _ENDS_S, data=data)
        except (QuorumLogError, TimeoutError):
            return {}
        return {str(name): int(end) for name, end in reported["ends"].items()}

    async def is_alive(self, owner: Writer) -> bool:
        """Whether the process `owner` itself, and not a successor, answers at its URL (rule 11)."""
        try:
            await self._peers.ask(owner, "GET", "/instance", _ALIVE_S)
        except (WriterLost, TimeoutError):
            return False
        return True
