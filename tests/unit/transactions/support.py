"""Writers of transactions over plain HTTP, as curl does it."""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.waiting import SETTLED_S, until
from tests.unit.logs.support import Answer, Http

LOG = "/v1/logs/log"
TRANSACTIONS = "/v1/transactions"


async def begin(http: Http, *, at: int = 0, **more: Any) -> str:
    """A transaction's id."""
    begun = await http.done("POST", TRANSACTIONS, {"log": "log", **more}, at=at)
    name: str = begun["transaction"]
    return name


async def write(
    http: Http,
    transaction: str,
    batches: Sequence[Sequence[str]],
    *,
    partition: int = 0,
    at: int = 0,
    seal: bool = True,
) -> int:
    """What a task attempt does: a ledger, some batches of records, sealed. Its id."""
    made = await http.done(
        "POST", "/v1/ledgers", {"transaction": transaction, "partition": partition}, at=at
    )
    ledger_id: int = made["ledger_id"]
    for number, batch in enumerate(batches):
        await _append_once(http, ledger_id, number, batch, at=at)
    if seal:
        await http.done("POST", f"/v1/ledgers/{ledger_id}/close", at=at)
    return ledger_id


async def _append_once(
    http: Http, ledger_id: int, number: int, batch: Sequence[str], *, at: int
) -> None:
    """Append as the entry of this number, again where a slow machine had no answer in time."""

    async def ask() -> bool:
        answer = await append(http, ledger_id, batch, at=at, query=f"?expect={number}")
        if answer.status == 412:
            return bool(answer.json["next_entry_id"] == number + 1)
        assert (
            answer.status == 201 or answer.json["outcome"] == "unknown" or answer.json["retryable"]
        )
        return answer.status == 201

    await until(ask, f"entry {number} of ledger {ledger_id}", SETTLED_S)


async def append(
    http: Http, ledger_id: int, batch: Sequence[str], *, at: int = 0, query: str = ""
) -> Answer:
    """One request."""
    entries = [{"text": value} for value in batch]
    path = f"/v1/ledgers/{ledger_id}/entries{query}"
    return await http.ask("POST", path, {"entries": entries}, at=at)


async def end(http: Http, transaction: str, how: str, body: Any = None, *, at: int = 0) -> Answer:
    """`commit` or `abort`."""
    return await settled(http, f"{TRANSACTIONS}/{transaction}/{how}", body, at=at)


async def settled(
    http: Http,
    path: str,
    body: Any = None,
    *,
    at: int = 0,
    headers: Mapping[str, str] | None = None,
    method: str = "POST",
) -> Answer:
    """The answer to what may be asked again, once it does not say that the cluster is slow."""

    async def ask() -> Answer | None:
        answer = await http.ask(method, path, body, at=at, headers=headers)
        return None if answer.status in (429, 503, 504) else answer

    answer = await until(ask, f"{method} {path}", SETTLED_S)
    assert answer is not None
    return answer


def code(answer: Answer) -> tuple[int, str]:
    """What an error says."""
    return answer.status, answer.json["code"]
