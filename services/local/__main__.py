"""`quorumlog serve` and `make run`: runs a whole cluster on this machine until Ctrl-C."""

import argparse
import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Final

import uvloop

from quorumlog.net.settings import describe
from services.local.cluster import ClusterError, LocalCluster
from services.local.config import LocalSettings

_METAVARS: Final = {"path": "FOLDER", "whole number": "N", "number": "SECONDS", "list": "NAMES"}
"""Placeholders for values in `--help`, by kind of setting. A choice shows its values instead."""


def main() -> None:
    """Runs a cluster with settings from the command line and the environment."""
    parser = _parser()
    options = vars(parser.parse_args())
    is_dev = options.pop("dev", False)
    if is_dev and "DATA" in options:
        parser.error("--dev uses a temporary folder: omit either --dev or --data")
    with tempfile.TemporaryDirectory(prefix="quorumlog-") if is_dev else nullcontext() as folder:
        settings = LocalSettings.read(os.environ | options | ({"DATA": folder} if folder else {}))
        for doubt in settings.doubts:
            _say(doubt)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            status = runner.run(_run(settings))
        if status == 0:
            _say(
                f"ended; the data {'is removed' if is_dev else f'stays in {settings.data.resolve()}'}"
            )
    raise SystemExit(status)


def _parser() -> argparse.ArgumentParser:
    """Builds a parser with an option for each setting. The option of a secret takes a file, because
    all users of the machine can see arguments.
    """
    parser = argparse.ArgumentParser(
        prog="quorumlog serve",
        description="Run a whole cluster on this machine until Ctrl-C.",
        epilog="Each option is also an environment variable: PORT=9000 for --port 9000. The services"
        " read their own settings from the environment (docs/reference/settings.md); give absolute paths there.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--dev", action="store_true", help="use a temporary folder, which is removed at the end"
    )
    for setting in describe(LocalSettings):
        name, what = setting.name, setting.what.removeprefix("1: ").replace("%", "%%")
        if setting.default and setting.kind != "switch":
            what += f" (default: {setting.default})"
        if setting.kind == "switch":
            parser.add_argument(
                _option(name), dest=name, help=what, action="store_const", const="1"
            )
        elif setting.kind == "secret":
            what = f"a file that contains the URL of {what}"
            parser.add_argument(
                _option(f"{name}_FILE"), dest=f"{name}_FILE", help=what, metavar="FILE"
            )
        else:
            metavar = _METAVARS.get(setting.kind, setting.allowed.replace(", ", "|"))
            parser.add_argument(_option(name), dest=name, help=what, metavar=metavar)
    return parser


def _option(name: str) -> str:
    return f"--{name.lower().replace('_', '-')}"


async def _run(settings: LocalSettings) -> int:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Set all handlers: a shell starts a background process (`&`) with SIGINT ignored.
        loop.add_signal_handler(number, task.cancel)
    cluster = LocalCluster(settings, say=_say)
    try:
        await _run_until_cancelled(cluster)
    except asyncio.CancelledError:
        return 0
    except (ClusterError, OSError) as error:  # OSError: for example, a folder is not writable
        _say(f"quorumlog can't run: {error}")
        return 1
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, lambda: None)  # a second signal changes nothing
        if cluster.services:
            _say("ending")
        await cluster.end()
    return 0


async def _run_until_cancelled(cluster: LocalCluster) -> None:
    began = time.monotonic()
    await cluster.begin()
    _say(f"quorumlog is ready after {time.monotonic() - began:.0f} s")
    for name, service in cluster.services.items():
        _say(f"  {name:16} {service.url}")
    secret = f"CLUSTER_SECRET_FILE={cluster.settings.secret_file}"
    if cluster.credentials is not None:
        secret = f"TLS_CERT_FILE={cluster.credentials.operator}, its key and its authority"
    data = cluster.settings.data.resolve()
    _say(f"API reference: {cluster.services['gateway-1'].url}/docs")
    _say(f"data: {data}, log files: {data / 'log'}")
    _say(f"for requests to the services behind the gateways: {secret}")
    command = "quorumlog"
    if shutil.which(command) is None:  # its virtual environment is not activated
        command = str(Path(sys.executable).with_name(command))
    gateway = cluster.services["gateway-1"].url
    _say(
        f"try: export QUORUMLOG_GATEWAY={gateway}; {command} log create events; {command} log list"
    )
    _say("Ctrl-C ends all of it")
    await cluster.watch()


def _say(line: str) -> None:
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except (
        OSError
    ):  # the pipe or terminal is closed: the cluster continues without output, and ends in order
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115


main()
