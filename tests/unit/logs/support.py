"""Clients of logs over HTTP, and what they remember."""

import asyncio
import io
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

import aiohttp
import orjson

from tests.support.log_history import LogHistory, check
from tests.support.waiting import SETTLED_S, until


class Answer:
    """A response that was read whole."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    def __repr__(self) -> str:
        return f"{self.status} {self.body[:500]!r}"

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)


class Http:
    """Requests to one of several gateways."""

    def __init__(self, session: aiohttp.ClientSession, urls: Sequence[str]) -> None:
        self.session, self.urls = session, list(urls)

    async def ask(
        self,
        method: str,
        path: str,
        json: Any = None,
        *,
        at: int = 0,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        headers = dict(headers or {})
        if json is not None:
            body, headers["Content-Type"] = orjson.dumps(json), "application/json"
        async with self.session.request(
            method,
            self.urls[at] + path,
            data=None if body is None else io.BytesIO(body),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=SETTLED_S),
        ) as response:
            return Answer(response.status, response.headers, await response.read())

    async def done(
        self,
        method: str,
        path: str,
        json: Any = None,
        *,
        at: int = 0,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """The JSON of a request that must succeed in the end. It may be carried out more than once (see `append_once`)."""

        async def ask() -> Answer | None:
            answer = await self.ask(method, path, json, at=at, headers=headers)
            if answer.status < 300:
                return answer
            assert answer.status in (429, 503, 504), answer
            return None

        answer = await until(
            ask, f"{method} {path}", SETTLED_S, passing=(aiohttp.ClientError, OSError)
        )
        assert answer is not None
        return answer.json if answer.body else None

    async def append_once(self, path: str, json: Any, *, at: int = 0) -> Any:
        """Append records once, even if an earlier try without an answer was carried out."""
        producer = {"Producer-Id": uuid4().hex, "Producer-Epoch": "0", "Producer-Seq": "0"}
        return await self.done("POST", path, json, at=at, headers=producer)

    async def contents(self, log: str, *, at: int = 0) -> list[str]:
        """Every record as text; asserts that offsets are dense from the first one."""
        found: list[str] = []
        start: int | None = None
        while True:
            where = "earliest" if start is None else start
            page = await self.done(
                "GET", f"/v1/logs/{log}/records?encoding=text&limit=1000&from={where}", at=at
            )
            if not page["records"]:
                return found
            offsets = [entry["offset"] for entry in page["records"]]
            first = offsets[0] if start is None else start
            assert offsets == list(range(first, first + len(offsets)))
            found += [entry["text"] for entry in page["records"]]
            start = page["next"]
            assert start == offsets[-1] + 1


class Producer:
    """Sends each of its records until it is acknowledged: to one gateway while that answers."""

    def __init__(self, http: Http, log: str, name: str, *, at: int = 0) -> None:
        self.http, self.log, self.name, self.at = http, log, name, at
        self.acknowledged: dict[str, int] = {}

    async def run(self, count: int) -> None:
        for seq in range(count):
            value = f"{self.name}-{seq}"
            headers = {
                "Producer-Id": self.name,
                "Producer-Epoch": "0",
                "Producer-Seq": str(seq),
            }

            async def send(value: str = value, headers: dict[str, str] = headers) -> Answer | None:
                # A gateway that hangs (it may be paused) must not hold the producer for ever.
                at, self.at = self.at, (self.at + 1) % len(self.http.urls)
                async with asyncio.timeout(5):
                    answer = await self.http.ask(
                        "POST",
                        f"/v1/logs/{self.log}/records",
                        {"text": value},
                        at=at,
                        headers=headers,
                    )
                if answer.status == 201:
                    self.at = at
                    return answer
                problem = answer.json
                assert answer.status < 500 or answer.status in (503, 504), answer
                assert problem["retryable"] or problem["outcome"] == "unknown", answer
                return None

            answer = await until(
                send,
                f"{value} is acknowledged",
                SETTLED_S,
                passing=(aiohttp.ClientError, OSError, TimeoutError),
            )
            assert answer is not None
            self.acknowledged[value] = answer.json["first_offset"]


def check_exactly_once(found: Sequence[str], producers: Sequence[Producer]) -> None:
    """Every acknowledged record is once in the log, at its offset, in its producer's order, and there
    is no other one.
    """
    history = LogHistory()
    # Which request of one began after which answer of another was not noted: all began before.
    asked = [
        (history.produce(0, value.encode(), producer=(producer.name, 0), seq=seq), offset)
        for producer in producers
        for seq, (value, offset) in enumerate(producer.acknowledged.items())
    ]
    for op, offset in asked:
        history.produced(op, offset)
    history.content(0, 0, *enumerate(value.encode() for value in found))
    assert check(history.events) == []
