"""Hosts on a network of their own: each has a network card, a name, a disk, processes and a power button.

A host is a set of namespaces (network, mounts, processes, name) around `init.py`; when that is killed the kernel
kills all that runs there, as a power cut does. What a host writes to /etc and /var/lib stays in its folder, which is its
disk. This process is the administration host.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from services.local.process import Program, start
from tests.cluster.chaos.machine import call, need, own_mounts, own_network
from tests.cluster.hosts.page import HOSTS, ROOT
from tests.support.waiting import until

_BRIDGE: Final = "hosts0"
_NET: Final = "10.77.1"
_OVERLAY: Final = "mount -t overlay overlay -o lowerdir={0},upperdir={1},workdir={1}.work {0}"
_POWER_ON: Final = """
set -e
hostname {name}
{overlays}
mount --bind {names} /etc/hosts
mkdir -p /var/lib/quorumlog
mount --bind {home}/disk /var/lib/quorumlog
mount -t tmpfs tmpfs /opt
mkdir /opt/quorumlog
mount --bind {root} /opt/quorumlog
exec {python} {root}/tests/cluster/hosts/init.py {home}
"""
_SYSTEMCTL: Final = (
    '#!/bin/sh\nexec {python} {root}/tests/cluster/hosts/init.py --ask "$HOST_HOME/socket" "$@"\n'
)
_SCP: Final = """#!/bin/sh
# scp FILE… root@HOST.example:PATH, by a copy into the mounts of the host
set -e
for to; do :; done
host=${to#*@}; host=${host%%.*}; files=""
while [ $# -gt 1 ]; do files="$files $(realpath "$1")"; shift; done
exec nsenter -m -t "$(cat "$HOSTS_HOME/$host/pid")" cp -- $files "${to#*:}"
"""


class CommandFailed(Exception):
    """A command of the page failed; says what it printed."""


@dataclass(slots=True)
class Host:
    """One of the three machines."""

    name: str
    home: Path
    power: subprocess.Popen[bytes] | None = None
    pid: int = 0
    prefix: tuple[str, ...] = field(default=())
    """Runs a command on the host."""

    @property
    def number(self) -> int:
        return int(self.name[-1])

    @property
    def address(self) -> str:
        return f"{_NET}.{10 + self.number}"

    def log(self, unit: str) -> str:
        """All that a service has written."""
        return (self.home / "log" / f"{unit}.log").read_text(errors="replace")

    async def power_on(self) -> None:
        """Start it, and what is enabled there."""
        overlays = {Path("/etc"): "etc", Path("/var/lib"): "lib"}
        overlays |= {folder: f"closed{at}" for at, folder in enumerate(_closed())}
        for name in (*overlays.values(), "disk"):
            (self.home / name).mkdir(parents=True, exist_ok=True)
            (self.home / f"{name}.work").mkdir(exist_ok=True)
        script = self.home / "power-on.sh"
        script.write_text(
            _POWER_ON.format(
                name=self.name, home=self.home, names=self.home.parent / "names", root=ROOT,
                python=sys.executable,
                overlays="\n".join(
                    _OVERLAY.format(over, self.home / name) for over, name in overlays.items()
                ),
            )
        )  # fmt: skip
        (self.home / "socket").unlink(missing_ok=True)
        argv = (
            "nsenter", f"--net=/run/netns/{self.name}", "unshare", "--mount", "--uts", "--ipc", "--pid",
            "--mount-proc", "--fork", "--kill-child", "sh", str(script),
        )  # fmt: skip
        log = self.home / "console"
        power = self.power = start(Program(self.name, argv, dict(os.environ)), log)

        def is_up() -> bool:
            assert power.poll() is None, log.read_text()
            return (self.home / "socket").exists()

        await until(is_up, f"{self.name} is up")
        self.pid = _child(power.pid)
        (self.home / "pid").write_text(str(self.pid))
        self.prefix = ("nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-p", "-n")

    def power_off(self) -> None:
        """Kill all of its processes at once."""
        if self.power is not None:
            self.power.kill()
            self.power.wait()

    def new_machine(self) -> None:
        """Empty disks, of a host that is off."""
        shutil.rmtree(self.home)
        self.home.mkdir()

    def plug(self, state: str) -> None:
        """The network cable: `up` or `down`."""
        call("ip", "link", "set", f"hosts{self.number}", state)


class Machines:
    """All hosts, and this one."""

    def __init__(self, home: Path, stack: ExitStack) -> None:
        """Builds the network. Raises: Unusable."""
        need("ip", "nsenter", "unshare", "mount", "useradd", "curl", "openssl")
        own_mounts()
        own_network()
        self._administration = home / "administration"
        self._tools = home / "tools"
        for folder in (self._administration, self._tools):
            folder.mkdir()
        self.hosts = {name: Host(name, home / name) for name in HOSTS}
        names = [f"{host.address} {name}.example {name}" for name, host in self.hosts.items()]
        (home / "names").write_text("\n".join(("127.0.0.1 localhost", *names, "")))
        call("mount", "--bind", str(home / "names"), "/etc/hosts")
        self._make_tools()
        call("ip", "link", "add", _BRIDGE, "type", "bridge")
        call("ip", "address", "add", f"{_NET}.1/24", "dev", _BRIDGE)
        call("ip", "link", "set", _BRIDGE, "up")
        for host in self.hosts.values():
            host.home.mkdir()
            _connect(host)
            stack.callback(host.power_off)
        self.environment = {
            "PATH": f"{self._tools}:{ROOT / '.venv/bin'}:{os.environ['PATH']}",
            "HOME": "/nowhere",
            "HOSTS_HOME": str(home),
            # For a machine that is slow.
            "QUORUMLOG_TIMEOUT": "100",
        }

    def _make_tools(self) -> None:
        texts = {"systemctl": _SYSTEMCTL.format(python=sys.executable, root=ROOT), "scp": _SCP}
        for name, text in texts.items():
            tool = self._tools / name
            tool.write_text(text)
            tool.chmod(0o755)

    @property
    def desk(self) -> Path:
        """The folder in which the operator works."""
        return self._administration

    def run(self, place: str, script: str, **environment: str) -> str:
        """Run a script at a place of the page, and return what it prints. Raises: CommandFailed."""
        prefix: Sequence[str] = ()
        given = {**self.environment, **environment}
        if host := self.hosts.get(place):
            prefix = host.prefix
            given["HOST_HOME"] = str(host.home)
        done = subprocess.run(
            [*prefix, "sh", "-euc", script], cwd=None if prefix else self.desk, env=given,
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        if done.returncode:
            raise CommandFailed(f"at {place}:\n{script}{done.stdout}{done.stderr}")
        return done.stdout


def _child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def _connect(host: Host) -> None:
    call("ip", "netns", "add", host.name)
    card = ("peer", "name", "eth0", "netns", host.name)
    call("ip", "link", "add", f"hosts{host.number}", "type", "veth", *card)
    call("ip", "link", "set", f"hosts{host.number}", "master", _BRIDGE, "up")
    for words in (
        f"address add {host.address}/24 dev eth0",
        "link set eth0 up",
        "link set lo up",
    ):
        call("ip", "-n", host.name, *words.split())


def _closed() -> list[Path]:
    """Folders above the programs that the users of services may not enter here."""
    above = {*Path(sys.executable).resolve().parents, *ROOT.parents}
    return sorted(folder for folder in above if not folder.stat().st_mode & 0o001)
