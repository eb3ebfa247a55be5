"""Stand-ins for the images that compose.yaml names: no registry of images is needed, nor reached.

A Debian by debootstrap has the programs, of Debian's versions; what an official image does at its start is done here as
far as compose.yaml relies on it. The stand-in for Python's image has the wheels of the lock file, so that the image of the
services is built by its own Dockerfile, without a network.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from services.local.config import ROOT
from tests.cluster.compose.engine import Engine
from tests.cluster.compose.files import read_compose

BUILD: Final = ROOT / "build" / "compose"
"""What takes long to make is kept here for the next run; `make clean` removes it."""

ENGINE: Final = BUILD / "engine"
PLUGINS: Final = BUILD / "docker"
_PLUGIN: Final = "github.com/docker/compose/v2"
_PLUGIN_VERSION: Final = "v2.40.3"
_ROOTFS: Final = BUILD / "debian"
_CONTEXT: Final = BUILD / "context"
_WHEELS: Final = _CONTEXT / "wheels"
_BASE: Final = "quorumlog-standin"
_PACKAGES: Final = ("docker.io", "debootstrap", "iptables", "tini")
_DEBIAN: Final = "ca-certificates,python3,python3-venv,postgresql,redis-server,haproxy,busybox"

_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})

_POSTGRES_START: Final = r"""#!/bin/sh
set -e
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    initdb --username "$POSTGRES_USER" --pwfile "$POSTGRES_PASSWORD_FILE" --auth-local trust --auth-host scram-sha-256
    echo 'host all all all scram-sha-256' >> "$PGDATA/pg_hba.conf"
    pg_ctl --wait -o '-c listen_addresses=' start
    createdb --username "$POSTGRES_USER" "$POSTGRES_USER"
    pg_ctl --wait stop
fi
exec postgres -c 'listen_addresses=*'
"""

_PYTHON: Final = r"""
COPY wheels /wheels
RUN ln -s python3 /usr/bin/python \
    && printf '[global]\nno-index = true\nfind-links = /wheels\n' > /etc/pip.conf
"""
_POSTGRES: Final = r"""
COPY start-postgres /usr/local/bin/
ENV PGDATA=/var/lib/postgresql/data PATH=/usr/lib/postgresql/15/bin:/usr/local/bin:/usr/bin:/bin
RUN chmod 755 /usr/local/bin/start-postgres && install -d -o postgres -g postgres -m 1777 $PGDATA \
    && chmod 3777 /run/postgresql
STOPSIGNAL SIGINT
ENTRYPOINT ["start-postgres"]
"""
_VALKEY: Final = r"""
RUN useradd --system valkey && ln -s redis-server /usr/bin/valkey-server && ln -s redis-cli /usr/bin/valkey-cli
"""
_HAPROXY: Final = r"""
RUN ln -s /bin/busybox /usr/local/bin/wget && mkdir -p /usr/local/etc/haproxy
USER haproxy
STOPSIGNAL SIGUSR1
CMD ["haproxy", "-W", "-db", "-f", "/usr/local/etc/haproxy/haproxy.cfg"]
"""


class Unavailable(Exception):
    """Something that the run needs is not to be had on this machine."""


def prepare() -> None:
    """Get what the run needs, by this machine's ordinary package clients. Raises: Unavailable."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise Unavailable("an engine of its own needs root on Linux")
    BUILD.mkdir(parents=True, exist_ok=True)
    try:
        _install_packages()
        _build_plugin()
        _unpack_debian()
        _download_wheels()
    except FileNotFoundError as error:
        raise Unavailable(f"{error.filename} is not installed") from None
    except subprocess.CalledProcessError as error:
        raise Unavailable(
            f"`{' '.join(map(str, error.cmd))}` ended with {error.returncode}"
        ) from None


def _run(*argv: str | Path, cwd: Path = ROOT, environment: Mapping[str, str] = _NOTHING) -> None:
    """Run a program; what it prints is for people who wait."""
    whole = os.environ | dict(environment)
    subprocess.run(argv, cwd=cwd, env=whole, stdout=sys.stderr, check=True)


def _install_packages() -> None:
    if all(map(shutil.which, ("dockerd", "docker", "debootstrap", "iptables", "tini"))):
        return
    # RUNLEVEL=1: the packages' own engine is not started.
    quiet = {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    _run("apt-get", "update", "-q", environment=quiet)
    _run("apt-get", "install", "-qy", "--no-install-recommends", *_PACKAGES, environment=quiet)


def _build_plugin() -> None:
    plugin = PLUGINS / "cli-plugins" / "docker-compose"
    if plugin.exists():
        return
    go = shutil.which("go") or "/usr/local/go/bin/go"
    folder = BUILD / "plugin"
    folder.mkdir(exist_ok=True)
    # A module of our own: `go install` refuses a module that excludes versions.
    (folder / "go.mod").write_text("module plugin\n\ngo 1.24.9\n")
    settings = {
        "GOPATH": str(BUILD / "go"),
        "GOCACHE": str(BUILD / "go-cache"),
        "GOFLAGS": "-modcacherw -buildvcs=false",
    }
    flags = f"-s -w -X {_PLUGIN}/internal.Version={_PLUGIN_VERSION}"
    build = (go, "build", "-trimpath", "-ldflags", flags, "-o", "docker-compose")
    _run(go, "get", f"{_PLUGIN}/cmd@{_PLUGIN_VERSION}", cwd=folder, environment=settings)
    _run(*build, f"{_PLUGIN}/cmd", cwd=folder, environment=settings)
    plugin.parent.mkdir(parents=True, exist_ok=True)
    (folder / "docker-compose").rename(plugin)
    for name in ("go", "go-cache"):
        shutil.rmtree(BUILD / name)


def _unpack_debian() -> None:
    if _ROOTFS.exists():
        return
    new = _ROOTFS.with_suffix(".new")
    shutil.rmtree(new, ignore_errors=True)
    _run("debootstrap", "--variant=minbase", f"--include={_DEBIAN}", "bookworm", new)
    for packages in new.glob("var/cache/apt/archives/*.deb"):
        packages.unlink()
    new.rename(_ROOTFS)


def _download_wheels() -> None:
    lock = (ROOT / "requirements" / "run.lock").read_text()
    # Debian's Python is older than the one that runs here, and pip judges by the latter.
    lock = re.sub(r" ; python_full_version < '[\d.]+'", "", lock)
    wanted = BUILD / "wheels.lock"
    if wanted.exists() and wanted.read_text() == lock and _WHEELS.exists():
        return
    shutil.rmtree(_WHEELS, ignore_errors=True)
    wanted.write_text(lock)
    _run(
        sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "--require-hashes",
        "--python-version", "3.11", "--only-binary", ":all:", "-d", _WHEELS, "-r", wanted,
    )  # fmt: skip


def make_images(engine: Engine) -> None:
    """Make an image for each that compose.yaml and the Dockerfile name, without its profiles."""
    if not engine.docker("images", "-q", _BASE):
        tar = subprocess.Popen(["tar", "-C", _ROOTFS, "-c", "."], stdout=subprocess.PIPE)
        subprocess.run(
            ["docker", "import", "-", _BASE], env=engine.environ, stdin=tar.stdout, stdout=sys.stderr, check=True
        )  # fmt: skip
        if tar.wait():
            raise RuntimeError(f"tar ended with {tar.returncode}")
    (_CONTEXT / "start-postgres").write_text(_POSTGRES_START)
    services = read_compose()["services"]
    [python] = re.findall(r"^ARG PYTHON=(.+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    images: Sequence[tuple[str, str]] = (
        (python, _PYTHON),
        (services["postgres"]["image"], _POSTGRES),
        (services["redis"]["image"], _VALKEY),
        (services["balancer"]["image"], _HAPROXY),
    )
    for image, text in images:
        (_CONTEXT / "Dockerfile").write_text(f"FROM {_BASE}\n{text}")
        engine.build("build", "-q", "-t", image, str(_CONTEXT))
