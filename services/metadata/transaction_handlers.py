"""The routes of transactions."""

from typing import Final

from aiohttp import web

from quorumlog.net.json_bodies import answer
from quorumlog.net.operations import route
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


async def begin_transaction(request: web.Request, _given: Given) -> web.Response:
    """Begin a transaction, or get the existing one of this app and version."""
    row, is_new = await request.app[PARTS].transactions.begin(
        await parsed(request, TransactionBeginBody)
    )
    return answer(row, 201 if is_new else 200, Location=f"/v1/transactions/{row.id}")


async def get_transaction(request: web.Request, given: Given) -> web.Response:
    """A transaction, read from the primary."""
    return answer(await request.app[PARTS].transactions.get(given[ID]))


async def commit_transaction(request: web.Request, given: Given) -> web.Response:
    """Publish ledgers onto the log and end the transaction; a repeat gets the same answer."""
    body = await parsed(request, TransactionCommitBody)
    return answer(await request.app[PARTS].transactions.commit(given[ID], body))


async def abort_transaction(request: web.Request, given: Given) -> web.Response:
    """Abort a transaction: none of its ledgers is published."""
    return answer(await request.app[PARTS].transactions.abort(given[ID]))


async def renew_transaction(request: web.Request, given: Given) -> web.Response:
    """Put off a transaction's expiry, and get its state."""
    return answer(await request.app[PARTS].transactions.renew(given[ID]))


_ONE: Final = "/v1/transactions/{id}"

ROUTES: Final = (
    route(
        "POST",
        "/v1/transactions",
        begin_transaction,
        takes=TransactionBeginBody,
        gives=TransactionRow,
        status=201,
        repeat_status=200,
    ),
    route("GET", _ONE, get_transaction, ID, gives=TransactionRow),
    route(
        "POST",
        f"{_ONE}/commit",
        commit_transaction,
        ID,
        takes=TransactionCommitBody,
        gives=TransactionDone,
    ),
    route("POST", f"{_ONE}/abort", abort_transaction, ID, gives=TransactionRow),
    route("POST", f"{_ONE}/renew", renew_transaction, ID, gives=TransactionAlive),
)
