"""The channel's version 1, a WebSocket: for gateways and autorecovery of the release before, which are replaced after
the bookies (docs/adr/0030-a-framed-channel.md). It goes with the next release.
"""

import asyncio

from aiohttp import WSMsgType, web

from services.bookie.channel import Peer


class OlderConnection:
    """A peer's WebSocket. Implements `channel.Connection`."""

    def __init__(self, socket: web.WebSocketResponse) -> None:
        self._socket = socket
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._has_answers = asyncio.Event()
        self._work: list[asyncio.Task[None]] = []

    def announce(self) -> None:
        """There are answers to send."""
        self._has_answers.set()

    def pause(self) -> None:
        """Read no more requests for now."""
        self._may_read.clear()

    def resume(self) -> None:
        """Read on."""
        self._may_read.set()

    def close(self) -> None:
        """End the connection."""
        for task in self._work:
            task.cancel()

    async def serve(self, peer: Peer) -> None:
        """Handle requests until the peer goes. Raises: BadFrame, and what a defect raised."""
        both = self._receive(peer), self._send(peer)
        self._work = [asyncio.create_task(work) for work in both]
        try:
            done, _ = await asyncio.wait(self._work, return_when="FIRST_COMPLETED")
            for task in done:
                if not task.cancelled():
                    task.result()
        finally:
            self.close()
            await asyncio.gather(*self._work, return_exceptions=True)
            await self._socket.close()

    async def _receive(self, peer: Peer) -> None:
        while True:
            message = await self._socket.receive()
            if message.type is not WSMsgType.BINARY:
                return
            peer.received(message.data, b"")
            await self._may_read.wait()

    async def _send(self, peer: Peer) -> None:
        while True:
            await self._has_answers.wait()
            self._has_answers.clear()
            while (message := peer.next_message()) is not None:
                try:
                    await self._socket.send_bytes(b"".join(message))
                except (ConnectionError, RuntimeError):
                    return  # the peer has gone
