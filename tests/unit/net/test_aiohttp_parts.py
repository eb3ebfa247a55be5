"""The installed aiohttp has what `net/aiohttp_parts.py` relies on, and no other module relies on it."""

import ast
import asyncio
import inspect
import socket
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
from aiohttp import TCPConnector, WSMsgType, web, web_response
from aiohttp.http import RawRequestMessage, WebSocketReader
from aiohttp.http_exceptions import PayloadEncodingError
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import RequestHandler

from quorumlog.net import aiohttp_parts, connections, responses, sessions
from tests.support.waiting import until

FILE = "shared/quorumlog/net/aiohttp_parts.py"
POST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
HELLO = b"\x81\x85\0\0\0\0hello"
"""A masked text message."""
OURS = (connections.Connection, connections.UpgradableConnection, sessions._Connector)


def need(holds: object, what: str) -> None:
    """Fail with a sentence that says what of aiohttp has changed, and which file must follow."""
    assert holds, f"aiohttp {aiohttp.__version__}: {what} no longer holds; change {FILE}"


class Served:
    """A connection of aiohttp's own class, and its client's socket."""

    def __init__(self, connection: RequestHandler, client: socket.socket) -> None:
        self.connection: Any = connection
        self.client = client


async def answer(_request: web.BaseRequest) -> web.StreamResponse:
    return web.Response(text="ok")


@asynccontextmanager
async def served(handler: Any = answer) -> AsyncIterator[Served]:
    loop = asyncio.get_running_loop()
    server = web.Server(handler)
    connection = RequestHandler(server, loop=loop, access_log=None, lingering_time=0)  # type: ignore[arg-type]
    ours, client = socket.socketpair()
    client.setblocking(False)
    await loop.connect_accepted_socket(lambda: connection, ours)
    try:
        with client:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            yield Served(connection, client)
    finally:
        await server.shutdown(0)


@contextmanager
def unwoken(connection: Any) -> Iterator[None]:
    """Hide who waits for requests."""
    waiter, connection._waiter = connection._waiter, None
    try:
        yield
    finally:
        connection._waiter = waiter


def private_names(of: object) -> Iterator[tuple[str, str]]:
    """Each private attribute that some code of ours uses, with the expression in front of it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(of)))  # type: ignore[arg-type]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr[0] == "_" and node.attr[:2] != "__":
            yield ast.unparse(node.value), node.attr


def own_names(cls: type) -> set[str]:
    """What a class of ours defines itself."""
    slots = vars(cls).get("__slots__", ())
    return {
        *slots,
        *(name for name, each in vars(cls).items() if not hasattr(each, "__objclass__")),
    }


async def test_aiohttp_has_what_the_module_relies_on() -> None:
    need(hasattr(web_response, "SERVER_SOFTWARE"), "web_response.SERVER_SOFTWARE")
    need(web_response.SERVER_SOFTWARE == responses.SERVER_NAME, "the name of the server")  # type: ignore[attr-defined]
    check_overrides()
    await check_requests()
    await check_the_end_of_a_connection()
    await check_the_regular_path()
    await check_the_end_of_input()
    await check_sockets()
    await check_connectors()


def check_names(of: Any, **holders: object) -> None:
    """Each private name that code of ours uses exists. `holders`: an object for each expression in front of one."""
    own = own_names(of) if isinstance(of, type) else set()
    for owner, name in private_names(of):
        holder = holders.get("self" if owner == "super()" else owner)
        assert holder is not None, f"{of.__name__} uses {owner}.{name}: teach this test what it is"
        known = hasattr(holder, name) or (holder is holders.get("self") and name in own)
        need(known, f"that {owner} of {of.__name__} has {name}")


def check_overrides() -> None:
    """What we override takes the arguments that aiohttp gives it, and aiohttp still calls it."""
    for ours in (aiohttp_parts.DirectConnection, aiohttp_parts.Connector, *OURS):
        base: Any = TCPConnector if issubclass(ours, TCPConnector) else RequestHandler
        for name in own_names(ours):
            theirs = getattr(base, name, None)
            if name.startswith("__") or not inspect.isfunction(theirs):
                continue
            wanted = inspect.signature(getattr(ours, name)).parameters
            if "args" in wanted:
                continue
            given = inspect.signature(theirs).parameters
            need(list(wanted) == list(given), f"that {base.__name__}.{name} takes {list(wanted)}")
    connect: Any = TCPConnector._create_direct_connection
    need("req" in inspect.signature(TCPConnector._wrap_create_connection).parameters, "req")
    for name in ("_wrap_create_connection", "_get_ssl_context"):
        need(name in connect.__code__.co_names, f"that TCPConnector connects through {name}")


async def check_requests() -> None:
    """A request is queued without waking the task, taken from the queue, and answered later."""
    async with served() as one:
        connection = one.connection
        waiter = connection._waiter
        need(waiter is not None and not waiter.done(), "that an idle RequestHandler has a _waiter")
        with unwoken(connection):
            connection.data_received(POST + b"{}")
        need(not waiter.done(), "that nobody is woken where _waiter is None")
        need(len(connection._messages) == 1, "that requests queue up in _messages")
        need(connection._request_count == 1, "that _request_count counts the heads that came")
        message, content = connection._messages[0]
        need(isinstance(message, RawRequestMessage), "that _messages has RawRequestMessages")
        flags = (message.should_close, message.upgrade, message.chunked, message.compression)
        need(flags == (False, False, False, None), "the flags of a RawRequestMessage")
        need(content.is_eof() and b"".join(content._buffer) == b"{}", "that a body is in _buffer")
        check_names(
            aiohttp_parts.DirectConnection,
            self=connection,
            content=content,
            message=message,
            request=SimpleNamespace(_message=None),
        )
        connection._messages.popleft()
        connection._parser.message_consumed()

        connection._waiter, connection._request_in_progress = None, True
        connection._next_keepalive_close_time = 0.0
        connection._process_keepalive()
        need(not connection._force_close, "that a connection without a _waiter is not idle")
        ending = asyncio.create_task(connection.shutdown(5))
        await until(lambda: connection._handler_waiter is not None, "a shutdown waits")
        need(not ending.done(), "that shutdown waits for _handler_waiter")
        connection._request_in_progress, connection._waiter = False, waiter
        connection._handler_waiter.set_result(None)
        waiter.cancel()
        await ending

    async with served() as one:
        with unwoken(one.connection):
            one.connection.data_received(GET)
        _, content = one.connection._messages[0]
        need(content is EMPTY_PAYLOAD, "that a request without a body has EMPTY_PAYLOAD")


async def check_the_end_of_a_connection() -> None:
    async with served() as one:
        connection, task = one.connection, one.connection._task_handler
        connection._waiter.cancel()
        await until(task.done, "the task ends")
        need(connection._manager is not None, "that _manager is there until the connection is lost")
        connection.transport.close() if connection.transport else None
        await until(lambda: connection._manager is None, "the connection is lost")
    async with served() as one:
        connection = one.connection
        connection._next_keepalive_close_time = 0.0
        connection._process_keepalive()
        need(connection._force_close, "that _process_keepalive ends an idle connection")


async def check_the_regular_path() -> None:
    seen: list[Any] = []

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        connection: Any = request.protocol
        seen.append((connection._current_request is request, connection._waiter))
        seen.append(request._message.chunked)
        seen.append(request.writer.output_size)
        return web.Response(text="ok")

    async with served(handle) as one:
        waiter = one.connection._waiter
        one.client.send(POST.replace(b"Content-Length: 2", b"Transfer-Encoding: chunked"))
        await until(lambda: len(seen) == 3, "the request is handled")
        need(waiter.done(), "that a request wakes its _waiter")
        need(seen[0] == (True, None), "that a request in work is _current_request, without _waiter")
        need(seen[1] is True, "that _message says whether a body is chunked")
        need(seen[2] == 0, "that output_size counts what was sent of an answer")
    async with served() as one:
        connection = one.connection
        connection._pause_transport_reading()
        need(not connection.transport.is_reading(), "that _pause_transport_reading stops reads")
        need(not connection._reading_paused, "that _pause_transport_reading sets no flag")
        need(not connection._buffer_paused, "that _pause_transport_reading sets no flag")
        connection._resume_transport_reading()
        need(connection.transport.is_reading(), "that _resume_transport_reading goes on")


async def check_the_end_of_input() -> None:
    async with served() as one:
        connection = one.connection
        with unwoken(connection):
            connection.data_received(POST + b"{")
        try:
            connection._parser.feed_eof()
        except PayloadEncodingError:
            return
        need(False, "that feed_eof of _parser raises PayloadEncodingError within a body")


class Before:
    """What stands before the parser of a socket."""

    def __init__(self) -> None:
        self.data = b""
        self.is_lost = False

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        self.data += data
        return False, b""

    def feed_eof(self) -> None:
        self.is_lost = True


async def check_sockets() -> None:
    opened: asyncio.Future[web.WebSocketResponse] = asyncio.get_running_loop().create_future()
    before, read = Before(), []

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        response = web.WebSocketResponse(decode_text=False, timeout=0.01)
        await response.prepare(request)
        opened.set_result(response)
        read.append(await response.receive())
        return response

    async with served(handle) as one:
        connection = one.connection
        one.client.send(HANDSHAKE)
        response: Any = await opened
        parser, queue = response._parser, response._reader
        need(isinstance(parser, WebSocketReader), "that a WebSocketResponse has its _parser")
        need(connection._payload_parser is parser, "that _payload_parser is who gets the bytes")
        for uses in (
            aiohttp_parts.take_parser,
            aiohttp_parts.drop_parser,
            aiohttp_parts.messages_in,
            aiohttp_parts.bytes_in,
        ):
            check_names(uses, socket=response, connection=connection, queue=queue)
        aiohttp_parts.take_parser(response, connection, before, 16)
        one.client.send(HELLO)
        await until(lambda: before.data == HELLO, "the bytes get to _payload_parser")
        need(
            parser.feed_data(HELLO[:4]) == (False, b""),
            "that feed_data of _parser gives (is_over, rest)",
        )
        need(not queue._buffer and queue._size == 0, "that half a message is not in the queue")
        parser.feed_data(HELLO[4:])
        found = [(message.type, message.data, size) for message, size in queue._buffer]
        if not found:  # its reader waited, and has it already
            await until(lambda: read, "the reader gets the message")
            found = [(read[0].type, read[0].data, 5)]
        need(found == [(WSMsgType.TEXT, b"hello", 5)], "that _buffer has messages with their bytes")
        parser.feed_data(HELLO + HELLO)
        need(len(queue._buffer) > 0, "that _buffer has what no reader took")
        need(queue._size >= 5 * len(queue._buffer), "that _size counts the bytes of the queue")
        one.client.close()
        await until(lambda: before.is_lost, "the lost connection gets to _payload_parser")


class Free:
    """A connection that a request has given back."""

    should_close = False
    transport = None


async def check_connectors() -> None:
    connector: Any = TCPConnector(limit=0)
    key: Any = object()
    first, last = Free(), Free()
    for protocol in (first, last):
        connector._release(key, protocol)
    free = [protocol for protocol, _ in connector._conns[key]]
    need(free == [first, last], "that _release appends to the free connections in _conns")
    taken = inspect.getsource(TCPConnector._get)
    need("popleft()" in taken, "that the first one of the free connections is taken next")
    check_names(aiohttp_parts.Connector, self=connector)
    connector._conns.clear()
    await connector.close()


async def test_no_other_module_relies_on_it() -> None:
    """Ruff's SLF001 refuses private names of other objects; this refuses those that a class inherits."""
    async with TCPConnector() as connector:
        inherited = {RequestHandler: dir(RequestHandler), TCPConnector: dir(connector)}
    for base, theirs in inherited.items():
        for ours in subclasses(base):
            if ours.__module__ == aiohttp_parts.__name__:
                continue
            used = {name for owner, name in private_names(ours) if owner in ("self", "super()")}
            found = used.intersection(theirs)
            assert not found, f"{ours.__qualname__} uses {found} of aiohttp: move that to {FILE}"


def subclasses(of: type) -> Iterator[type]:
    """Our subclasses of a class of aiohttp's."""
    found: list[type] = of.__subclasses__()
    for each in found:
        if each.__module__.startswith("quorumlog."):
            yield each
        yield from subclasses(each)
