"""Seat reservations with event sourcing: each show has a log of events, and all state is derived from the log.

A show is an aggregate: its events, applied in order, give its state. A command reads to the end of the log, decides by
the state, and appends its event at the offset that it expects to be the end (`expect`). If another process has
appended first, the cluster rejects the append, and the command reads the new events and decides again. So any number
of these servers can serve the same shows at once, and a seat is never given twice.

    python examples/event_sourcing.py --port 9001 --snapshots /tmp/shows --gateways http://127.0.0.1:8080
    python examples/event_sourcing.py --port 9002 --snapshots /tmp/shows --gateways http://127.0.0.1:8081
    curl -X PUT http://127.0.0.1:9001/shows/hamlet -d 100                  # opens a show with 100 seats
    curl -X PUT http://127.0.0.1:9002/shows/hamlet/seats/7 -d ann          # 200, or 409 if the seat is taken
    curl -X DELETE http://127.0.0.1:9001/shows/hamlet/seats/7 -d ann
    curl http://127.0.0.1:9002/shows/hamlet                                # the current state
    curl 'http://127.0.0.1:9002/shows/hamlet?at=2'                         # the state after two events
    curl -X POST http://127.0.0.1:9001/shows/hamlet/rebuild                # rebuild the state without snapshots

Snapshots only save time: each contains the state after some events, and a server that starts reads only the later
events. The log is never truncated, because it is the only source of truth, and because a new program may need old events.

Guarantees: the event of a command that got status 200 is in the log, so every server applies it. If the response to a
command is lost, the command may have been carried out; repeating the command is harmless.
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
"""Maximum decisions per command, when other processes append first or the cluster does not respond."""
RETRY_S: Final = 0.2
STATE_FORM: Final = 1
"""Format of snapshots. Change it together with `Show.apply`: snapshots of other formats are ignored."""


class Event(TypedDict):
    """An event of a show. Events never change, and events of all earlier formats must stay readable."""

    kind: Literal["opened", "taken", "freed"]
    seat: int
    """The seat; in an event `opened`, the number of seats."""
    guest: str


class Refused(Exception):
    """A command that the show's state does not allow."""


@dataclass(slots=True)
class Show:
    """The state of one show.

    Invariant: the state depends only on the first `version` events, not on the clock or on random choices.
    """

    version: int = 0
    seats: int = 0
    taken: dict[int, str] = field(default_factory=dict)

    def apply(self, event: Event) -> None:
        """Apply the next event."""
        if event["kind"] == "opened":
            self.seats = event["seat"]
        elif event["kind"] == "taken":
            self.taken[event["seat"]] = event["guest"]
        else:
            del self.taken[event["seat"]]
        self.version += 1

    # Commands return an event, and change nothing. They return None if there is nothing to do, so repeats are harmless.

    def open(self, seats: int) -> Event | None:
        """Open the show with a number of seats."""
        if self.seats not in (0, seats):
            raise Refused(f"the show is already open with {self.seats} seats")
        return None if self.seats else Event(kind="opened", seat=seats, guest="")

    def take(self, seat: int, guest: str) -> Event | None:
        """Reserve a seat for a guest."""
        if not 1 <= seat <= self.seats:
            raise Refused(f"the show has no seat {seat}: its seats are 1 to {self.seats}")
        if self.taken.get(seat, guest) != guest:
            raise Refused(f"seat {seat} is taken by another guest")
        return None if seat in self.taken else Event(kind="taken", seat=seat, guest=guest)

    def free(self, seat: int, guest: str) -> Event | None:
        """Cancel a guest's reservation of a seat."""
        if seat not in self.taken:
            return None
        if self.taken[seat] != guest:
            raise Refused(f"seat {seat} is reserved by another guest")
        return Event(kind="freed", seat=seat, guest=guest)

    def to_json(self) -> dict[str, Any]:
        """The state as JSON, for responses and snapshots."""
        taken = {str(seat): guest for seat, guest in sorted(self.taken.items())}
        return {"version": self.version, "seats": self.seats, "taken": taken}

    @classmethod
    def of_json(cls, shown: dict[str, Any]) -> "Show":
        """Parse the state of a snapshot."""
        taken = {int(seat): guest for seat, guest in shown["taken"].items()}
        return cls(shown["version"], shown["seats"], taken)


class Snapshots:
    """A folder with one state per show. Servers may share the folder, because every snapshot is correct."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def load(self, name: str) -> Show:
        """The latest saved state of a show, or the empty state."""
        with contextlib.suppress(FileNotFoundError):
            kept = orjson.loads(self._file(name).read_bytes())
            if kept["form"] == STATE_FORM:
                return Show.of_json(kept["state"])
        return Show()

    def save(self, name: str, state: dict[str, Any]) -> None:
        """Save a state atomically. The file is not synced: if it is lost, the server reads more events instead."""
        draft = self._folder / f"{uuid.uuid4().hex}.draft"
        draft.write_bytes(orjson.dumps({"form": STATE_FORM, "state": state}))
        draft.replace(self._file(name))

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.snapshot"


class Shows:
    """All shows, each with the state that this server has read so far."""

    def __init__(self, client: Client, snapshots: Snapshots, snapshot_every: int) -> None:
        self._client, self._snapshots, self._every = client, snapshots, snapshot_every
        self._known: dict[str, Show] = {}
        self._turns: dict[str, asyncio.Lock] = {}

    async def create(self, name: str, seats: int) -> Show:
        """Open a show, and create its log if it does not exist."""
        await self._client.create_log(_log_of(name))
        return await self.command(name, lambda show: show.open(seats))

    async def command(self, name: str, decide: Callable[[Show], Event | None]) -> Show:
        """Run a command on the newest state, and return the state after it.

        Raises: Refused; QuorumLogError. If the error's `outcome` is unknown, the command may have been carried out.
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
        raise Refused("too many concurrent commands for this show: try again")

    async def _append(self, log: Log, event: Event, version: int) -> bool:
        """Append an event, unless the log has events that the decision did not see. False: decide again.

        If the response is lost, the event may be in the log, or may still arrive. Both are harmless: the next decision
        either reads the event, or appends another event at its offset, and the late event is then rejected.
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
        """The current state of a show. Raises: NoSuchLog."""
        async with self._turn(name):
            return await self._read_on(name, self._client.log(_log_of(name)))

    async def past(self, name: str, version: int | None = None) -> Show:
        """A show's state after `version` events, or after all, computed from the first event on."""
        show, log = Show(), self._client.log(_log_of(name))
        async for record in log.records():
            if show.version == version:
                break
            show.apply(orjson.loads(record.value))
        return show

    async def rebuild(self, name: str) -> Show:
        """Discard the state and compute it again from the events."""
        async with self._turn(name):
            show = self._known[name] = await self.past(name)
            await asyncio.to_thread(self._snapshots.save, name, show.to_json())
            return show

    async def _read_on(self, name: str, log: Log) -> Show:
        """Apply the new events, and save a snapshot after every `snapshot_every` events."""
        if name not in self._known:
            self._known[name] = await asyncio.to_thread(self._snapshots.load, name)
        show = self._known[name]
        before = show.version
        async for record in log.records(show.version):
            assert record.offset == show.version, "events must arrive in order, without gaps"
            show.apply(orjson.loads(record.value))
        if show.version // self._every > before // self._every:
            await asyncio.to_thread(self._snapshots.save, name, show.to_json())
        return show

    def _turn(self, name: str) -> asyncio.Lock:
        """A lock that runs a show's commands one at a time in this process. `expect` detects conflicts between processes."""
        return self._turns.setdefault(name, asyncio.Lock())


def _log_of(name: str) -> str:
    return f"show-{name}"


def application(shows: Shows) -> web.Application:
    """The HTTP interface of the shows."""

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
        # Shielded, because a client that disconnects must not cancel a command halfway.
        found: web.StreamResponse = await asyncio.shield(asyncio.ensure_future(handler(request)))
    except Refused as error:
        raise web.HTTPConflict(text=str(error)) from error
    except NoSuchLog as error:
        raise web.HTTPNotFound(text="no such show: create it with PUT /shows/NAME") from error
    except QuorumLogError as error:
        raise web.HTTPServiceUnavailable(text=f"{error.code}, {error.outcome}") from error
    return found


async def _guest(request: web.Request) -> str:
    guest = await request.text()
    if not 1 <= len(guest) <= 100:
        raise web.HTTPBadRequest(text="the body must be the guest's name, with 1 to 100 characters")
    return guest


def _number(text: str, what: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:7]) <= 999_999):
        raise web.HTTPBadRequest(text=f"{what} must be a number from 1 to 999999")
    return int(text[:7])


def _shown(show: Show) -> web.Response:
    return web.json_response(show.to_json())


async def serve(port: int, snapshots: Path, gateways: list[str], snapshot_every: int) -> None:
    """Run a server until it is cancelled."""
    token = os.environ.get("QUORUMLOG_TOKEN")  # needed if the gateways require tokens
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
    parser.add_argument("--snapshots", type=Path, required=True, help="folder for snapshots")
    parser.add_argument("--gateways", nargs="+", required=True, help="URLs of gateways")
    parser.add_argument("--snapshot-every", type=int, default=1000, help="events per snapshot")
    given = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(given.port, given.snapshots, given.gateways, given.snapshot_every))


if __name__ == "__main__":
    main()
