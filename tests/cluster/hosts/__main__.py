"""`python -m tests.cluster.hosts`: an operator makes three hosts from docs/learn/production.md, and one is taken away (`make hosts`).

Each command of the page is run, in its order, where the page says, while clients append to a log through each gateway. The
judge reads all that was acknowledged at the end.
"""

import asyncio
import compileall
import json
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

from loadtest.stores import scratch
from services.local.process import Program, start
from tests.cluster.chaos.machine import Unusable
from tests.cluster.hosts.machines import CommandFailed, Machines
from tests.cluster.hosts.page import ADMINISTRATION, HOSTS, ROOT, sections
from tests.cluster.hosts.stores import HostStores
from tests.support.waiting import SETTLED_S, until

_LOST: Final = "host-3"
_MORE: Final = 20
"""So many acknowledgements of each client show that appends go on (taste)."""


class Story:
    """What happens, one section of the page after another."""

    def __init__(self, machines: Machines, stores: HostStores) -> None:
        self._machines = machines
        self._stores = stores
        self._left = sections()
        self._page = sections()
        self._clients: subprocess.Popen[bytes] | None = None

    async def play(self) -> tuple[int, int]:
        """Returns how many records were acknowledged, and how many of them are lost."""
        for host in self._machines.hosts.values():
            await host.power_on()
        await self._build()
        self._start_clients()
        await self._appends_go_on()
        await self._do("Is everything there?")
        await until(lambda: len(self._bookies()) == 6, "all bookies are there", SETTLED_S)
        await self._do("A host for maintenance")
        await self._appends_go_on()
        await self._lose()
        await self._replace()
        await self._renew()
        await self._appends_go_on()
        assert not self._left, f"commands that were not run: {list(self._left)}"
        return await self._judged()

    async def _build(self) -> None:
        self._set_up("Users and folders")
        self._set_up("Certificates")
        await self._stores.start_primary()
        self._set_up("Postgres and Redis")
        await self._stores.start_standby()
        await self._stores.start_redis((self._machines.desk / "redis-url").read_text().strip())
        self._set_up("Settings")
        await self._do("Units")
        await self._do("The first token")
        assert "ann" in await self._do("The first append")

    async def _lose(self) -> None:
        host = self._machines.hosts[_LOST]
        _say(f"{_LOST} is taken away: its link is down")
        host.plug("down")
        await self._appends_go_on()
        _say(f"{_LOST} is taken away: its processes are killed")
        host.power_off()
        await self._do("A host is lost")
        await self._appends_go_on()
        # The page says a minute; nothing else depends on it.
        await until(
            lambda: bool(self._operate("quorumlog repair delay 1 && echo set")),
            "the delay is short",
            SETTLED_S,
        )
        await until(self._is_repaired, "what the lost host had is copied", SETTLED_S)
        _say(f"what {_LOST} had is copied to the others")

    async def _replace(self) -> None:
        host = self._machines.hosts[_LOST]
        host.new_machine()
        host.plug("up")
        await host.power_on()
        self._do_again("Users and folders")
        await self._do("A new machine in its place")
        for section in ("Certificates", "Settings", "Units"):
            self._do_again(section)
        await until(
            lambda: {"bookie-3a@2", "bookie-3b@2"} <= self._bookies(),
            "the bookies of the new machine are there",
            SETTLED_S,
        )
        _say(f"{_LOST} is a new machine")

    async def _renew(self) -> None:
        self._set_up("Renewing a certificate")
        host = self._machines.hosts["host-1"]
        await until(
            lambda: host.log("quorumlog-bookie@a").count("certificate-loaded") == 2,
            "the bookie has taken its new certificate",
        )

    def _set_up(self, section: str) -> None:
        """Do what asks no service, and is done once."""
        _say(section)
        for block in self._left.pop(section):
            for place in block.places:
                self._run(place, block.script)

    async def _do(self, section: str) -> str:
        """Do what asks services, again and again: on a machine that stalls they miss deadlines and heartbeats."""
        _say(section)
        said: list[str] = []
        for block in self._left.pop(section):
            for place in block.places:
                run = partial(self._note, said, place, block.script)
                await until(run, section, SETTLED_S, passing=(CommandFailed,))
        return "".join(said)

    def _note(self, said: list[str], place: str, script: str) -> bool:
        said.append(self._run(place, script))
        return True

    def _run(self, place: str, script: str) -> str:
        given = {"ADMIN_DSN": self._stores.admin_dsn}
        given["PATH"] = f"{self._machines.environment['PATH']}:{self._stores.binaries}"
        return self._machines.run(place, script, **given)

    def _do_again(self, section: str) -> None:
        """For the new machine."""
        for block in self._page[section]:
            if block.places == HOSTS:
                self._machines.run(_LOST, block.script)

    def _operate(self, command: str) -> str:
        """What a command of the operator prints; nothing where a service did not answer in time."""
        try:
            return self._run(ADMINISTRATION, f". ./operator.sh\n{command}\n")
        except CommandFailed:
            return ""

    def _bookies(self) -> set[str]:
        """As they are registered; one that misses heartbeats on a slow machine is among them."""
        rows = map(json.loads, self._operate("quorumlog bookie list --json").splitlines())
        return {row["id"] for row in rows}

    def _is_repaired(self) -> bool:
        for bookie in ("bookie-3a", "bookie-3b"):
            reported = self._operate(f"quorumlog bookie info {bookie} --json")
            if not reported or json.loads(reported)["ledgers"] or json.loads(reported)["repairs"]:
                return False
        return True

    def _start_clients(self) -> None:
        desk = self._machines.desk
        urls = [f"https://{host}.example:8080" for host in HOSTS]
        environment = {
            **self._machines.environment,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'shared'}",
            "QUORUMLOG_TOKEN_FILE": str(desk / "admin.token"),
            "SSL_CERT_FILE": str(desk / "certificates/ca.pem"),
        }
        argv = (sys.executable, "-m", "tests.cluster.hosts.appender", str(desk / "end"), *urls)
        self._clients = start(Program("clients", argv, environment, cwd=desk), desk / "clients.log")

    def _reported(self) -> list[str]:
        assert self._clients is not None
        reported = (self._machines.desk / "clients.log").read_text()
        assert self._clients.poll() in (None, 0), reported[-4000:]
        return reported.splitlines()

    async def _appends_go_on(self) -> None:
        before = self._counts()
        await until(
            lambda: all(self._counts()[f"log-{at}"] >= before[f"log-{at}"] + _MORE for at in range(3)),
            "each client has appended more",
            SETTLED_S,
        )  # fmt: skip

    def _counts(self) -> Counter[str]:
        return Counter(line.partition(" ")[0] for line in self._reported())

    async def _judged(self) -> tuple[int, int]:
        (self._machines.desk / "end").touch()
        await until(lambda: self._reported()[-1].startswith("end "), "all is read back", SETTLED_S)
        _, acknowledged, lost = self._reported()[-1].split()
        return int(acknowledged), int(lost)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    for code in ("services", "shared"):
        # The hosts' services are users who can't write here.
        compileall.compile_dir(ROOT / code, quiet=2)
    with ExitStack() as stack:
        folder = stack.enter_context(scratch("ql-hosts-"))
        try:
            machines = Machines(folder, stack)
        except Unusable as error:
            _say(f"hosts: skipped, since this machine can't have three hosts: {error}")
            return 0
        stores = HostStores(machines.hosts, stack)
        try:
            acknowledged, lost = asyncio.run(Story(machines, stores).play())
        except BaseException:
            _show_logs(folder)
            raise
    _say(f"hosts: {len(HOSTS)} hosts, 1 taken away, {acknowledged} acknowledged, {lost} lost")
    return 1 if lost else 0


def _show_logs(folder: Path) -> None:
    for log in sorted(folder.glob("host-*/log/*.log")):
        lines = log.read_text(errors="replace").splitlines()[-8:]
        sys.stderr.write("\n".join((f"--- {log.relative_to(folder)}", *lines, "")))


if __name__ == "__main__":
    raise SystemExit(main())
