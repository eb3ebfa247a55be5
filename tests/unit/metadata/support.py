"""A metadata service in this process, on stores of its own, and ledgers to put into it."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson
import pytest
from pydantic import SecretStr

from loadtest.ports import free_ports
from loadtest.stores import Stores
from quorumlog.net.listen import listening
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.protocol.messages import CasStatus, MissedRange
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata, Writer
from quorumlog.protocol.quorum import Quorum
from services.metadata import inquiry
from services.metadata.app import build
from services.metadata.config import Config
from tests.support.database import connected, sql
from tests.support.waiting import until

PATIENT_S = 30.0
"""Deadlines where a test does not speak of them: a slow machine is no outage."""

DRAFT = LedgerMetadata(
    ledger_id=-1,
    quorum=Quorum(3, 3, 2),
    digest=DigestKind.CRC32C,
    fragments=(Fragment(0, ("b1@1", "b2@1", "b3@1")),),
    writer=Writer("gateway-1", "http://gateway-1"),
    ledger_key=b"\x01" * 32,
    custom=(("colour", "red"),),
)


@dataclass(frozen=True, slots=True)
class Service:
    """A running service and who talks to it."""

    url: str
    client: MetadataClient
    session: aiohttp.ClientSession

    async def send(
        self, method: str, path: str, body: object = None, **kwargs: Any
    ) -> tuple[int, Any]:
        """One plain request, as anybody can make it: status and JSON body."""
        data = body if isinstance(body, bytes) or body is None else orjson.dumps(body)
        headers = {"Content-Type": "application/json"}
        headers |= kwargs.pop("headers", {})
        async with self.session.request(
            method, self.url + path, data=data, headers=headers, **kwargs
        ) as response:
            answered = await response.read()
            return response.status, orjson.loads(answered) if answered else None


_IMAGINED: Final = """
DO $$ BEGIN
    IF to_regprocedure('registered_incarnations(text[])') IS NULL THEN
        ALTER FUNCTION hold_incarnations(text[]) RENAME TO registered_incarnations;
    END IF;
END $$;
CREATE OR REPLACE FUNCTION hold_incarnations(members text[]) RETURNS SETOF cookies LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RETURN QUERY SELECT * FROM registered_incarnations(members);
    RETURN QUERY SELECT (jsonb_populate_record(NULL::cookies, jsonb_build_object('name', split_part(m, '@', 1),
        'cookie', jsonb_build_object('incarnation', split_part(m, '@', 2)::bigint)))).*
        FROM unnest(members) AS m WHERE split_part(m, '@', 1) NOT IN (SELECT c.name FROM cookies c);
END
$$
"""


async def imagine_bookies(stores: Stores) -> None:
    """From now on a member whose bookie never registered counts as registered too, besides those that the product's own
    function finds. Most tests of rows need no bookies, and registered ones would change what a rebuild, an inquiry and
    a listing wait for. The tests of rule 15b (`test_members.py`) do without such members.
    """
    await sql(stores, _IMAGINED)


@contextlib.asynccontextmanager
async def serving(
    stores: Stores,
    *,
    port: int | None = None,
    wait: bool = True,
    are_imagined: bool = True,
    **settings: Any,
) -> AsyncIterator[Service]:
    """Run a service until the end of the block; returns once it is ready. `are_imagined`: see `imagine_bookies`."""
    port = port or free_ports(1)[0]
    config = Config(
        port=port,
        postgres_dsn=SecretStr(stores.postgres_dsn),
        redis_url=SecretStr(stores.redis_url),
        **{"database_deadline_s": PATIENT_S, "redis_deadline_s": PATIENT_S} | settings,
    )
    url = f"http://127.0.0.1:{port}"
    timeout = aiohttp.ClientTimeout(total=2 * PATIENT_S)
    async with (
        listening(
            build(config),
            host=config.host,
            port=port,
            limits=replace(config.listen_limits(), drain_timeout_s=1.0),
        ),
        aiohttp.ClientSession(timeout=timeout, headers=config.credentials.headers) as session,
    ):
        client = MetadataClient([url], session, deadline_s=PATIENT_S, try_s=PATIENT_S)
        service = Service(url, client, session)
        if wait:
            await until(lambda: is_ready(service), "the metadata service is ready")
            if are_imagined:
                await imagine_bookies(stores)
        yield service


async def swapped(
    client: MetadataClient, row: LedgerMetadata, *missed: tuple[MissedRange, ...], **how: Any
) -> LedgerMetadata:
    """The row after a compare-and-swap, which must be done."""
    status, now = await client.cas(row, *missed, **how)
    assert status is CasStatus.OK
    assert now is not None
    return now


def await_bookies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services of this process wait for slow bookies, which they else count as silent, and go on: with this the first
    change that one takes at its start comes after what they tell.
    """
    monkeypatch.setattr(inquiry, "_ASK_S", PATIENT_S)
    monkeypatch.setattr(inquiry, "_COPIES_S", PATIENT_S)


WAITING: Final = (
    "SELECT count(DISTINCT pid) FROM pg_locks WHERE NOT granted AND pid IN"
    " (SELECT pid FROM pg_locks WHERE database ="
    " (SELECT oid FROM pg_database WHERE datname = current_database()))"
)
"""How many transactions wait for a lock in this database: the server has others, of other tests' clusters."""


async def is_ready(service: Service) -> bool:
    return (await service.send("GET", "/health/ready"))[0] == 200


async def played(test: Callable[..., Awaitable[None]], stores: Stores, folder: Path) -> None:
    """Run a test with the fixtures that it asks for: stores, a folder, a service, and a connection to the database."""
    given: dict[str, Any] = {"stores": stores} | dict.fromkeys(
        ("folder", "root", "tmp_path"), folder
    )
    asked = [p.name for p in signature(test).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    async with contextlib.AsyncExitStack() as stack:
        if "service" in asked:
            given["service"] = await stack.enter_async_context(serving(stores))
        if "database" in asked:
            given["database"] = await stack.enter_async_context(connected(stores))
        await test(*[given[name] for name in asked])
