"""Bytes of WebSocket messages that have come and that no stream has taken yet, counted in the room.

aiohttp reads messages by itself and hands out whole ones. A message may have as many bytes as a body,
so the bytes of an incomplete message count as a body's do.
"""

import asyncio
from collections.abc import Callable
from itertools import islice
from typing import Final

from aiohttp import WSMessage, WSMsgType, web

from quorumlog.errors import Overloaded, QuorumLogError, TooLarge
from quorumlog.net.aiohttp_parts import bytes_in, drop_parser, messages_in, take_parser
from quorumlog.net.budget import PEER
from services.gateway.edge.access.scopes import caller_of
from services.gateway.edge.http.limits import Room

_CONTROL_HEAD_BYTES: Final = 6
"""What a control frame of a client has besides its payload: its head and its mask (RFC 6455, 5.2)."""
TURN_MESSAGES: Final = 16
"""Taken in one turn of the event loop: less than a millisecond of pings (measured)."""
_CONTROL: Final = frozenset((WSMsgType.PING, WSMsgType.PONG))
_DATA: Final = frozenset((WSMsgType.TEXT, WSMsgType.BINARY))
_FREE_BYTES: Final = 1 << 20
"""Bytes that may wait in front of the parser on top of twice the longest message: control frames that have arrived and are not
parsed yet."""

LARGE_BYTES: Final = 1 << 20
"""The end of a message with so many bytes takes 3 ms, and 40 ms with the most that a message may have (measured): it is joined,
unmasked, copied and decoded at once."""


class Arrivals:
    """The bytes that one socket holds.

    Stands in front of aiohttp's parser, which offers no hook. A chunk in which a message ends counts with
    that message only, so a socket may hold one read of its connection more than is counted. Control
    frames may come between the fragments of a message, which they do not end, and count nothing.

    Invariant: the room counts `_held` bytes for this socket, none once it is closed.
    """

    def __init__(
        self,
        request: web.Request,
        socket: web.WebSocketResponse,
        room: Room,
        refuse: Callable[[QuorumLogError], None],
    ) -> None:
        """`socket` is prepared; `refuse` gets the error once there is no room for more."""
        self._protocol = request.protocol
        self._parser, self._queue = take_parser(socket, self._protocol, self, TURN_MESSAGES)
        self._socket, self._room, self._bodies = socket, room, room.bodies
        self._refuse = refuse
        self._usage = caller_of(request).usage
        self._incomplete_max = 2 * room.limits.body_bytes_max + _FREE_BYTES
        self._looked = 0
        """How many messages at the head of the queue `_look` has counted."""
        self._late: list[bytes] = []
        """Chunks that came and wait for their turn."""
        self._peer = PEER.get()  # aiohttp calls `feed_data` in another context
        self._partial = 0
        self._taken = 0
        self._held = 0

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Parse a chunk, or keep it until its turn. True ends the reading."""
        if self._parser is None:
            return True, b""
        self._partial += len(data)
        is_large = self._partial >= LARGE_BYTES
        if self._late or (is_large and not self._room.large_messages.has_turn(self._parse_late)):
            self._late.append(data)
            return self._is_refused(), b""
        return self._is_over(data), b""

    def _parse_late(self) -> None:
        """Parse what waited for its turn."""
        data, self._late = b"".join(self._late), []
        try:
            is_over = bool(data) and self._parser is not None and self._is_over(data)
        except Exception:
            # As the event loop does for an error of `data_received`: the peer must not wait for ever.
            self._protocol.close()
            raise
        if is_over:
            self._protocol.close()

    def _is_over(self, data: bytes) -> bool:
        """Parse; tell whether no more is to be read."""
        is_over, _ = self._parser.feed_data(data)
        self._look()
        return self._is_refused() or is_over

    def _is_refused(self) -> bool:
        """Count what is held, and refuse the socket where that is too much."""
        try:
            if self._partial > self._incomplete_max:
                raise TooLarge(
                    "a message in fragments whose heads have more bytes than its data may"
                )
            self._count()
        except (Overloaded, TooLarge) as error:
            self._drop()
            self._count()
            self._refuse(error)
            return True
        return False

    def _look(self) -> None:
        """Subtract the messages that became complete from the bytes of the incomplete message."""
        messages = messages_in(self._queue)
        for message, size in islice(messages, self._looked, None):
            is_data = message.type in _DATA
            self._partial = 0 if is_data else max(self._partial - size - _CONTROL_HEAD_BYTES, 0)
        self._looked = len(messages)

    def feed_eof(self) -> None:
        """End the queue after what came: the connection is lost."""
        self._parse_late()
        self._queue.feed_eof()

    def _drop(self) -> None:
        """Free what came of an incomplete message, and read no further."""
        self._parser = None
        drop_parser(self._socket)
        self._partial = 0
        self._late.clear()

    async def receive(self) -> WSMessage | None:
        """The next message that is no ping or pong; None if the wait for it was cut short. Others have their turn however
        many messages have come. Raises: Overloaded.
        """
        while True:
            if messages_in(self._queue):
                # At once: no wait that could be cut short, nor a place for one.
                message = await self._socket.receive()
            else:
                found = await self._room.wait(self._socket.receive())
                if found is None:
                    return None
                message = found
            # The parser stops while its queue is full, and goes on as messages are taken.
            self._looked = max(self._looked - 1, 0)
            self._look()
            if message.type not in _CONTROL:
                return message
            if message.type == WSMsgType.PING:
                await self._socket.pong(message.data)
            self._count()
            await self.paced(message.data)

    async def paced(self, data: bytes | str) -> None:
        """Charge a message or control frame that came, and wait until the token's quotas have made up for those before."""
        if self._usage is not None and (wait_s := self._usage.take_message(len(data))):
            await self._room.wait(asyncio.sleep(wait_s))

    def take(self, count: int) -> None:
        """Count a whole message of `count` bytes, taken from the queue, until the next call."""
        self._taken = count
        self._count()

    def close(self) -> None:
        """Give the room back."""
        self._drop()
        self._bodies.give(self._peer, self._held)
        self._held = 0

    def _count(self) -> None:
        """Bring the room's count up to date. Raises: Overloaded; the bytes are in memory and count."""
        held = self._partial + self._taken + bytes_in(self._queue)
        more, self._held = held - self._held, held
        if more <= 0:
            self._bodies.give(self._peer, -more)
            return
        try:
            self._bodies.take(self._peer, more)
        except Overloaded:
            self._bodies.back(self._peer, more)
            raise
