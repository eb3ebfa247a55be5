"""Processes, the links between them, and HTTP as aiohttp's client gives it to the services.

Messages are late, lost, doubled and out of order; links are cut one way or both, and clogged;
processes stand still or die with all that they were doing. All dice come from one generator.
"""

import asyncio
import errno
import hashlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self
from urllib.parse import parse_qsl, unquote, urlsplit

import aiohttp
from multidict import CIMultiDict

from quorumlog.errors import QuorumLogError
from quorumlog.wire.problems import to_bytes
from tests.model.sim.plan import MS, SECOND
from tests.model.sim.services.plan import ServicePlan
from tests.support.virtual import VirtualLoop

_LONGEST_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Request:
    """What a server gets; what aiohttp's handlers read of their requests."""

    method: str
    path: str
    body: bytes = b""
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    match_info: Mapping[str, str] = field(default_factory=dict)
    source: "Process | None" = None
    """Who asks."""

    @property
    def query_string(self) -> str:
        """Whether there is a query."""
        return "&".join(self.query)

    kept: dict[Any, Any] = field(default_factory=dict)
    """What handlers keep with the request."""

    @property
    def content_length(self) -> int:
        """The body is whole."""
        return len(self.body)

    @property
    def body_exists(self) -> bool:
        """Whether there is a body."""
        return bool(self.body)

    @property
    def content(self) -> "_Whole":
        """The body as a stream."""
        return _Whole(self.body)

    def __contains__(self, key: Any) -> bool:
        return key in self.kept

    def __getitem__(self, key: Any) -> Any:
        return self.kept[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.kept[key] = value

    def get(self, key: Any, default: Any = None) -> Any:
        """What is kept."""
        return self.kept.get(key, default)

    async def read(self) -> bytes:
        """The body."""
        return self.body


@dataclass(frozen=True, slots=True)
class _Whole:
    """A body that came with its head."""

    body: bytes

    def is_eof(self) -> bool:
        """All of it is there."""
        return True

    def read_nowait(self, _count: int) -> bytes:
        """All of it."""
        return self.body


@dataclass(slots=True)
class Answer:
    """What a client gets; what the services read of aiohttp's answers."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    content: AsyncIterator[bytes] | None = None

    async def read(self) -> bytes:
        """The body."""
        return self.body


class Refused(aiohttp.ClientConnectorError):
    """Nobody listens there."""

    def __init__(self, url: str) -> None:
        self._os_error = ConnectionRefusedError(errno.ECONNREFUSED, f"{url} refused")
        OSError.__init__(self, f"{url} refused")

    def __str__(self) -> str:
        return "refused"


Handler = Callable[[Request], Awaitable[Answer]]


class Process:
    """Something that runs, stands still, or is gone with its tasks."""

    def __init__(self, name: str, net: "Net") -> None:
        self.name = name
        self.net = net
        self.is_alive = True
        self.born_at = net.now
        self.paused_until = 0
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something as a part of this process."""
        task = self.net.loop.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            self.net.loop.failures.append(f"{self.name}: {task.exception()!r}")

    def kill(self) -> None:
        """It is gone: nothing that it was doing goes on."""
        self.is_alive = False
        self.net.dead.add(self)
        for task in list(self._tasks):
            task.cancel()


class Net:
    """The network of a run, its clock and its dice."""

    def __init__(self, loop: VirtualLoop, plan: ServicePlan, *, is_reported: bool) -> None:
        self.loop = loop
        self.plan = plan
        self.rng = random.Random(f"services-{plan.seed}")
        self.is_healed = False
        self.messages = 0
        self.processes: dict[str, Process] = {}
        self.dead: set[Process] = set()
        """What requests of such a process shared waits for ever. Until the run ends nobody drops that: a task that is
        collected as garbage while it waits would count as a defect, and when garbage is collected no seed says.
        """
        self.listeners: dict[str, tuple[Process, Handler]] = {}
        """By the scheme, host and port of a URL."""
        self.cut: dict[tuple[str, str], int] = {}
        self.clogged: dict[tuple[str, str], int] = {}
        self.story: list[str] = []
        self._is_reported = is_reported
        self._hash = hashlib.blake2b(digest_size=8)

    @property
    def now(self) -> int:
        """Virtual microseconds."""
        return round(self.loop.time() * SECOND)

    def note(self, *parts: object) -> None:
        """Part of the trace: hashed always, told when somebody wants the story."""
        line = f"{self.now} " + " ".join(map(str, parts))
        self._hash.update(line.encode())
        if self._is_reported:
            self.story.append(f"{self.now / SECOND:10.6f}  " + line.partition(" ")[2])

    @property
    def trace_hash(self) -> str:
        """Equal for equal runs."""
        return self._hash.hexdigest()

    def after(self, delay: int, action: Callable[..., object], *args: Any) -> None:
        """Do this after a virtual delay."""
        self.loop.call_later(max(delay, 0) / SECOND, action, *args)

    async def pause(self, seconds: float) -> None:
        """Let virtual time pass."""
        await asyncio.sleep(seconds)

    # --- messages ----------------------------------------------------------------------------

    def send(
        self, source: Process, target: Process, action: Callable[..., object], *args: Any
    ) -> None:
        """One message, as the plan will have it."""
        plan, rng, link = self.plan, self.rng, (source.name, target.name)
        if self.cut.get(link, -1) > self.now:
            return
        if not self.is_healed and plan.loss and rng.random() < plan.loss:
            return
        low, high = (200, 2 * MS) if self.is_healed else plan.delay
        delay = rng.randint(low, high)
        if not self.is_healed and plan.straggler and rng.random() < plan.straggler:
            delay += rng.randint(0, plan.straggler_max)
        at = max(self.now + delay, self.clogged.get(link, 0), source.paused_until)
        self.after(at - self.now, self._arrive, target, action, args)

    def _arrive(
        self, target: Process, action: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        if target.paused_until > self.now:
            self.after(target.paused_until - self.now, self._arrive, target, action, args)
            return
        self.messages += 1
        action(*args)


class Session:
    """What the services use of `aiohttp.ClientSession`, on simulated links."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_why: object) -> None:
        return

    def request(self, method: str, url: str, **how: Any) -> "_Exchange":
        """One request."""
        return _Exchange(self._process, method, url, how)

    def get(self, url: str, **how: Any) -> "_Exchange":
        """A GET request."""
        return self.request("GET", url, **how)

    def post(self, url: str, **how: Any) -> "_Exchange":
        """A POST request."""
        return self.request("POST", url, **how)


class _Exchange:
    """A request and its answer, as `async with session.request(...) as answer`."""

    def __init__(self, process: Process, method: str, url: str, how: dict[str, Any]) -> None:
        self._process = process
        self._url = url
        parts = urlsplit(url)
        self._base = f"{parts.scheme}://{parts.netloc}"
        self._request = Request(
            method,
            unquote(parts.path),
            how.get("data") or b"",
            dict(parse_qsl(parts.query)) | dict(how.get("params") or {}),
            CIMultiDict(how.get("headers") or {}),
            source=process,
        )
        timeout = how.get("timeout")
        self._limit_s: float | None = timeout.total if timeout is not None else None
        if not self._limit_s:
            self._limit_s = min(_LONGEST_S, process.net.plan.stream_s)
        self._answer: Answer | None = None

    async def __aenter__(self) -> Answer:
        process, net = self._process, self._process.net
        listener = net.listeners.get(self._base)
        if listener is None:
            raise Refused(self._url)
        server, handler = listener
        future: asyncio.Future[Answer] = net.loop.create_future()

        def settle(found: Answer | Exception) -> None:
            if future.done():
                return
            if isinstance(found, Exception):
                future.set_exception(found)
            else:
                future.set_result(found)

        async def serve() -> None:
            try:
                found = await handler(self._request)
            except QuorumLogError as error:
                found = Answer(error.status, to_bytes(error), error.headers)
            loss = 0.0 if net.is_healed else net.plan.answer_loss
            if not loss or net.rng.random() >= loss:
                net.send(server, process, settle, found)

        def arrive() -> None:
            if server.is_alive:
                _ = server.spawn(serve())
            else:
                net.send(server, process, settle, Refused(self._url))

        net.send(process, server, arrive)
        async with asyncio.timeout(self._limit_s):
            self._answer = await future
        return self._answer

    async def __aexit__(self, *_why: object) -> None:
        content = None if self._answer is None else self._answer.content
        if content is not None and hasattr(content, "aclose"):
            await content.aclose()
