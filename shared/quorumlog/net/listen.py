"""Accepts and ends the connections of every service, also over TLS and behind proxies."""

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from aiohttp import web

from quorumlog.errors import Overloaded
from quorumlog.net.budget import peer_of
from quorumlog.net.connections import Listener, ListenLimits
from quorumlog.net.proxies import read_header
from quorumlog.net.timers import Tasks, restarted

log = logging.getLogger(__name__)

_BACKLOG: Final = 1024
_ACCEPT_AGAIN_S: Final = 0.1
"""Pause after a connection could not be accepted (chosen by judgement)."""
_REPORT_EVERY_S: Final = 1.0
_ACCEPT_TURNS: Final = 3
"""Number of turns of asyncio's event loop from accepting a connection to calling its protocol."""
_NAMED: Final = 5
"""Maximum number of items in a log line that lists what an ending process waits for."""
_TAKEN: Final = (errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL)


class PortUnusable(OSError):
    """No server can listen at a port; the message contains the reason."""


@contextlib.contextmanager
def _naming(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"can't be used ({error})"
        raise PortUnusable(f"port {port} of {host} {reason}: choose another port") from error


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket for `listening`, so that the port is known before the application exists. For
    port 0, the system chooses a port. Raises: PortUnusable, OSError.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with _naming(host, port):
            bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


@contextlib.asynccontextmanager
async def _listening_on(
    listener: Listener, bound: socket.socket, context: ssl.SSLContext | None
) -> AsyncIterator[None]:
    """Accept connections that begin with a TLS handshake or a proxy's header, until the block ends.
    Limits and deadlines apply from a connection's start. (asyncio's server would begin any number
    of handshakes at once, even with peers that send nothing.)
    """
    bound.setblocking(False)
    bound.listen(_BACKLOG)
    listener.port = bound.getsockname()[1]
    tasks = Tasks()
    tasks.start(restarted(partial(_accept_all, listener, bound, context, tasks)))
    try:
        yield
    finally:
        await tasks.close()
        bound.close()


async def _accept_all(
    listener: Listener, bound: socket.socket, context: ssl.SSLContext | None, tasks: Tasks
) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            accepted, address = await loop.sock_accept(bound)
        except OSError as error:  # the peer has gone, or descriptors are used up
            log.warning("accept-failed", extra={"error": repr(error)})
            await asyncio.sleep(_ACCEPT_AGAIN_S)
            continue
        with contextlib.ExitStack() as refused:
            refused.callback(accepted.close)
            give = _take_place(listener, peer_of(address[0]))
            if give is not None:
                refused.pop_all()
                tasks.start(_welcome(listener, accepted, address[0], context, give))


def _take_place(listener: Listener, peer: str) -> Callable[[], None] | None:
    """Count a connection before its handshake. Returns a function to undo the count; None if refused."""
    try:
        listener.connections.take(peer)
    except Overloaded:
        # A 429 can be sent only after the handshake, so a few refused connections may complete it.
        if listener.refuse():
            return listener.give_refused
        listener.give_refused()
        return None
    return partial(listener.connections.give, peer)


async def _welcome(
    listener: Listener,
    accepted: socket.socket,
    address: str,
    context: ssl.SSLContext | None,
    give: Callable[[], None],
) -> None:
    """Read a proxy's header, do the TLS handshake, and pass the connection to aiohttp's protocol."""
    connection, has_place = listener.connection(), True
    proxies, limit_s = listener.limits.proxies, listener.limits.head_timeout_s

    def hand_over() -> None:
        nonlocal has_place
        has_place = False
        give()

    connection.hand_over = hand_over
    try:
        if proxies is not None and proxies.begins(address):
            async with asyncio.timeout(limit_s):
                connection.address = await read_header(accepted) or ""
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: connection,
            accepted,
            ssl=context,
            ssl_handshake_timeout=None if context is None else limit_s,
        )
    except (OSError, ValueError):  # the handshake, deadline, connection or header failed
        accepted.close()
    finally:
        if has_place:
            give()


@contextlib.asynccontextmanager
async def listening(
    app: web.Application,
    *,
    host: str,
    port: int,
    limits: ListenLimits | None = None,
    bound: socket.socket | None = None,
    context: ssl.SSLContext | None = None,
) -> AsyncIterator[Listener]:
    """Start the application and listen, on the socket `bound` if given, over TLS if `context` is
    given. At the end of the block, stop listening, finish requests in progress (within the limits'
    `drain_timeout_s`), and run the application's clean-up.

    Raises: PortUnusable.
    """
    place: dict[str, Any] = {"host": host, "port": port, "reuse_address": True}
    if bound is not None:
        place = {"sock": bound}
    limits = limits or ListenLimits()
    waits_for: Callable[[], Sequence[str]] = tuple
    runner = web.AppRunner(app, shutdown_timeout=limits.drain_timeout_s)
    await runner.setup()
    try:
        listener = Listener(runner, limits)
        waits_for = listener.waits_for
        if context is not None or limits.proxies is not None:
            async with _listening_on(listener, bound or bind(host, port), context):
                yield listener
            return
        with _naming(host, port):
            sockets = await asyncio.get_running_loop().create_server(
                listener.connection, backlog=_BACKLOG, **place
            )
        listener.port = sockets.sockets[0].getsockname()[1]
        try:
            yield listener
        finally:
            await _stop_accepting(sockets)
    finally:
        async with reporting(waits_for):
            await runner.cleanup()


async def _stop_accepting(sockets: asyncio.Server) -> None:
    """Close a server once all accepted connections have protocols: asyncio would leak the other connections."""
    loop = asyncio.get_running_loop()
    for each in sockets.sockets:
        loop.remove_reader(each)
    for _ in range(_ACCEPT_TURNS):
        await asyncio.sleep(0)
    sockets.close()


def in_words(waits_for: Sequence[str]) -> str:
    """The first items that a process waits for, and the number of further items, as text."""
    more = len(waits_for) - _NAMED
    return "; ".join((*waits_for[:_NAMED], *([f"{more} more"] if more > 0 else ())))


@contextlib.asynccontextmanager
async def reporting(waits_for: Callable[[], Sequence[str]]) -> AsyncIterator[None]:
    """Log the items that an ending process waits for, every second until the block ends."""

    async def notify() -> None:
        while True:
            await asyncio.sleep(_REPORT_EVERY_S)
            if found := waits_for():
                log.info("drain-waits", extra={"why": in_words(found)})

    task = asyncio.create_task(notify())
    try:
        yield
    finally:
        task.cancel()
