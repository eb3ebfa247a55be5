"""The first process of a host: a small stand-in for systemd, which starts services from the units of deploy/systemd.

It does of a unit what decides whether a service starts and stays: user, environment files, command, folders, restarts.
What confines a service (ProtectSystem and the like) it leaves out. `python init.py --ask SOCKET enable --now UNIT…` is
`systemctl`.
"""

import asyncio
import contextlib
import grp
import json
import os
import pwd
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_UNITS: Final = Path("/etc/systemd/system")
_STATE: Final = Path("/var/lib")
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Unit:
    """A unit's settings, with those of the drop-in that all units share."""

    def __init__(self, name: str, folder: Path = _UNITS) -> None:
        self.name = name
        prefix, at, self.instance = name.partition("@")
        kind = prefix.partition("-")[0]
        self._files = [folder / f"{prefix}{at}.service", *folder.glob(f"{kind}-.service.d/*.conf")]
        if not self._files[0].exists():
            raise FileNotFoundError(f"{self._files[0]}: no such unit")

    def values(self, key: str) -> list[str]:
        """All values of a setting."""
        found = []
        for file in self._files:
            _, _, text = file.read_text().partition("[Service]\n")
            service, _, _ = text.partition("\n[")
            found += [value for name, value in _settings(service) if name == key]
        return [value.replace("%i", self.instance) for value in found]

    def value(self, key: str, default: str = "") -> str:
        """The last value of a setting."""
        return (self.values(key) or [default])[-1]

    def environment(self) -> dict[str, str]:
        """What the service gets: nothing but what the unit and its files say."""
        found = dict(line.split("=", 1) for line in self.values("Environment"))
        for file in self.values("EnvironmentFile"):
            found |= dict(_settings(Path(file).read_text()))
        return {"PATH": _PATH, **found}


def _settings(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        if line and not line.startswith("#"):
            key, _, value = line.partition("=")
            yield key, value


class _Service:
    """A unit's process, started again when it ends."""

    def __init__(self, unit: Unit, logs: Path) -> None:
        self._unit = unit
        self._log = logs / f"{unit.name}.log"
        self._process: asyncio.subprocess.Process | None = None
        self._life: asyncio.Task[None] | None = None

    @property
    def is_active(self) -> bool:
        return self._life is not None and not self._life.done()

    async def start(self) -> None:
        if not self.is_active:
            await self._spawn()
            self._life = asyncio.create_task(self._live())

    async def stop(self) -> None:
        if self._life is None or self._process is None:
            return
        self._life.cancel()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(
                    self._process.wait(), float(self._unit.value("TimeoutStopSec", "90"))
                )
            except TimeoutError:
                self._process.kill()
        await asyncio.gather(self._life, return_exceptions=True)

    async def _spawn(self) -> None:
        unit, user = self._unit, self._unit.value("User")
        owner = pwd.getpwnam(user)
        for name in unit.values("StateDirectory"):
            folder = _STATE / name
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(int(unit.value("StateDirectoryMode", "0755"), 8))
            shutil.chown(folder, owner.pw_uid, owner.pw_gid)
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *shlex.split(unit.value("ExecStart")),
                env=unit.environment(),
                cwd=unit.value("WorkingDirectory", "/"),
                user=owner.pw_uid,
                group=grp.getgrgid(owner.pw_gid).gr_gid,
                extra_groups=[],
                umask=int(unit.value("UMask", "0022"), 8),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    async def _live(self) -> None:
        prevent = self._unit.value("RestartPreventExitStatus").split()
        while self._process is not None:
            status = await self._process.wait()
            if self._unit.value("Restart") != "always" or str(status) in prevent:
                return
            await asyncio.sleep(float(self._unit.value("RestartSec", "0.1")))
            await self._spawn()


class _Init:
    def __init__(self, home: Path) -> None:
        self._enabled = home / "enabled"
        self._logs = home / "log"
        self._services: dict[str, _Service] = {}

    async def boot(self) -> None:
        for name in self._enabled.read_text().split() if self._enabled.exists() else ():
            await self._service(name).start()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            said = await self._do(json.loads(await reader.readline()))
        except (OSError, ValueError, KeyError) as error:
            said = f"{type(error).__name__}: {error}"
        writer.write(json.dumps(said).encode())
        writer.close()

    async def _do(self, words: list[str]) -> str:
        verb, *names = (word for word in words if word != "--now")
        if verb == "enable":
            self._enabled.write_text("\n".join(names))
        for service in map(self._service, names):
            if verb in ("stop", "restart"):
                await service.stop()
            if verb in ("enable", "start", "restart"):
                await service.start()
            if verb == "is-active" and not service.is_active:
                return "inactive"
        if verb not in ("enable", "start", "stop", "restart", "is-active", "daemon-reload"):
            return f"systemctl {verb}: not here"
        return ""

    def _service(self, name: str) -> _Service:
        if name not in self._services:
            self._services[name] = _Service(Unit(name), self._logs)
        return self._services[name]


async def _run(home: Path) -> None:
    init = _Init(home)
    (home / "log").mkdir(exist_ok=True)
    (home / "socket").unlink(missing_ok=True)
    async with await asyncio.start_unix_server(init.answer, home / "socket") as server:
        await init.boot()
        await server.serve_forever()


def _ask(path: str, words: list[str]) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(json.dumps(words).encode() + b"\n")
        with connection.makefile() as answer:
            if said := json.loads(answer.read()):
                sys.exit(said)


if __name__ == "__main__":
    if sys.argv[1] == "--ask":
        _ask(sys.argv[2], sys.argv[3:])
    else:
        os.umask(0o022)
        asyncio.run(_run(Path(sys.argv[1])))
