"""A key-value store with a write-ahead log, and a standby that is always up to date.

BookKeeper's overview describes this application. All servers share a folder, which contains the
log's name and the snapshots. Every server starts as a standby: it reads the newest snapshot, and
then follows the log without fencing any writer. `POST /takeover` makes a server the active server:
it opens the log, which fences the previous writer, and reads to the log's end. The next write of
the previous active server fails, and makes that server a standby. When to take over, and with which
server, must be decided outside of this program (by a person, or by a lease).

    python examples/wal_store.py --place /srv/store --port 9001 --gateways http://127.0.0.1:8080
    python examples/wal_store.py --place /srv/store --port 9002 --gateways http://127.0.0.1:8080
    curl -X POST http://127.0.0.1:9001/takeover
    curl -X PUT http://127.0.0.1:9001/keys/colour -d blue
    curl http://127.0.0.1:9001/keys/colour

Guarantees: every server that takes over later has all acknowledged changes. It may also have
changes that were not acknowledged.
"""

import argparse
import asyncio
import contextlib
import os
import sys
import uuid
from pathlib import Path
from typing import Final

import orjson
from aiohttp import web

from quorumlog.client import Client, Log, Producer
from quorumlog.errors import OffsetTruncated, QuorumLogError

RETRY_S: Final = 1.0
"""Pause between attempts to follow a log that can't be read now."""


class Place:
    """The shared folder, with the log's name and the snapshots.

    Invariant: a snapshot is never replaced, and never deleted while it is the newest, because a fenced
    server may still be saving an old one.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._name = folder / "log"

    def log_name(self) -> str:
        """The log's name, which the first server chooses."""
        draft = self._draft()
        draft.write_text(f"wal-{uuid.uuid4().hex}")
        with contextlib.suppress(FileExistsError):
            os.link(draft, self._name)  # a rename would replace another server's name
        draft.unlink()
        return self._name.read_text()

    def load(self) -> tuple[int, dict[str, str]]:
        """The values of the newest snapshot, and the offset of the first change after them."""
        while True:
            newest = max(self._snapshots(), default=None)
            if newest is None:
                return 0, {}
            with contextlib.suppress(FileNotFoundError):  # a newer snapshot has replaced it since
                return newest[0], orjson.loads(newest[1].read_bytes())

    def save(self, following: int, values: dict[str, str]) -> None:
        """Save a snapshot atomically, and delete the previous snapshots."""
        draft = self._draft()
        with draft.open("wb") as file:
            file.write(orjson.dumps(values))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._folder / f"{following}.snapshot")
        for _, old in sorted(self._snapshots())[:-1]:
            old.unlink(missing_ok=True)

    def _snapshots(self) -> list[tuple[int, Path]]:
        return [(int(path.stem), path) for path in self._folder.glob("*.snapshot")]

    def _draft(self) -> Path:
        return self._folder / f"{uuid.uuid4().hex}.draft"


class Store:
    """The store's values, and the log of their changes.

    Invariants: `values` is the result of all changes below `following`, in the log's order, and of no others;
    only the active server writes; every change in `values` is in the log.
    """

    def __init__(self, log: Log, place: Place, owner: str, snapshot_every: int) -> None:
        self._log, self._place, self._owner = log, place, owner
        self._snapshot_every = snapshot_every
        self._producer: Producer | None = None
        self._turn = asyncio.Lock()
        self._tail: asyncio.Task[None] | None = None
        self.following, self.values = place.load()
        self._snapshot_at = self.following

    @property
    def is_active(self) -> bool:
        """Whether this server is the active server."""
        return self._producer is not None

    def stand_by(self) -> None:
        """Become a standby, and follow the log."""
        self._producer = None
        self._tail = asyncio.get_running_loop().create_task(self._follow())

    async def stop(self) -> None:
        """Stop following the log."""
        if self._tail is not None:
            self._tail.cancel()
            await asyncio.wait([self._tail])

    async def take_over(self) -> None:
        """Become the active server: fence the previous server, and read the log to its end."""
        async with self._turn:
            if self.is_active:
                return
            await self.stop()
            try:
                end = await self._log.open(self._owner)
                while self.following < end:
                    await self._read_to(end)
            except BaseException:
                self.stand_by()
                raise
            self._producer = self._log.producer()

    async def change(self, change: dict[str, str | None]) -> None:
        """Set keys, or delete the keys that are set to None. Returns when the change is durable.

        Changes may be submitted concurrently: they share requests, and are acknowledged in the order of
        submission.
        Raises: QuorumLogError, after which this server is a standby. If the error's `outcome` is unknown, the
        next active server may have the change.
        """
        async with self._turn:
            producer = self._producer
            if producer is None:
                raise web.HTTPServiceUnavailable(text="this is a standby: use the active server")
            submitted = await producer.submit(orjson.dumps(change))
        try:
            done = await submitted
        except QuorumLogError:
            if self._producer is producer:
                self.stand_by()
            raise
        self._apply(done.first_offset, change)
        if self.following - self._snapshot_at >= self._snapshot_every:
            self._snapshot_at = self.following
            await self._snapshot()

    def _apply(self, offset: int, change: dict[str, str | None]) -> None:
        assert offset == self.following, "changes must be applied in order, without gaps"
        for key, value in change.items():
            if value is None:
                self.values.pop(key, None)
            else:
                self.values[key] = value
        self.following = offset + 1

    async def _snapshot(self) -> None:
        """Save a snapshot, and then truncate the log before it."""
        following, values = self.following, dict(self.values)
        await asyncio.to_thread(self._place.save, following, values)
        with contextlib.suppress(QuorumLogError):  # the next truncation includes this one
            await self._log.truncate(following)

    async def _follow(self) -> None:
        """Apply new changes, until cancelled."""
        while True:
            try:
                async for record in self._log.tail(self.following):
                    self._apply(record.offset, orjson.loads(record.value))
            except OffsetTruncated:
                self._reload()
            except QuorumLogError as error:
                print(f"can't follow the log: {error}; retrying", file=sys.stderr)
                await asyncio.sleep(RETRY_S)

    async def _read_to(self, end: int) -> None:
        try:
            page = await self._log.read(self.following, limit=1000)
        except OffsetTruncated:
            self._reload()
            return
        for record in page.records:
            if record.offset < end:
                self._apply(record.offset, orjson.loads(record.value))

    def _reload(self) -> None:
        """Load the newest snapshot, because the log no longer has the next change."""
        following, values = self._place.load()
        if following > self.following:
            self.following, self.values = following, values


def application(store: Store) -> web.Application:
    """The HTTP interface of the store."""

    async def get(request: web.Request) -> web.Response:
        key = request.match_info["key"]
        if key not in store.values:
            raise web.HTTPNotFound
        return web.Response(text=store.values[key])

    async def put(request: web.Request) -> web.Response:
        return await changed({request.match_info["key"]: await request.text()})

    async def delete(request: web.Request) -> web.Response:
        return await changed({request.match_info["key"]: None})

    async def changed(change: dict[str, str | None]) -> web.Response:
        # Shielded, because a client that disconnects must not cancel a change halfway.
        try:
            await asyncio.shield(asyncio.ensure_future(store.change(change)))
        except QuorumLogError as error:
            raise web.HTTPServiceUnavailable(text=f"{error.code}, {error.outcome}") from error
        return web.Response(status=204)

    async def take_over(request: web.Request) -> web.Response:
        await store.take_over()
        return await state(request)

    async def state(_request: web.Request) -> web.Response:
        role = "active" if store.is_active else "standby"
        return web.json_response({"role": role, "following": store.following})

    app = web.Application()
    app.router.add_get("/keys/{key}", get)
    app.router.add_put("/keys/{key}", put)
    app.router.add_delete("/keys/{key}", delete)
    app.router.add_post("/takeover", take_over)
    app.router.add_get("/state", state)
    return app


async def serve(
    place: Path, port: int, gateways: list[str], *, snapshot_every: int, roll_entries: int
) -> None:
    """Run a server until it is cancelled."""
    known = Place(place)
    token = os.environ.get("QUORUMLOG_TOKEN")  # needed if the gateways require tokens
    async with Client(*gateways, token=token) as client:
        log = await client.create_log(known.log_name(), roll_entries=roll_entries)
        store = Store(log, known, f"port {port}", snapshot_every)
        store.stand_by()
        runner = web.AppRunner(application(store))
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()
            await store.stop()


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--place", type=Path, required=True, help="folder that all servers share")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--gateways", nargs="+", required=True, help="URLs of gateways")
    parser.add_argument("--snapshot-every", type=int, default=10_000, help="changes per snapshot")
    parser.add_argument("--roll-entries", type=int, default=10_000, help="entries per ledger")
    given = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(
            serve(
                given.place,
                given.port,
                given.gateways,
                snapshot_every=given.snapshot_every,
                roll_entries=given.roll_entries,
            )
        )


if __name__ == "__main__":
    main()
