"""`make run`: a whole cluster on this machine, until Ctrl-C."""

import asyncio
import os
import signal
import sys

import uvloop

from services.local.cluster import ClusterError, LocalCluster
from services.local.config import LocalSettings


def main() -> None:
    """Run the cluster that the environment configures."""
    settings = LocalSettings.of_process("services.local", os.environ)
    for doubt in settings.doubts:
        _say(doubt)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = runner.run(_run(settings))
    raise SystemExit(status)


async def _run(settings: LocalSettings) -> int:
    asked_to_end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Explicitly: the parent may ignore SIGINT (a shell does so for `&`).
        loop.add_signal_handler(number, asked_to_end.set)
    cluster = LocalCluster(settings, say=_say)
    end = asyncio.ensure_future(asked_to_end.wait())
    life = asyncio.ensure_future(_run_until_cancelled(cluster))
    try:
        await asyncio.wait((end, life), return_when=asyncio.FIRST_COMPLETED)
        if life.done():
            life.result()
    except (ClusterError, OSError) as error:  # OSError: a folder that can't be written, say
        _say(f"quorumlog can't run: {error}")
        return 1
    finally:
        for task in (end, life):
            task.cancel()
        await asyncio.gather(end, life, return_exceptions=True)
        if cluster.services:
            _say("ending")
        await cluster.stop()
    _say("ended; the data stays in " + str(settings.data.resolve()))
    return 0


async def _run_until_cancelled(cluster: LocalCluster) -> None:
    await cluster.start()
    _say("quorumlog is ready")
    for name, service in cluster.services.items():
        _say(f"  {name:16} {service.url}")
    first = cluster.services["gateway-1"].url
    secret = cluster.settings.secret_file
    shown = f"CLUSTER_SECRET_FILE={secret}"
    if cluster.certificates is not None:
        shown = f"TLS_CERT_FILE={cluster.certificates.operator}, its key and its authority"
    _say(f"the services behind the gateways answer who has {shown}")
    _say(f"API: {first}/docs   data and logs: {cluster.settings.data.resolve()}   Ctrl-C ends it")
    await cluster.watch()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


main()
