"""An engine for containers that belongs to this run: Debian's dockerd with folders of its own.

It runs in namespaces of its own (`tests/cluster/compose/__main__.py`), so that its bridges, its firewall rules and its
mounts are nobody else's, and end with it.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from services.local.config import ROOT
from tests.support.waiting import until_sync

_CGROUPS: Final = Path("/sys/fs/cgroup")
_WEIGHT: Final = 16 * 1024
START_S: Final = 120.0
STOP_S: Final = 180
"""All containers end first: longer than any of them may take."""


class EngineError(RuntimeError):
    """A command of the engine failed; the message is what it printed."""


class Engine:
    """One engine: its images are in `data`, which outlives it, and its sockets in `folder`."""

    def __init__(self, folder: Path, data: Path, plugins: Path) -> None:
        self._folder, self._data = folder, data
        self._socket = f"unix://{folder}/docker.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self.environ = os.environ | {
            "DOCKER_HOST": self._socket,
            "DOCKER_CONFIG": str(plugins),
            # The engine's own builder: BuildKit's plugin is another program.
            "DOCKER_BUILDKIT": "0",
            "COMPOSE_BAKE": "0",
        }

    def start(self) -> None:
        """Start the engine and wait until it answers."""
        self._weigh()
        log = (self._folder / "dockerd.log").open("ab")
        self._process = subprocess.Popen(
            [
                "dockerd", "--data-root", str(self._data), "--exec-root", str(self._folder / "exec"),
                "--pidfile", str(self._folder / "docker.pid"), "--host", self._socket,
                "--cgroup-parent", f"/{self._folder.name}", "--shutdown-timeout", str(STOP_S - 60),
            ],
            stdout=log, stderr=log, stdin=subprocess.DEVNULL,
        )  # fmt: skip

        def answers() -> bool:
            assert self._process is not None
            if self._process.poll() is not None:
                raise EngineError(f"dockerd ended: {self.log()}")
            return self._run("version").returncode == 0

        until_sync(answers, "the engine answers", START_S)

    def _weigh(self) -> None:
        """Give the containers as much of the processors as so many processes outside would have: the kernel
        weighs the group of all of them against each single process.
        """
        shares = _CGROUPS / "cpu" / self._folder.name / "cpu.shares"
        if shares.parents[1].is_dir():
            shares.parent.mkdir(exist_ok=True)
            shares.write_text(str(_WEIGHT))

    def stop(self) -> None:
        """End the engine and its containers in order."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait(STOP_S)

    def cut(self) -> None:
        """End the engine and all containers at once, as their host's power does: whatever else runs in this namespace
        of processes is theirs.
        """
        assert self._process is not None
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) not in (1, os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(entry.name), signal.SIGKILL)
        self._process.wait(STOP_S)
        (self._folder / "docker.pid").unlink(missing_ok=True)

    def log(self) -> str:
        """The last lines of the engine."""
        return "\n".join((self._folder / "dockerd.log").read_text().splitlines()[-15:])

    def docker(self, *arguments: str, stdin: bytes | None = None) -> str:
        """What a command of the engine prints. Raises: EngineError."""
        done = self._run(*arguments, stdin=stdin)
        if done.returncode:
            raise EngineError(
                f"docker {' '.join(arguments)}:\n{done.stderr.decode()}\n{self.log()}"
            )
        return done.stdout.decode()

    def compose(self, *arguments: str, **environment: str) -> str:
        """What `docker compose` prints. Raises: EngineError."""
        done = self._run("compose", *arguments, environment=environment)
        if done.returncode:
            raise EngineError(f"docker compose {' '.join(arguments)}:\n{done.stderr.decode()}")
        return done.stdout.decode()

    def inspect(self, container: str) -> dict[str, Any]:
        """All that the engine knows of a container."""
        [found] = json.loads(self.docker("inspect", container))
        assert isinstance(found, dict)
        return found

    def build(self, *arguments: str) -> None:
        """`docker compose build …` or the like, with what it prints."""
        subprocess.run(
            ["docker", *arguments], cwd=ROOT, env=self.environ, stdout=sys.stderr, check=True
        )

    def _run(
        self,
        *arguments: str,
        stdin: bytes | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            ["docker", *arguments],
            cwd=ROOT,
            env=self.environ | dict(environment),
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            check=False,
        )
