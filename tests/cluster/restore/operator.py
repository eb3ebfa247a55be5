"""What an operator does to a cluster whose database is gone or went back: the commands of the runbook."""

import asyncio
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson
from typer.testing import CliRunner

from loadtest.cluster import Cluster
from quorumlog.cli.commands import app as cli
from tests.support.waiting import SETTLED_S, until


class Refused(Exception):
    """A command ended with another status than 0."""


class Operator:
    """One operator of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._emptied: list[str] = []
        """Bookies whose disks were lost, until they serve again."""

    def named(self, kind: str) -> list[str]:
        """The processes of a kind."""
        return [name for name in self._cluster.names if name.partition("-")[0] == kind]

    async def stop_metadata(self) -> None:
        """Stop all metadata services, as whoever replaces tables does."""
        for name in self.named("metadata"):
            if self._cluster.is_alive(name):
                await self._cluster.stop(name)

    async def kill(self, names: Sequence[str]) -> None:
        """End these processes at once."""
        for name in names:
            if self._cluster.is_alive(name):
                await self._cluster.kill(name)

    def start(self, names: Sequence[str]) -> None:
        """Start those of these processes that do not run."""
        for name in names:
            if not self._cluster.is_alive(name):
                self._cluster.start(name)

    async def wipe(self, name: str) -> None:
        """A bookie's disk is lost. From now on it is started with an operator's permission to be a new incarnation."""
        await self.kill([name])
        directory = Path(self._cluster.program(name).env["DATA_DIR"])
        await asyncio.to_thread(shutil.rmtree, directory)
        self._cluster.notify(name, AUTO_FIX_COOKIES="1")
        self._emptied.append(name)

    async def until_told(self) -> None:
        """Wait until every metadata service tells that its database lacks changes."""
        self.start(self.named("metadata"))
        for name in self.named("metadata"):
            is_reported = partial(self._is_ready, name, 503, "database-went-back")
            await until(is_reported, f"{name} tells the loss", SETTLED_S)

    async def until_well(self) -> None:
        """Start whatever is down, and wait until all of it is ready."""
        for kind in ("metadata", "bookie", "gateway", "autorecovery"):
            self.start(self.named(kind))
            for name in self.named(kind):
                await until(partial(self._is_ready, name, 200, None), f"{name} is ready", SETTLED_S)
        for name in self._emptied:
            self._cluster.notify(name, AUTO_FIX_COOKIES="0")
        self._emptied.clear()

    async def rebuild(self, *options: str) -> dict[str, Any]:
        """The report of `quorumlog metadata rebuild`. Who lost its disk has nothing to tell."""
        bookies = [name for name in self.named("bookie") if name not in self._emptied]
        self.start(bookies)
        for name in bookies:
            await until(partial(self._answers, name, "/v1/rows?limit=1"), f"{name} tells its rows")
        named = [part for name in bookies for part in ("--bookie", self._cluster.url(name))]

        async def report() -> str:
            service = self.named("metadata")[0]
            return await self._run(service, "metadata", "rebuild", "--json", *named, *options)

        reported = await until(report, "the rebuild ends", SETTLED_S, passing=(Refused,))
        found: dict[str, Any] = orjson.loads(reported)
        return found

    async def copies(self, ledger_id: int) -> list[str]:
        """What each bookie holds of a ledger's row, for who looks into a conflict."""
        reported = []
        for name in self.named("bookie"):
            found = await self._got(name, f"/v1/rows?after={ledger_id - 1}&limit=1")
            for held in [] if found is None else found[1]["ledgers"]:
                if held["ledger_id"] == ledger_id:
                    reported += [f"{name} holds {copy}" for copy in held.get("copies", ())]
        return reported

    async def accept(self) -> None:
        """Accept what is still missing, until nobody tells of anything more."""
        names = self.named("metadata")
        lost = [part for name in self._emptied for part in ("--lost", name)]

        async def is_over() -> bool:
            # Each metadata service tells of the witnesses that it was told of.
            for name in names:
                found = await self._got(name, "/v1/witnesses")
                if found and (missing := [each["witness"] for each in found[1]["missing"]]):
                    await self._run(name, "cluster", "accept", *missing, *lost)
            return all([await self._is_ready(name, 200, None) for name in names])

        await until(is_over, "the loss is accepted", SETTLED_S, passing=(Refused,))

    async def _run(self, name: str, *command: str) -> str:
        """What a command prints that asks this metadata service."""
        url = self._cluster.url(name)
        runner = CliRunner(env=self._cluster.operator_settings)
        done = await asyncio.to_thread(runner.invoke, cli, [*command, "--metadata", url])
        if done.exit_code != 0:
            raise Refused(done.output)
        return done.stdout

    async def _answers(self, name: str, path: str) -> bool:
        found = await self._got(name, path)
        return found is not None and found[0] == _OK

    async def _is_ready(self, name: str, status: int, code: str | None) -> bool:
        found = await self._got(name, "/health/ready")
        return found is not None and (found[0], found[1].get("code")) == (status, code)

    async def _got(self, name: str, path: str) -> tuple[int, Any] | None:
        try:
            url, timeout = f"{self._cluster.url(name)}{path}", aiohttp.ClientTimeout(20)
            async with (
                self._cluster.session() as session,
                session.get(url, timeout=timeout) as response,
            ):
                return response.status, await response.json()
        except (aiohttp.ClientError, TimeoutError):
            return None


_OK: Final = 200
