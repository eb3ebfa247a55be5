"""Open ledgers are their writers': a recovery that had to wait asks the writer once more (rule 21)."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
from aiohttp import web

from loadtest.ports import free_ports
from quorumlog.net.connections import ListenLimits
from quorumlog.net.listen import listening
from quorumlog.net.ports import Ports
from quorumlog.net.timers import Tasks, Timers
from quorumlog.protocol.messages import CasStatus
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata, Writer
from quorumlog.protocol.quorum import Quorum
from services.autorecovery.auditor import Auditor
from services.autorecovery.config import Config
from services.autorecovery.writers import Writers


class Bookies:
    """Count who is fenced, and end the recovery by it."""

    def __init__(self) -> None:
        self.fenced: list[str] = []

    def fence(self, member: str, *_args: Any) -> None:
        self.fenced.append(member)
        raise RuntimeError("nobody is to be fenced")


async def test_a_writer_that_answers_again_is_not_fenced_by_a_recovery_that_waited() -> None:
    bookies, port = Bookies(), free_ports(1)[0]
    url = f"http://127.0.0.1:{port}"
    row = LedgerMetadata(
        7, Quorum(1, 1, 1), DigestKind.CRC32C, (Fragment(0, ("b1@1",)),), writer=Writer("w", url)
    )

    async def instance(_request: web.Request) -> web.Response:
        return web.json_response({"id": "w"})

    async def get(_ledger_id: int) -> LedgerMetadata:
        return row

    async def cas(changed: LedgerMetadata, *_args: Any, **_how: Any) -> Any:
        return CasStatus.OK, changed

    app = web.Application()
    app.router.add_get("/internal/instance", instance)
    tasks = Tasks()
    metadata = SimpleNamespace(get=get, cas=cas)
    ports = Ports(
        cast(Any, bookies),
        cast(Any, metadata),
        cast(Any, None),
        Timers(asyncio.get_running_loop()),
        tasks,
    )
    async with (
        listening(app, host="127.0.0.1", port=port, limits=ListenLimits(drain_timeout_s=0.1)),
        aiohttp.ClientSession() as session,
    ):
        auditor = Auditor(
            "auditor",
            Config.model_validate({"port": port, "metadata_urls": (url,)}),
            cast(Any, metadata),
            cast(Any, None),
            ports,
            Writers(session),
            cast(Any, SimpleNamespace(lost_bookie_delay_s=1.0)),
        )

        await auditor._recover(row.ledger_id, is_silence_enough=True)

    await tasks.close()
    assert bookies.fenced == []
