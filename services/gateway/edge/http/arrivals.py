"""Charge received but unprocessed WebSocket bytes to the budget for request bodies.

aiohttp buffers a WebSocket message until the message is complete. A message may be as large as a
request body, so the bytes of an incomplete message count like the bytes of a body.
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
"""Overhead in bytes of a client's control frame: head and mask (RFC 6455, 5.2)."""
TURN_MESSAGES: Final = 16
"""Messages per iteration of the event loop. For pings, this takes under 1 ms (measured)."""
_CONTROL: Final = frozenset((WSMsgType.PING, WSMsgType.PONG))
_DATA: Final = frozenset((WSMsgType.TEXT, WSMsgType.BINARY))
_FREE_BYTES: Final = 1 << 20
"""Allowance for unparsed control frames, in addition to twice the size of the largest message."""

LARGE_BYTES: Final = 1 << 20
"""Size from which the event loop parses one message per iteration. Joining, unmasking, copying and
decoding take 3 ms for a message of this size, and 40 ms for the largest message (measured)."""


class Arrivals:
    """Counts the bytes of one WebSocket in memory.

    The class wraps aiohttp's parser, which offers no hook for counting. When a message ends within
    a chunk, the rest of the chunk is not counted, so one read of the connection may go uncounted.
    Control frames between the fragments of a message do not end the message, and are not counted.

    Invariant: the budget counts `_held` bytes for this socket, and 0 once the socket is closed.
    """

    def __init__(
        self,
        request: web.Request,
        socket: web.WebSocketResponse,
        room: Room,
        refuse: Callable[[QuorumLogError], None],
    ) -> None:
        """`socket` must be prepared. `refuse` is called with the error if a limit is exceeded."""
        self._protocol = request.protocol
        self._parser, self._queue = take_parser(socket, self._protocol, self, TURN_MESSAGES)
        self._socket, self._room, self._bodies = socket, room, room.bodies
        self._refuse = refuse
        self._usage = caller_of(request).usage
        self._incomplete_max = 2 * room.limits.body_bytes_max + _FREE_BYTES
        self._looked = 0
        """The number of messages at the head of the queue that `_look` has already counted."""
        self._late: list[bytes] = []
        """Chunks that wait for their turn in `LargeMessages`."""
        self._peer = PEER.get()  # here, because aiohttp calls `feed_data` in another context
        self._partial = 0
        self._taken = 0
        self._held = 0

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Parse a chunk, or keep it until its turn. Returns True if reading must end."""
        if self._parser is None:
            return True, b""
        self._partial += len(data)
        is_large = self._partial >= LARGE_BYTES
        if self._late or (is_large and not self._room.large_messages.has_turn(self._parse_late)):
            self._late.append(data)
            return self._is_refused(), b""
        return self._is_over(data), b""

    def _parse_late(self) -> None:
        """Parse the chunks that waited for their turn."""
        data, self._late = b"".join(self._late), []
        try:
            is_over = bool(data) and self._parser is not None and self._is_over(data)
        except Exception:
            # Close the connection, as after an error in `data_received`, so that the peer can't hang.
            self._protocol.close()
            raise
        if is_over:
            self._protocol.close()

    def _is_over(self, data: bytes) -> bool:
        """Parse a chunk, and return whether reading must end."""
        is_over, _ = self._parser.feed_data(data)
        self._look()
        return self._is_refused() or is_over

    def _is_refused(self) -> bool:
        """Update the count of bytes, and refuse the socket if a limit is exceeded."""
        try:
            if self._partial > self._incomplete_max:
                raise TooLarge("the message has too many fragments: send larger fragments")
            self._count()
        except (Overloaded, TooLarge) as error:
            self._drop()
            self._count()
            self._refuse(error)
            return True
        return False

    def _look(self) -> None:
        """Subtract newly complete messages from the bytes of the incomplete message."""
        messages = messages_in(self._queue)
        for message, size in islice(messages, self._looked, None):
            is_data = message.type in _DATA
            self._partial = 0 if is_data else max(self._partial - size - _CONTROL_HEAD_BYTES, 0)
        self._looked = len(messages)

    def feed_eof(self) -> None:
        """Parse the waiting chunks and end the queue, because the connection is lost."""
        self._parse_late()
        self._queue.feed_eof()

    def _drop(self) -> None:
        """Free the bytes of an incomplete message, and stop reading."""
        self._parser = None
        drop_parser(self._socket)
        self._partial = 0
        self._late.clear()

    async def receive(self) -> WSMessage | None:
        """Return the next message other than a ping or pong, or None if the wait was interrupted.
        The event loop serves other requests even if many messages are queued. Raises: Overloaded.
        """
        while True:
            if messages_in(self._queue):
                # A message is queued, so `receive` returns at once and doesn't count in `waiters`.
                message = await self._socket.receive()
            else:
                found = await self._room.wait(self._socket.receive())
                if found is None:
                    return None
                message = found
            # The parser stops while its queue is full, and resumes as messages are received.
            self._looked = max(self._looked - 1, 0)
            self._look()
            if message.type not in _CONTROL:
                return message
            if message.type == WSMsgType.PING:
                await self._socket.pong(message.data)
            self._count()
            await self.paced(message.data)

    async def paced(self, data: bytes | str) -> None:
        """Charge a message or control frame to the token's quotas, and pause if a quota is used up."""
        if self._usage is not None and (wait_s := self._usage.take_message(len(data))):
            await self._room.wait(asyncio.sleep(wait_s))

    def take(self, count: int) -> None:
        """Until the next call, count the `count` bytes of a message taken from the queue."""
        self._taken = count
        self._count()

    def close(self) -> None:
        """Stop reading, and give back all bytes to the budget."""
        self._drop()
        self._bodies.give(self._peer, self._held)
        self._held = 0

    def _count(self) -> None:
        """Update the budget's count. Raises: Overloaded, but counts the bytes anyway."""
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
