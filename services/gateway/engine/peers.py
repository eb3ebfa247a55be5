"""Requests to the gateway that is a ledger's writer: one hop, to that very process (rule 11).

A request has the writer's instance id, which the receiver checks. If nothing was sent (a refused
connection), the writer is lost and nothing was done; if anything may have been sent, the outcome is
unknown.
"""

import asyncio
import struct
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote

import aiohttp
import orjson

from quorumlog import header
from quorumlog.errors import (
    NOT_DONE,
    UNKNOWN,
    Forbidden,
    ForeignHost,
    QuorumLogError,
    QuorumTimeout,
    RouteNotFound,
    Unauthenticated,
    WriterLost,
)
from quorumlog.net.awake import awake_timeout
from quorumlog.net.identity import Role
from quorumlog.net.sessions import ExpectedServer
from quorumlog.protocol.metadata import Writer
from quorumlog.wire.outgoing import outgoing
from quorumlog.wire.problems import from_answer
from services.gateway.interface import EntriesAppended

INSTANCE: Final = header.FORWARDED_WRITER
"""The header with the instance id of the intended writer."""
PASSWORD: Final = header.LEDGER_PASSWORD

_QUORUM_S: Final = 10.0
_APPEND_BEYOND_S: Final = 5.0
"""Added to the quorum timeout, so that the writer answers first."""
_CLOSE_S: Final = 30.0
_LAC_S: Final = 5.0
"""Long, so that a busy writer does not look gone: the LAC that bookies know is older (rule 5)."""
_HUNG_S: Final = 2.0
"""How long readers skip a writer that did not answer in time (taste)."""
_CONNECT_S: Final = 2.0
_GONE_MAX: Final = 10_000
"""Replaced instances that are remembered. A forgotten one is asked again, which costs a request."""
_U32: Final = struct.Struct(">I")
_WRITER: Final = ExpectedServer(Role.GATEWAY)


def encode_payloads(payloads: Sequence[bytes]) -> bytes:
    """Payloads as the frames of a public append: (u32 length, payload), repeated."""
    return b"".join([part for p in payloads for part in (_U32.pack(len(p)), p)])


class Peers:
    """The other gateways of the cluster."""

    def __init__(self, session: aiohttp.ClientSession, quorum_s: float = _QUORUM_S) -> None:
        """`session` is shared and not closed here. `quorum_s`: the writers' quorum timeout."""
        self._session = session
        self._append_s = quorum_s + _APPEND_BEYOND_S
        self._gone: OrderedDict[str, None] = OrderedDict()
        """Instances that another one has replaced: they never come back."""
        self._hung_until: dict[str, float] = {}
        """Writers that timed out: until then readers ask the bookies at once."""

    async def append(
        self,
        writer: Writer,
        ledger_id: int,
        payloads: Sequence[bytes],
        *,
        password: str | None,
        expect: int | None,
    ) -> EntriesAppended:
        """Append through the writer. Raises what the writer raised, WriterLost, QuorumTimeout."""
        data = encode_payloads(payloads)
        return await self._append(writer, ledger_id, "append", data, expect, password)

    async def append_batch(
        self, writer: Writer, ledger_id: int, data: bytes, *, expect: int | None
    ) -> EntriesAppended:
        """Append a record batch through the writer, like payloads in `append`."""
        return await self._append(writer, ledger_id, "records", data, expect)

    async def _append(
        self,
        writer: Writer,
        ledger_id: int,
        verb: str,
        data: bytes,
        expect: int | None,
        password: str | None = None,
    ) -> EntriesAppended:
        query = "" if expect is None else f"?expect={expect}"
        path = f"/internal/ledgers/{ledger_id}/{verb}{query}"
        try:
            reply = await self.ask(
                writer, "POST", path, self._append_s, data=data, password=password
            )
        except TimeoutError as error:
            raise QuorumTimeout("the writer did not answer", ledger_id=ledger_id) from error
        return EntriesAppended(
            int(reply["first"]), int(reply["last"]), int(reply["last_add_confirmed"])
        )

    async def last_add_confirmed(
        self, writer: Writer, ledger_id: int, *, after: int | None = None, wait_s: float = 0.0
    ) -> tuple[int, bool, int]:
        """LAC, whether the ledger is closed, and the row's version, as the writer knows them.

        Raises: WriterLost, also if the writer times out.
        """
        query = "" if after is None else f"?after={after}&wait_ms={int(wait_s * 1000)}"
        now = asyncio.get_running_loop().time()
        if now < self._hung_until.get(writer.id, now):
            raise WriterLost("the writer did not answer just now", ledger_id=ledger_id)
        self._hung_until.pop(writer.id, None)
        try:
            reply = await self.ask(
                writer, "GET", f"/internal/ledgers/{ledger_id}/lac{query}", _LAC_S + wait_s
            )
        except TimeoutError as error:
            now = asyncio.get_running_loop().time()
            # A process that is gone for ever is asked for no more, and would stay here.
            self._hung_until = {who: end for who, end in self._hung_until.items() if end > now}
            self._hung_until[writer.id] = now + _HUNG_S
            raise WriterLost("the writer did not answer", ledger_id=ledger_id) from error
        return int(reply["last_add_confirmed"]), reply["closed"] is True, int(reply["version"])

    async def close(self, writer: Writer, ledger_id: int, *, password: str | None) -> None:
        """The writer's close. Raises what the writer raised, WriterLost."""
        try:
            await self.ask(
                writer, "POST", f"/internal/ledgers/{ledger_id}/close", _CLOSE_S, password=password
            )
        except TimeoutError as error:
            raise WriterLost("the writer did not answer", ledger_id=ledger_id) from error

    async def ask(
        self,
        writer: Writer,
        method: str,
        path: str,
        timeout_s: float,
        *,
        data: bytes | None = None,
        password: str | None = None,
    ) -> dict[str, Any]:
        """One request to that very process: its answer.

        Raises: what the writer raised, WriterLost if it cannot be reached, TimeoutError.
        """
        if writer.id in self._gone:
            raise WriterLost("its process was replaced", outcome=NOT_DONE)
        headers = {INSTANCE: writer.id}
        if data is not None:
            headers["Content-Type"] = "application/octet-stream"
        if password is not None:
            headers[PASSWORD] = quote(password, safe="")
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        try:
            # In time awake: this process's own standstill says nothing of the writer.
            async with (
                awake_timeout(timeout_s),
                self._session.request(
                    method,
                    writer.url_inside + path,
                    data=outgoing(data),
                    headers=headers,
                    timeout=timeout,
                    ssl=_WRITER,
                ) as answer,
            ):
                body = await answer.read()
                status, instance = answer.status, answer.headers.get(INSTANCE)
        except aiohttp.ClientConnectorError as error:
            raise WriterLost(
                f"nothing listens at its address: {error}", outcome=NOT_DONE
            ) from error
        except aiohttp.ConnectionTimeoutError as error:
            raise WriterLost("its process can't be reached", outcome=NOT_DONE) from error
        except aiohttp.ClientError as error:
            raise WriterLost(f"the connection broke: {error!r}", outcome=UNKNOWN) from error
        if instance is not None and instance != writer.id:
            self._gone[writer.id] = None
            if len(self._gone) > _GONE_MAX:
                self._gone.popitem(last=False)
            raise WriterLost("another process answers at its address", outcome=NOT_DONE)
        if status >= 400:
            problem = from_answer(status, body)
            if isinstance(problem, ForeignHost | RouteNotFound):
                raise WriterLost("another process listens at its address", outcome=NOT_DONE)
            if isinstance(problem, Unauthenticated | Forbidden):
                raise WriterLost(f"it refuses this gateway: {problem.detail}", outcome=NOT_DONE)
            if type(problem) is QuorumLogError:
                raise WriterLost(f"no answer of the writer: {problem.detail}", outcome=UNKNOWN)
            raise problem
        reply = orjson.loads(body) if instance is not None else None
        if not isinstance(reply, dict):
            raise WriterLost("something else answers at its address", outcome=UNKNOWN)
        return reply
