"""Sends requests to a ledger's writer in another gateway, which never forwards them (rule 11).

Each request names the writer's instance id, which the receiver checks. The outcome of a failed
request is `not-done` if the writer certainly did not accept the request, otherwise `unknown`.
"""

import asyncio
from collections import OrderedDict
from typing import Any, Final

import aiohttp
import orjson
from aiohttp import hdrs

from quorumlog import errors, header
from quorumlog.net.identity import Role
from quorumlog.net.sessions import ExpectedServer
from quorumlog.net.timers import awake_timeout
from quorumlog.protocol.metadata import Writer
from quorumlog.wire.outgoing import outgoing
from quorumlog.wire.problems import from_answer

_QUORUM_S: Final = 10.0
_APPEND_BEYOND_S: Final = 5.0
"""Timeout of a forwarded append beyond the quorum timeout, so that the writer times out first."""
_CLOSE_S: Final = 30.0
_LAC_S: Final = 5.0
"""Timeout of LAC requests: long enough that a busy writer is not taken for dead (rule 5)."""
_HUNG_S: Final = 2.0
"""Readers send no request to a writer for this long after a timeout (chosen by judgement)."""
_CONNECT_S: Final = 2.0
_GONE_MAX: Final = 10_000
"""Maximum number of instances remembered as gone. Each forgotten instance costs one request."""
_WRITER: Final = ExpectedServer(Role.GATEWAY)
SILENT_WRITER: Final = "the ledger's writer did not answer in time"


class Peers:
    """The other gateways of the cluster."""

    def __init__(self, session: aiohttp.ClientSession, quorum_s: float = _QUORUM_S) -> None:
        """`session` is shared and closed by its owner. `quorum_s`: the writers' quorum timeout."""
        self.session = session
        self.append_s = quorum_s + _APPEND_BEYOND_S
        self._gone: OrderedDict[str, None] = OrderedDict()
        """Gateway instances that are gone for ever, because another instance has their address."""
        self._hung_until: dict[str, float] = {}
        """For each writer that timed out: the loop time until which readers query bookies."""

    async def last_add_confirmed(
        self, writer: Writer, ledger_id: int, *, after: int | None = None, wait_s: float = 0.0
    ) -> tuple[int, bool, int]:
        """Requests the writer's LAC, whether the ledger is CLOSED, and the metadata's version.

        Raises: WriterLost, also after a timeout.
        """
        query = "" if after is None else f"?after={after}&wait_ms={int(wait_s * 1000)}"
        now = asyncio.get_running_loop().time()
        if now < self._hung_until.get(writer.id, now):
            raise errors.WriterLost(SILENT_WRITER, ledger_id=ledger_id)
        self._hung_until.pop(writer.id, None)
        try:
            reply = await self.ask(
                writer, "GET", f"/ledgers/{ledger_id}/lac{query}", _LAC_S + wait_s
            )
        except TimeoutError as error:
            now = asyncio.get_running_loop().time()
            # Also drops expired items, because no later request drops writers that are gone.
            self._hung_until = {who: end for who, end in self._hung_until.items() if end > now}
            self._hung_until[writer.id] = now + _HUNG_S
            raise errors.WriterLost(SILENT_WRITER, ledger_id=ledger_id) from error
        return int(reply["last_add_confirmed"]), reply["closed"] is True, int(reply["version"])

    async def close(self, writer: Writer, ledger_id: int, *, password: str | None) -> None:
        """Makes the writer close the ledger. Raises: WriterLost, and the writer's own error."""
        path = f"/v1/ledgers/{ledger_id}/close"
        try:
            await self.send(writer, "POST", path, _CLOSE_S, password=password)
        except TimeoutError as error:
            raise errors.WriterLost(SILENT_WRITER, ledger_id=ledger_id) from error

    async def ask(
        self, writer: Writer, method: str, path: str, timeout_s: float, data: bytes = b""
    ) -> dict[str, Any]:
        """Sends a request to `writer`; returns the decoded JSON. Raises the errors of `send`."""
        reported: dict[str, Any] = orjson.loads(
            await self.send(writer, method, path, timeout_s, data)
        )
        return reported

    async def send(
        self,
        writer: Writer,
        method: str,
        path: str,
        timeout_s: float,
        data: bytes = b"",
        *,
        media: str | None = None,
        password: str | None = None,
    ) -> bytes:
        """Sends a request to the process `writer`, below `/internal`; returns the response's JSON.

        Raises: WriterLost if `writer` can't be reached, TimeoutError, and the writer's own error.
        """
        if writer.id in self._gone:
            raise _not_sent(f"the writer {writer.id} is gone: another process has its address")
        headers = {header.FORWARDED_WRITER: writer.id}
        if media is not None:
            headers[hdrs.CONTENT_TYPE] = media
        if password is not None:
            headers[header.LEDGER_PASSWORD] = password
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        try:
            # The timeout counts only time in which this process is awake, because a suspended
            # process can't see the writer's answer.
            async with (
                awake_timeout(timeout_s),
                self.session.request(
                    method,
                    f"{writer.url_inside}/internal{path}",
                    data=outgoing(data) or None,
                    headers=headers,
                    timeout=timeout,
                    ssl=_WRITER,
                ) as answer,
            ):
                body = await answer.read()
                status, instance = answer.status, answer.headers.get(header.FORWARDED_WRITER)
        except aiohttp.ClientConnectorError as error:
            raise _not_sent(f"no process listens at the writer's address: {error}") from error
        except aiohttp.ConnectionTimeoutError as error:
            raise _not_sent(f"no connection to the ledger's writer in {_CONNECT_S:g} s") from error
        except aiohttp.ClientError as error:
            raise errors.WriterLost(
                f"the connection to the ledger's writer broke: {error!r}", outcome=errors.UNKNOWN
            ) from error
        if instance is not None and instance != writer.id:
            self._gone[writer.id] = None
            if len(self._gone) > _GONE_MAX:
                self._gone.popitem(last=False)
            raise _not_sent(f"the writer {writer.id} is gone: another gateway has its address")
        if status >= 400:
            problem = from_answer(status, body)
            if isinstance(problem, errors.ForeignHost | errors.RouteNotFound):
                raise _not_sent("the process at the writer's address is not a gateway")
            if isinstance(problem, errors.Unauthenticated | errors.Forbidden):
                raise _not_sent(f"the ledger's writer rejects this gateway: {problem.detail}")
            if type(problem) is errors.QuorumLogError:
                raise errors.WriterLost(
                    f"the ledger's writer failed: {problem.detail}", outcome=errors.UNKNOWN
                )
            raise problem
        if instance is None:
            detail = "the process at the writer's address is not a gateway"
            raise errors.WriterLost(detail, outcome=errors.UNKNOWN)
        return body


def _not_sent(detail: str) -> errors.WriterLost:
    """The error for a request that the writer did not receive, or that it rejected."""
    return errors.WriterLost(detail, outcome=errors.NOT_DONE)
