"""The routes of transactions."""

from typing import Final

from aiohttp import web

from quorumlog.net.identity import GATEWAYS
from quorumlog.net.json_bodies import answer
from quorumlog.net.operations import Routes
from quorumlog.net.parameters import Given, path_text
from quorumlog.wire.transaction_bodies import (
    TRANSACTION_ID,
    TransactionAlive,
    TransactionBeginBody,
    TransactionCommitBody,
    TransactionDone,
    TransactionRow,
)
from services.metadata.handlers import PARTS
from services.metadata.http import parsed

ID: Final = path_text("id", TRANSACTION_ID, "The transaction.")


_ONE: Final = "/v1/transactions/{id}"
ROUTES: Final = Routes()


@ROUTES.add(
    "POST /v1/transactions",
    roles=GATEWAYS,
    takes=TransactionBeginBody,
    gives=TransactionRow,
    status=201,
    repeat_status=200,
)
async def begin_transaction(request: web.Request, _given: Given) -> web.Response:
    """Begin a transaction, or get the existing one of this app and version."""
    row, is_new = await request.app[PARTS].transactions.begin(
        await parsed(request, TransactionBeginBody)
    )
    return answer(row, 201 if is_new else 200, Location=f"/v1/transactions/{row.id}")


@ROUTES.add(f"GET {_ONE}", ID, roles=GATEWAYS, gives=TransactionRow)
async def get_transaction(request: web.Request, given: Given) -> web.Response:
    """A transaction, read from the primary."""
    return answer(await request.app[PARTS].transactions.get(given[ID]))


@ROUTES.add(
    f"POST {_ONE}/commit",
    ID,
    roles=GATEWAYS,
    takes=TransactionCommitBody,
    gives=TransactionDone,
    is_audited_for_clients=True,
)
async def commit_transaction(request: web.Request, given: Given) -> web.Response:
    """Publish ledgers onto the log and end the transaction; a repeat gets the same answer."""
    body = await parsed(request, TransactionCommitBody)
    return answer(await request.app[PARTS].transactions.commit(given[ID], body))


@ROUTES.add(
    f"POST {_ONE}/abort", ID, roles=GATEWAYS, gives=TransactionRow, is_audited_for_clients=True
)
async def abort_transaction(request: web.Request, given: Given) -> web.Response:
    """Abort a transaction: none of its ledgers is published."""
    return answer(await request.app[PARTS].transactions.abort(given[ID]))


@ROUTES.add(f"POST {_ONE}/renew", ID, roles=GATEWAYS, gives=TransactionAlive)
async def renew_transaction(request: web.Request, given: Given) -> web.Response:
    """Put off a transaction's expiry, and get its state."""
    return answer(await request.app[PARTS].transactions.renew(given[ID]))
