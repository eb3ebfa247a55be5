"""The routes of transactions."""

from typing import Final

from aiohttp import web

from quorumlog.wire.transaction_bodies import (
    TRANSACTION_ID,
    TransactionAlive,
    TransactionBegin,
    TransactionCommit,
    TransactionDone,
    TransactionRow,
)
from services.metadata.handlers import PARTS
from services.metadata.http import answer, matching, parsed, query_of
from services.metadata.routes import Route


async def begin_transaction(request: web.Request) -> web.Response:
    """Begin a transaction, or get the one of this app and version."""
    query_of(request, ())
    row, is_new = await request.app[PARTS].transactions.begin(
        await parsed(request, TransactionBegin)
    )
    return answer(row, 201 if is_new else 200, Location=f"/v1/transactions/{row.id}")


async def get_transaction(request: web.Request) -> web.Response:
    """A transaction as the primary has it."""
    query_of(request, ())
    return answer(await request.app[PARTS].transactions.get(_id(request)))


async def commit_transaction(request: web.Request) -> web.Response:
    """Publish ledgers onto the log and end the transaction; the same again is answered as done."""
    query_of(request, ())
    body = await parsed(request, TransactionCommit)
    return answer(await request.app[PARTS].transactions.commit(_id(request), body))


async def abort_transaction(request: web.Request) -> web.Response:
    """End a transaction; nothing of it is published."""
    query_of(request, ())
    return answer(await request.app[PARTS].transactions.abort(_id(request)))


async def renew_transaction(request: web.Request) -> web.Response:
    """Say that somebody works in it, and learn its state."""
    query_of(request, ())
    return answer(await request.app[PARTS].transactions.renew(_id(request)))


def _id(request: web.Request) -> str:
    return matching(request.match_info["id"], "id", TRANSACTION_ID)


_ONE: Final = "/v1/transactions/{id}"

ROUTES: Final = (
    Route(
        "POST",
        "/v1/transactions",
        begin_transaction,
        TransactionBegin,
        TransactionRow,
        201,
        repeat_status=200,
    ),
    Route("GET", _ONE, get_transaction, None, TransactionRow),
    Route("POST", f"{_ONE}/commit", commit_transaction, TransactionCommit, TransactionDone),
    Route("POST", f"{_ONE}/abort", abort_transaction, None, TransactionRow),
    Route("POST", f"{_ONE}/renew", renew_transaction, None, TransactionAlive),
)
