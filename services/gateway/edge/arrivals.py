"""Bytes of WebSocket messages that have come and are in no stream yet, counted in the room.

aiohttp reads messages by itself and hands out whole ones. A message may have as many bytes as a body,
so what has come of one counts as a body's bytes do, although nobody has seen it yet.
"""

from collections.abc import Callable
from typing import Any

from aiohttp import web

from quorumlog.errors import Overloaded, QuorumLogError
from quorumlog.net.budget import PEER
from services.gateway.edge.body import Room


class Arrivals:
    """What one socket holds of messages.

    Stands in front of aiohttp's parser, which offers no hook. The frames of small messages are not told
    apart: a chunk in which a message ends counts with that message only, so a socket may hold one
    read of its connection more than is counted.

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
        # aiohttp's compiled reader, and its queue of whole messages.
        self._parser: Any = socket._parser  # noqa: SLF001
        self._queue: Any = socket._reader  # noqa: SLF001
        self._socket, self._bodies, self._refuse = socket, room.bodies, refuse
        self._peer = PEER.get()  # a transport's calls come in another context
        self._partial = 0
        self._taken = 0
        self._held = 0
        request.protocol._payload_parser = self  # noqa: SLF001

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Parse what came; True ends the reading."""
        if self._parser is None:
            return True, b""
        queued = self._queue._size  # noqa: SLF001
        told: tuple[bool, bytes] = self._parser.feed_data(data)
        ends_message = self._queue._size > queued  # noqa: SLF001
        self._partial = 0 if ends_message else self._partial + len(data)
        try:
            self._count()
        except Overloaded as error:
            self._drop()
            self._refuse(error)
            return True, b""
        return told

    def feed_eof(self) -> None:
        """The connection is lost."""
        self._queue.feed_eof()

    def _drop(self) -> None:
        """Free what came of a message that is not whole, and read no further."""
        self._parser = self._socket._parser = None  # noqa: SLF001
        self._partial = 0
        self._count()

    def take(self, count: int) -> None:
        """A message of so many bytes was taken, and is held until the next call."""
        self._taken = count
        self._count()

    def close(self) -> None:
        """Give the room back."""
        self._bodies.give(self._peer, self._held)
        self._held = 0

    def _count(self) -> None:
        """Bring the room's count up to date. Raises: Overloaded; what came is in memory, and counts."""
        held = self._partial + self._taken + self._queue._size  # noqa: SLF001
        more, self._held = held - self._held, held
        if more <= 0:
            self._bodies.give(self._peer, -more)
            return
        try:
            self._bodies.take(self._peer, more)
        except Overloaded:
            self._bodies.back(self._peer, more)
            raise
