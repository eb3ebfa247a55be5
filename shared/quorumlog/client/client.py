"""A cluster, as an application sees it."""

import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Self
from urllib.parse import quote

import orjson

from quorumlog.client.ledger import Ledger, with_password
from quorumlog.client.log import Log
from quorumlog.client.transport import Transport


class Client:
    """Talks to the gateways of one cluster; use it in `async with`.

    Ledgers come as the API's objects (dictionaries), so that a newer server's fields pass through.
    """

    def __init__(self, *urls: str, deadline_s: float = 60.0) -> None:
        """`urls`: of one or more gateways; when one dies the next is asked.

        `deadline_s`: for one call, with all its repetitions.
        """
        self._transport = Transport(urls, deadline_s=deadline_s)

    async def __aenter__(self) -> Self:
        await self._transport.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._transport.__aexit__(*exc)

    async def create_ledger(
        self,
        *,
        ensemble_size: int | None = None,
        write_quorum: int | None = None,
        ack_quorum: int | None = None,
        digest: str | None = None,
        password: str | None = None,
        metadata: Mapping[str, str] | None = None,
        ledger_id: int | None = None,
        allow_degraded: bool | None = None,
    ) -> Ledger:
        """Create a ledger; what is left out is the server's choice. A repetition of the request
        makes no second one.
        """
        options = {
            "ensemble_size": ensemble_size,
            "write_quorum": write_quorum,
            "ack_quorum": ack_quorum,
            "digest": digest,
            "password": password,
            "metadata": metadata,
            "ledger_id": ledger_id,
            "allow_degraded": allow_degraded,
        }
        answer = await self._transport.request(
            "POST",
            "/v1/ledgers",
            body=orjson.dumps({k: v for k, v in options.items() if v is not None}),
            headers={"Idempotency-Key": uuid.uuid4().hex},
            is_repeatable=True,
        )
        return Ledger(self._transport, int(answer.json()["ledger_id"]), password)

    def ledger(self, ledger_id: int, *, password: str | None = None) -> Ledger:
        """A ledger that exists; asks nobody."""
        return Ledger(self._transport, ledger_id, password)

    async def delete_ledger(self, ledger_id: int, *, password: str | None = None) -> None:
        """Delete a ledger with its entries; an open one is recovered first."""
        await self._transport.request(
            "DELETE",
            f"/v1/ledgers/{ledger_id}",
            headers=with_password(password),
            # Twice is 404, which says that it is gone; but then nobody knows who did it.
            is_repeatable=False,
        )

    async def ledgers(
        self,
        *,
        state: str | None = None,
        bookie: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> AsyncIterator[dict[str, Any]]:
        """All ledgers that fit, by id, asked for page by page."""
        params: dict[str, str | int] = {"limit": 1000}
        if state:
            params["state"] = state
        if bookie:
            params["bookie"] = bookie
        params |= {f"metadata[{key}]": value for key, value in (metadata or {}).items()}
        while True:
            page = await self._get("/v1/ledgers", params)
            for ledger in page["ledgers"]:
                yield ledger
            if page["next"] is None:
                return
            params["after"] = page["next"]

    async def create_log(self, name: str, **settings: Any) -> Log:
        """Create a log, or get it where it exists with the same settings (API: `PUT /v1/logs`).

        Raises: LogExists where it has others.
        """
        log = Log(self._transport, name)
        await self._transport.request(
            "PUT",
            f"/v1/logs/{quote(name, safe='')}",
            body=orjson.dumps(settings),
            is_repeatable=True,
        )
        return log

    def log(self, name: str) -> Log:
        """A log that exists; asks nobody."""
        return Log(self._transport, name)

    async def logs(self) -> AsyncIterator[dict[str, Any]]:
        """All logs by name, asked for page by page."""
        params: dict[str, str | int] = {"limit": 1000}
        while True:
            page = await self._get("/v1/logs", params)
            for log in page["logs"]:
                yield log
            if page["next"] is None:
                return
            params["after"] = page["next"]

    async def bookies(self) -> Sequence[dict[str, Any]]:
        """All registered bookies with their state."""
        answer = await self._get("/v1/bookies")
        bookies: list[dict[str, Any]] = answer["bookies"]
        return bookies

    async def cluster(self) -> dict[str, Any]:
        """Every service with its state, and what is under-replicated."""
        answer: dict[str, Any] = await self._get("/v1/cluster")
        return answer

    async def _get(self, path: str, params: Mapping[str, str | int] | None = None) -> Any:
        answer = await self._transport.request("GET", path, params=params, is_repeatable=True)
        return answer.json()
