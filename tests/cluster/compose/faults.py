"""What is done to a cluster in containers, and what must be true of its containers."""

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.cluster.compose.engine import Engine
from tests.cluster.compose.files import is_job, read_compose
from tests.support.waiting import until

PROJECT: Final = "quorumlog"
BACK_S: Final = 300.0
"""Until a container is healthy again: a dozen processes start at once on a small machine."""

PARTITIONS: Final = (
    ("bookie-2", "inside"),
    ("metadata-1", "stores"),
    ("gateway-1", "inside"),
    ("gateway-2", "edge"),
    ("metadata-2", "inside"),
)
"""Who is taken from which network."""


@dataclass(slots=True)
class Done:
    """What was done."""

    kills: int = 0
    engine_restarts: int = 0
    partitions: int = 0


class Containers:
    """The containers of the project, by the names of their services."""

    def __init__(self, engine: Engine, done: Done) -> None:
        self._engine = engine
        self._done = done
        services = read_compose()["services"]
        self.services: Final[dict[str, dict[str, Any]]] = {
            name: service
            for name, service in services.items()
            if not is_job(service) and "profiles" not in service
        }

    def state(self, name: str) -> dict[str, Any]:
        """What the engine says of a container."""
        return self._engine.inspect(f"{PROJECT}-{name}-1")

    async def kill(self, name: str) -> None:
        """End a container's process as a crash does: `docker kill` would count as the wish that it stays away."""
        before = await asyncio.to_thread(self.state, name)
        os.kill(before["State"]["Pid"], signal.SIGKILL)
        self._done.kills += 1

        async def is_back() -> bool:
            now = await asyncio.to_thread(self.state, name)
            return bool(
                now["State"]["Running"]
                and now["State"]["StartedAt"] != before["State"]["StartedAt"]
            )

        await until(is_back, f"{name} runs again after a kill", BACK_S)

    async def restart_engine(self, end: Callable[[], None]) -> None:
        """End the engine in some way and start it again."""
        await asyncio.to_thread(end)
        await asyncio.to_thread(self._engine.start)
        self._done.engine_restarts += 1

    async def part(self, name: str, network: str, meanwhile: Callable[[], Awaitable[None]]) -> None:
        """Take a container from a network while something happens."""
        container, joined = f"{PROJECT}-{name}-1", f"{PROJECT}_{network}"
        await asyncio.to_thread(self._engine.docker, "network", "disconnect", joined, container)
        self._done.partitions += 1
        await meanwhile()
        connect = ("network", "connect", "--alias", name, joined, container)
        await asyncio.to_thread(self._engine.docker, *connect)

    async def until_healthy(self) -> None:
        """Wait until every container is."""

        async def ill() -> list[str]:
            states = {
                name: (await asyncio.to_thread(self.state, name))["State"] for name in self.services
            }
            return [
                f"{name}: {state['Status']}, {state.get('Health', {}).get('Status')}"
                for name, state in states.items()
                if not state["Running"] or state["Health"]["Status"] != "healthy"
            ]

        async def all_are() -> bool:
            found.clear()
            found.extend(await ill())
            return not found

        found: list[str] = []
        try:
            await until(all_are, "every container is healthy", BACK_S)
        except Exception as error:
            error.add_note(f"not healthy: {found}")
            raise

    def check(self) -> None:
        """Each container is confined as compose.yaml says, also as the kernel sees it. Raises: AssertionError."""
        for name, service in self.services.items():
            state = self.state(name)
            host, process = state["HostConfig"], _status(state["State"]["Pid"])
            seen = {
                "its user is root": process["Uid"].split()[1] == "0",
                "it has capabilities": int(process["CapEff"], 16) or int(process["CapBnd"], 16),
                "it may get privileges": process["NoNewPrivs"] != "1",
                "its system calls are not filtered": process["Seccomp"] != "2",
                "its root can be written": not host["ReadonlyRootfs"],
                "its memory has no limit": not host["Memory"],
                "its logs have no limit": "max-size" not in host["LogConfig"]["Config"],
                "it stays away": host["RestartPolicy"]["Name"] != service["restart"],
            }
            wrong = [what for what, holds in seen.items() if holds]
            assert not wrong, (name, wrong)

    def in_turn(self, dice: random.Random) -> list[str]:
        """All containers in some order."""
        return dice.sample(sorted(self.services), len(self.services))


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
