"""A gateway that requires tokens, on a real metadata service and bookies in memory."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from loadtest.stores import Stores
from quorumlog.net.connections import ListenLimits
from quorumlog.net.gateway_clients import LogClient, TokenClient, TransactionClient
from quorumlog.net.listen import listening
from quorumlog.net.timers import Tasks, wall_s
from quorumlog.wire.token_bodies import TokenQuotas
from services.gateway.app import build_app
from services.gateway.edge.access.callers import Callers
from services.gateway.edge.access.jwts import Jwts
from services.gateway.edge.http.limits import Limits
from services.gateway.edge.tokens import AccessTokenCreate
from services.gateway.logs.store import MetadataLogs
from services.gateway.logs.transactions import Transactions
from tests.support.issuer import Issuer
from tests.unit.gateway.engine.support import Gateway, World, world_of
from tests.unit.logs.support import Answer, Http

NO_QUOTAS = TokenQuotas()
LOG, OTHER_LOG = "orders-1", "secrets"
NAMESPACE = "team-a"


@dataclass
class Guarded:
    """Two gateways that require tokens; each has a list of tokens of its own."""

    world: World
    http: Http
    tokens: TokenClient
    callers: list[Callers]
    skews: dict[str, float] = field(default_factory=lambda: {"s": 0.0})
    """How far the gateways' clocks are ahead."""
    admin: str = ""

    async def token(
        self, *grants: str, expires_in_s: int | None = None, quotas: TokenQuotas = NO_QUOTAS
    ) -> tuple[str, str]:
        """A token as an operator makes it at the metadata service: its secret and its id."""
        wanted = AccessTokenCreate(name="a test", grants=list(grants), quotas=quotas)
        secret, drawn = wanted.drawn()
        await self.tokens.create(drawn, expires_in_s=expires_in_s)
        return secret, drawn.id

    async def ask(
        self, secret: str | None, method: str, path: str, json: Any = None, **more: Any
    ) -> Answer:
        headers = more.pop("headers", {})
        if secret is not None:
            headers["Authorization"] = f"Bearer {secret}"
        return await self.http.ask(method, path, json, headers=headers, **more)

    async def done(self, method: str, path: str, json: Any = None) -> Any:
        """An admin's request, which succeeds."""
        answer = await self.ask(self.admin, method, path, json)
        assert answer.status < 300, answer
        return answer.json if answer.body else None

    async def ledger(self, **metadata: str) -> int:
        """A new ledger with an entry."""
        made = await self.done("POST", "/v1/ledgers", {"metadata": metadata})
        ledger_id: int = made["ledger_id"]
        await self.done("POST", f"/v1/ledgers/{ledger_id}/entries", {"text": "an entry"})
        return ledger_id

    async def log(self, name: str) -> int:
        """A log with a record; returns its ledger."""
        await self.done("PUT", f"/v1/logs/{name}", {})
        done = await self.done("POST", f"/v1/logs/{name}/records", {"text": "a record"})
        ledger_id: int = done["ledger_id"]
        return ledger_id


@asynccontextmanager
async def _listening(
    gateway: Gateway, callers: Callers, cors_origins: tuple[str, ...]
) -> AsyncIterator[str]:
    client = TransactionClient(gateway.engine.metadata)
    store = MetadataLogs(LogClient(gateway.engine.metadata), client)
    transactions = Transactions(
        engine=gateway.engine, logs=gateway.logs, store=store, client=client
    )
    app = build_app(
        gateway.engine,
        Limits(),
        logs=gateway.logs,
        transactions=transactions,
        callers=callers,
        cors_origins=cors_origins,
    )
    limits = ListenLimits(drain_timeout_s=0.1)
    async with listening(app, host="127.0.0.1", port=0, limits=limits) as listener:
        yield f"http://127.0.0.1:{listener.port}"


@asynccontextmanager
async def guarded(
    stores: Stores,
    *,
    follow: Iterable[int] = (),
    issuer: Issuer | None = None,
    cors_origins: tuple[str, ...] = (),
) -> AsyncIterator[Guarded]:
    """Two gateways; those of `follow` read the list of tokens every second, as all do that run. Both trust `issuer`."""
    async with world_of(stores) as world, aiohttp.ClientSession() as session:
        tasks, skews = Tasks(), {"s": 0.0}
        # Each asks the metadata service by way of its gateway's proxy.
        clients = [TokenClient(one.engine.metadata) for one in world.gateways]
        callers = [
            Callers(
                client,
                jwts=None if issuer is None else Jwts(issuer.rules),
                now=lambda: wall_s() + skews["s"],
            )
            for client in clients
        ]
        for number in follow:
            tasks.start(callers[number].follow())
        async with (
            _listening(world.gateways[0], callers[0], cors_origins) as one,
            _listening(world.gateways[1], callers[1], cors_origins) as two,
        ):
            found = Guarded(
                world, Http(session, [one, two]), TokenClient(world.metadata), callers, skews
            )
            found.admin, _ = await found.token("admin:*")
            yield found
            await tasks.close()
