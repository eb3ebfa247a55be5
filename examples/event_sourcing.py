"""Seats of shows, event-sourced: a log of each show keeps what happened, and everything else is made from it.

A show is an aggregate: its state is what its events make of it, in order. A command reads to the end of the log,
decides by the state, and appends its event where it expects the end to be (`expect`). Where another process was
faster, the append is refused and nothing was written: the command reads on and decides again. So any number of these
servers may serve the same shows at once, and a seat is never given twice.

    python examples/event_sourcing.py --port 9001 --snapshots /tmp/shows --gateways http://127.0.0.1:8080
    python examples/event_sourcing.py --port 9002 --snapshots /tmp/shows --gateways http://127.0.0.1:8081
    curl -X PUT http://127.0.0.1:9001/shows/hamlet -d 100                  # opens a show with 100 seats
    curl -X PUT http://127.0.0.1:9002/shows/hamlet/seats/7 -d ann          # 200, or 409 where the seat is taken
    curl -X DELETE http://127.0.0.1:9001/shows/hamlet/seats/7 -d ann
    curl http://127.0.0.1:9002/shows/hamlet                                # as it is now
    curl 'http://127.0.0.1:9002/shows/hamlet?at=2'                         # as it was after two events
    curl -X POST http://127.0.0.1:9001/shows/hamlet/rebuild                # from the first event, without snapshots

Snapshots only save time: each is the state after some events, and a start reads the events behind it. The log is
never truncated, because it is the truth: a new question to the past is answered by reading it again.

What it promises: a command that was answered with 200 is in the log, and so it holds for every server. A command
whose answer was lost may be done; the same command again does no harm.
"""

import argparse
import asyncio
import contextlib
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypedDict

import orjson
from aiohttp import web

from quorumlog.client import Client, Log
from quorumlog.errors import UNKNOWN, NoSuchLog, QuorumLogError, UnexpectedOffset

ATTEMPTS: Final = 100
"""How often a command decides again because others were faster, or the cluster did not answer."""
RETRY_S: Final = 0.2
STATE_FORM: Final = 1
"""Of snapshots. Another number when `Show.apply` changes: older snapshots are then ignored, and made again."""


class Event(TypedDict):
    """What happened. Events are facts: they are never changed, and all forms there ever were stay readable."""

    kind: Literal["opened", "taken", "freed"]
    seat: int
    """The number of seats where a show was opened."""
    guest: str


class Refused(Exception):
    """The show's state forbids a command."""


@dataclass(slots=True)
class Show:
    """The state of one show.

    Invariant: it is a function of the first `version` events, and of nothing else: no clock, no chance.
    """

    version: int = 0
    seats: int = 0
    taken: dict[int, str] = field(default_factory=dict)

    def apply(self, event: Event) -> None:
        """Take in the next event."""
        if event["kind"] == "opened":
            self.seats = event["seat"]
        elif event["kind"] == "taken":
            self.taken[event["seat"]] = event["guest"]
        else:
            del self.taken[event["seat"]]
        self.version += 1

    # Commands: each decides and changes nothing. None: what is asked for holds already, so a repeat does no harm.

    def open(self, seats: int) -> Event | None:
        """Offer so many seats."""
        if self.seats not in (0, seats):
            raise Refused(f"the show has {self.seats} seats")
        return None if self.seats else Event(kind="opened", seat=seats, guest="")

    def take(self, seat: int, guest: str) -> Event | None:
        """Give a seat to a guest."""
        if not 1 <= seat <= self.seats:
            raise Refused(f"the show has no seat {seat}")
        if self.taken.get(seat, guest) != guest:
            raise Refused(f"seat {seat} is taken")
        return None if seat in self.taken else Event(kind="taken", seat=seat, guest=guest)

    def free(self, seat: int, guest: str) -> Event | None:
        """Take a seat back from its guest."""
        if seat not in self.taken:
            return None
        if self.taken[seat] != guest:
            raise Refused(f"seat {seat} is somebody else's")
        return Event(kind="freed", seat=seat, guest=guest)

    def to_json(self) -> dict[str, Any]:
        """The state for people and snapshots."""
        taken = {str(seat): guest for seat, guest in sorted(self.taken.items())}
        return {"version": self.version, "seats": self.seats, "taken": taken}

    @classmethod
    def of_json(cls, shown: dict[str, Any]) -> "Show":
        """The state of a snapshot."""
        taken = {int(seat): guest for seat, guest in shown["taken"].items()}
        return cls(shown["version"], shown["seats"], taken)


class Snapshots:
    """A folder of states, one a show. Servers may share it: whichever snapshot is there is a true one."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def load(self, name: str) -> Show:
        """The newest state that was kept; the empty one without any."""
        with contextlib.suppress(FileNotFoundError):
            kept = orjson.loads(self._file(name).read_bytes())
            if kept["form"] == STATE_FORM:
                return Show.of_json(kept["state"])
        return Show()

    def save(self, name: str, state: dict[str, Any]) -> None:
        """Keep a state as a whole. It need not be synced: without it more events are read."""
        draft = self._folder / f"{uuid.uuid4().hex}.draft"
        draft.write_bytes(orjson.dumps({"form": STATE_FORM, "state": state}))
        draft.replace(self._file(name))

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.snapshot"


class Shows:
    """All shows, each as far as this server has read it."""

    def __init__(self, client: Client, snapshots: Snapshots, snapshot_every: int) -> None:
        self._client, self._snapshots, self._every = client, snapshots, snapshot_every
        self._known: dict[str, Show] = {}
        self._turns: dict[str, asyncio.Lock] = {}

    async def create(self, name: str, seats: int) -> Show:
        """Open a show; its log is made where there is none."""
        await self._client.create_log(_log_of(name))
        return await self.command(name, lambda show: show.open(seats))

    async def command(self, name: str, decide: Callable[[Show], Event | None]) -> Show:
        """Run a command on the newest state. Returns the state after it.

        Raises: Refused; QuorumLogError, where its `outcome` is unknown the command may be done.
        """
        log = self._client.log(_log_of(name))
        async with self._turn(name):
            for _ in range(ATTEMPTS):
                show = await self._read_on(name, log)
                event = decide(show)
                if event is None:
                    return show
                if await self._append(log, event, show.version):
                    return await self._read_on(name, log)
        raise Refused("too many commands at once")

    async def _append(self, log: Log, event: Event, version: int) -> bool:
        """Append an event behind all that the decision knew; False where the decision must be made again.

        After a lost answer the event may be in the log, or may even come later. Both do no harm: the next decision
        sees it, or takes its place, and then the late one is refused.
        """
        try:
            await log.append(orjson.dumps(event), expect=version)
        except UnexpectedOffset:
            return False
        except QuorumLogError as error:
            if not error.retryable and error.outcome != UNKNOWN:
                raise
            await asyncio.sleep(RETRY_S)
            return False
        return True

    async def show(self, name: str) -> Show:
        """A show as it is now. Raises: NoSuchLog."""
        async with self._turn(name):
            return await self._read_on(name, self._client.log(_log_of(name)))

    async def past(self, name: str, version: int | None = None) -> Show:
        """A show after so many events, or after all, made from the first event on."""
        show, log = Show(), self._client.log(_log_of(name))
        async for record in log.records():
            if show.version == version:
                break
            show.apply(orjson.loads(record.value))
        return show

    async def rebuild(self, name: str) -> Show:
        """Forget what was made from the events, and make it again."""
        async with self._turn(name):
            show = self._known[name] = await self.past(name)
            await asyncio.to_thread(self._snapshots.save, name, show.to_json())
            return show

    async def _read_on(self, name: str, log: Log) -> Show:
        """Apply the events that are new; keep a snapshot now and then."""
        if name not in self._known:
            self._known[name] = await asyncio.to_thread(self._snapshots.load, name)
        show = self._known[name]
        before = show.version
        async for record in log.records(show.version):
            assert record.offset == show.version, "every event once, in order"
            show.apply(orjson.loads(record.value))
        if show.version // self._every > before // self._every:
            await asyncio.to_thread(self._snapshots.save, name, show.to_json())
        return show

    def _turn(self, name: str) -> asyncio.Lock:
        """One command of a show at a time in this process. Between processes `expect` decides."""
        return self._turns.setdefault(name, asyncio.Lock())


def _log_of(name: str) -> str:
    return f"show-{name}"


def application(shows: Shows) -> web.Application:
    """The shows over HTTP."""

    async def put_show(request: web.Request) -> web.Response:
        seats = _number(await request.text(), "seats")
        return _shown(await shows.create(request.match_info["show"], seats))

    async def get_show(request: web.Request) -> web.Response:
        name = request.match_info["show"]
        if "at" in request.query:
            return _shown(await shows.past(name, _number(request.query["at"], "at")))
        return _shown(await shows.show(name))

    async def rebuild(request: web.Request) -> web.Response:
        return _shown(await shows.rebuild(request.match_info["show"]))

    async def put_seat(request: web.Request) -> web.Response:
        seat, guest = int(request.match_info["seat"]), await _guest(request)
        name = request.match_info["show"]
        return _shown(await shows.command(name, lambda show: show.take(seat, guest)))

    async def delete_seat(request: web.Request) -> web.Response:
        seat, guest = int(request.match_info["seat"]), await _guest(request)
        name = request.match_info["show"]
        return _shown(await shows.command(name, lambda show: show.free(seat, guest)))

    app = web.Application(middlewares=[_errors])
    name = r"/shows/{show:[a-z0-9-]{1,60}}"
    app.router.add_put(name, put_show)
    app.router.add_get(name, get_show)
    app.router.add_post(name + "/rebuild", rebuild)
    app.router.add_put(name + r"/seats/{seat:\d{1,6}}", put_seat)
    app.router.add_delete(name + r"/seats/{seat:\d{1,6}}", delete_seat)
    return app


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        # Shielded: a client that goes away must not leave a command half done.
        found: web.StreamResponse = await asyncio.shield(asyncio.ensure_future(handler(request)))
    except Refused as error:
        raise web.HTTPConflict(text=str(error)) from error
    except NoSuchLog as error:
        raise web.HTTPNotFound(text="no such show") from error
    except QuorumLogError as error:
        raise web.HTTPServiceUnavailable(text=f"{error.code}, {error.outcome}") from error
    return found


async def _guest(request: web.Request) -> str:
    guest = await request.text()
    if not 1 <= len(guest) <= 100:
        raise web.HTTPBadRequest(text="the body is the guest's name, of 1 to 100 characters")
    return guest


def _number(text: str, what: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:7]) <= 999_999):
        raise web.HTTPBadRequest(text=f"{what} is a number from 1 to 999999")
    return int(text[:7])


def _shown(show: Show) -> web.Response:
    return web.json_response(show.to_json())


async def serve(port: int, snapshots: Path, gateways: list[str], snapshot_every: int) -> None:
    """Run one server until it is ended."""
    token = os.environ.get("QUORUMLOG_TOKEN")  # where the gateways require one
    async with Client(*gateways, token=token) as client:
        shows = Shows(client, Snapshots(snapshots), snapshot_every)
        runner = web.AppRunner(application(shows))
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--snapshots", type=Path, required=True, help="a folder")
    parser.add_argument("--gateways", nargs="+", required=True, help="URLs")
    parser.add_argument("--snapshot-every", type=int, default=1000, help="events of a show")
    given = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(given.port, given.snapshots, given.gateways, given.snapshot_every))


if __name__ == "__main__":
    main()
