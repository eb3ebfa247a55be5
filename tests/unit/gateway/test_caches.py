"""What a gateway remembers to spare a question: of the first one beyond the bound it asks again."""

import asyncio
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from quorumlog import header
from quorumlog.errors import NOT_DONE, WriterLost, WrongPassword
from quorumlog.protocol.log import LogSettings
from quorumlog.protocol.log.messages import Append
from quorumlog.protocol.metadata import DigestKind, Writer
from quorumlog.protocol.quorum import Quorum
from services.gateway.engine import keys, peers
from services.gateway.engine.keys import Gatekeeper, new_keys
from services.gateway.engine.peers import Peers
from services.gateway.interface import FRAMES
from services.gateway.logs import offsets
from services.gateway.logs import store as log_rows
from tests.model.logs.model import Cluster
from tests.support.answering import answering
from tests.unit.gateway.engine.hands import ROW
from tests.unit.logs.test_manager import records


def test_a_password_beyond_the_bound_is_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_VERIFIED_MAX", 1)
    rows = [
        replace(ROW, access_key=new_keys(password, DigestKind.CRC32C).access_key)
        for password in ("one", "two")
    ]
    gatekeeper = Gatekeeper()
    for _ in range(2):
        gatekeeper.check(rows[0], "one")
        gatekeeper.check(rows[1], "two")
        with pytest.raises(WrongPassword):
            gatekeeper.check(rows[0], "two")


async def test_a_replaced_instance_is_found_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_GONE_MAX", 1)
    asked: list[str] = []

    async def is_another(request: web.Request) -> web.Response:
        asked.append(request.headers[header.FORWARDED_WRITER])
        return web.json_response({}, headers={header.FORWARDED_WRITER: "another"})

    async with answering(is_another) as url, aiohttp.ClientSession() as session:
        known = Peers(session)
        gone = [Writer(name, url) for name in ("a", "b")]
        for writer in (*gone, *gone, gone[1]):
            with pytest.raises(WriterLost) as reported:
                await known.send(writer, "POST", "/v1/ledgers/1/entries", 5.0, media=FRAMES)
            assert reported.value.outcome == NOT_DONE

    assert asked == ["a", "b", "a", "b"]


async def test_a_writer_that_hung_is_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its many successors each would otherwise stay: nobody asks again who is gone for ever."""
    monkeypatch.setattr(peers, "_LAC_S", 0.0001)
    monkeypatch.setattr(peers, "_HUNG_S", 0.0)
    never = asyncio.Event()

    async def hangs(_request: web.Request) -> web.Response:
        await never.wait()
        return web.Response()

    async with answering(hangs) as url, aiohttp.ClientSession() as session:
        known = Peers(session)
        for name in "abc":
            with pytest.raises(WriterLost):
                await known.last_add_confirmed(Writer(name, url), 1)
        never.set()

    assert list(known._hung_until) == ["c"]


async def test_logs_beyond_the_bounds_are_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and the places of offsets: each is remembered of one log, or ledger, only."""
    for module, bound in (
        (log_rows, "_ROWS_MAX"),
        (offsets, "LEDGERS_MAX"),
        (offsets, "POINTS_MAX"),
    ):
        monkeypatch.setattr(module, bound, 2 if bound == "POINTS_MAX" else 1)
    cluster = Cluster(0)
    gateway = cluster.gateway()
    names = [f"log-{number}" for number in range(3)]
    try:
        for name in names:
            await gateway.logs.put(name, LogSettings(Quorum(3, 3, 2)))
        for number in range(6):
            for name in names:
                await gateway.logs.append(name, Append.of(records(f"{name} {number}")))
                if number == 3:
                    await gateway.logs.roll(name)
        for start in (0, 5, 2):
            for name in names:
                found: Any = await gateway.logs.reader.read(name, start)
                assert [record.record.value.decode() for record in found.records] == [
                    f"{name} {number}" for number in range(start, 6)
                ]
    finally:
        await gateway.end()

    assert len(gateway.logs.rows._rows) == 1
