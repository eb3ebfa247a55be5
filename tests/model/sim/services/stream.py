"""The stream of changes of one simulated metadata process."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from quorumlog.wire.bodies import Change
from tests.model.sim.services.net import Process


@dataclass(slots=True, eq=False)
class _Follower:
    """Who follows the changes."""

    who: Process
    coming: deque[bytes] = field(default_factory=deque)
    """On their way: one after another."""
    lines: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)


class ChangeStream:
    """Everybody who follows the changes by one process."""

    def __init__(self, server: Process) -> None:
        self._server = server
        self._net = server.net
        self._followers: list[_Follower] = []
        self.muted: dict[str, int] = {}
        """Until when nothing of the stream comes to a process, though answers do."""

    async def lines(self, who: Process) -> AsyncIterator[bytes]:
        """What a process gets that follows from now on."""
        follower = _Follower(who)
        self._followers.append(follower)
        try:
            yield b'{"kind":"hello"}'
            while (line := await follower.lines.get()) is not None:
                yield line
        finally:
            if follower in self._followers:
                self._followers.remove(follower)

    def notify(self, change: Change) -> None:
        """A change was committed."""
        if not self._followers:
            return
        line = change.model_dump_json().encode()
        for follower in self._followers:
            delay = self._net.rng.randint(*self._net.plan.delay)
            follower.coming.append(line)
            self._net.after(delay, self._pass, follower)

    def _pass(self, follower: _Follower) -> None:
        """A line comes late over a link that is cut: it is sent again, as TCP does. The next one that is
        due comes, whichever was faster.
        """
        until = self.silent_until(follower.who)
        if until > self._net.now:
            self._net.after(until - self._net.now, self._pass, follower)
        else:
            follower.lines.put_nowait(follower.coming.popleft())

    def silent_until(self, who: Process) -> int:
        """Until when a process hears nothing of the stream."""
        return max(
            self._net.cut.get((self._server.name, who.name), 0),
            self.muted.get(who.name, 0),
            who.paused_until,
        )

    def end(self, who: Process | None = None) -> None:
        """Whoever follows has to begin anew."""
        for follower in self._followers:
            if who is None or follower.who is who:
                follower.lines.put_nowait(None)

    def end_if_silent(self, who: Process) -> None:
        """Who heard nothing for as long as three heartbeats take begins anew."""
        if self.silent_until(who) > self._net.now:
            self.end(who)
