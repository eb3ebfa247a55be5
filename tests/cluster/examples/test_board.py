"""The board: a Node service that appends, and pages in a browser that follow the log at the gateways."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from loadtest import npm
from loadtest.cluster import Cluster
from loadtest.ports import free_ports
from quorumlog.client import Client
from tests.cluster.examples.support import ROOT, Running, losing_answers, up
from tests.support.browser import page
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="package")

MESSAGES: Final = "#messages > *"


class Board:
    """The service, its log, and requests to it."""

    def __init__(
        self, session: aiohttp.ClientSession, folder: Path, gateways: list[str], log: str
    ) -> None:
        (port,) = free_ports(1)
        self.url, self.log = f"http://127.0.0.1:{port}", log
        self._session = session
        argv = ["node", str(ROOT / "examples" / "board" / "server.mjs"), "--port", str(port), "--log", log]  # fmt: skip
        for url in gateways:
            argv += ["--gateway", url]
        self.program = Running("board", argv, folder)

    async def up(self) -> None:
        """Wait until it answers."""
        await up(self._session, self.program, self.url)

    async def post(self, body: bytes, kind: str = "application/json") -> tuple[int, Any]:
        """Send a message: the answer's status and JSON."""
        headers = {"Content-Type": kind}
        async with self._session.post(self.url + "/messages", data=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def write(self, text: str) -> tuple[int, Any]:
        """Send a message of one author."""
        return await self.post(orjson.dumps({"author": "bob", "text": text}))


@pytest_asyncio.fixture(loop_scope="package")
async def board(
    cluster: Cluster, session: aiohttp.ClientSession, tmp_path: Path
) -> AsyncIterator[Board]:
    try:
        npm.needs("node")
    except npm.Absent as missing:
        pytest.skip(f"{missing}: the example was not run")
    started = Board(session, tmp_path, cluster.gateways, f"board-{uuid.uuid4().hex}")
    try:
        await started.up()
        yield started
    finally:
        started.program.kill()


async def say(shown: Page, text: str) -> None:
    """Send a message by the form of a page."""
    await shown.locator("#author").fill("ann")
    await shown.locator("#text").fill(text)
    await shown.locator("#text").press("Enter")


async def messages(cluster: Cluster, log: str) -> list[Any]:
    """What is in the log."""
    async with Client(*cluster.gateways) as client:
        return [orjson.loads(record.value) async for record in client.log(log).records()]


async def test_messages_at_once_are_each_in_the_log_once(cluster: Cluster, board: Board) -> None:
    texts = [f"message {number}" for number in range(200)]

    answers = await asyncio.gather(*map(board.write, texts))
    kept = await messages(cluster, board.log)

    assert {status for status, _ in answers} == {201}
    assert sorted(answer["offset"] for _, answer in answers) == list(range(200))
    for text, (_, answer) in zip(texts, answers, strict=True):
        assert kept[answer["offset"]] == {"author": "bob", "text": text}
    assert len(kept) == len(texts)


async def test_a_message_whose_answer_was_lost_is_in_the_log_once(
    cluster: Cluster, board: Board, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    one, other = cluster.gateways
    async with losing_answers(session, one) as losing:
        unlucky = Board(session, tmp_path, [losing, other], board.log)
        try:
            await unlucky.up()
            answers = [await unlucky.write(f"message {number}") for number in range(5)]
        finally:
            unlucky.program.kill()

    assert answers == [(201, {"offset": number}) for number in range(5)]
    kept = [message["text"] for message in await messages(cluster, board.log)]
    assert kept == [f"message {number}" for number in range(5)]


async def test_pages_show_all_messages_across_restarts(board: Board, browser: Browser) -> None:
    said = ["ann: from a page"]
    async with page(browser, board.url) as one, page(browser, board.url) as other:
        await say(one, "from a page")
        await expect(one.locator(MESSAGES)).to_have_text(said)

        board.program.kill()
        board.program.start()
        await board.up()
        for text in ("after the restart", "<b>no HTML</b>"):
            assert (await board.write(text))[0] == 201
            said.append(f"bob: {text}")
        for each in (one, other):
            await expect(each.locator(MESSAGES)).to_have_text(said)
        await say(one, "still here")
        for each in (one, other):
            await expect(each.locator(MESSAGES)).to_have_text([*said, "ann: still here"])


async def test_a_page_and_the_service_go_on_at_another_gateway(
    cluster: Cluster, board: Board, browser: Browser
) -> None:
    assert (await board.write("before"))[0] == 201
    async with page(browser, board.url) as shown:
        await expect(shown.locator(MESSAGES)).to_have_text(["bob: before"])
        # The gateway that the page follows, that the service asks first, and that writes the log.
        await cluster.kill("gateway-1")
        try:
            answers = await asyncio.gather(
                *(board.write(f"while it is away {n}") for n in range(5))
            )
            await expect(shown.locator(MESSAGES)).to_have_count(6)
            found = await shown.locator(MESSAGES).all_text_contents()
        finally:
            await cluster.restart("gateway-1")

    assert [status for status, _ in answers] == [201] * 5
    kept = await messages(cluster, board.log)
    assert found == [f"{one['author']}: {one['text']}" for one in kept]
    assert len(kept) == 6


async def test_what_is_no_message_is_refused_and_changes_nothing(
    cluster: Cluster, board: Board, session: aiohttp.ClientSession
) -> None:
    for body in (b"", b"{", b"null", b"[]", b'{"author":"ann"}', b'{"author":" ","text":"x"}',
                 orjson.dumps({"author": "a" * 41, "text": "x"}),
                 orjson.dumps({"author": "a", "text": "x" * 501})):  # fmt: skip
        assert (await board.post(body))[0] == 400, body
    with contextlib.suppress(aiohttp.ClientError, OSError):  # it may be cut off instead
        assert (await board.post(b" " * 100_000))[0] == 413
    # What a page of another origin could send without asking.
    assert (await board.post(b'{"author":"ann","text":"x"}', "text/plain"))[0] == 415
    for path, status in (("/nothing", 404), ("/follow?from=x", 400), ("/follow?from=5", 200)):
        async with session.get(board.url + path) as answer:
            assert answer.status == status

    assert await messages(cluster, board.log) == []


async def test_a_service_that_ends_answers_what_it_took(cluster: Cluster, board: Board) -> None:
    writing = [asyncio.ensure_future(board.write(f"message {n}")) for n in range(20)]
    await asyncio.wait(writing, return_when=asyncio.FIRST_COMPLETED)
    board.program.process.terminate()
    answers = await asyncio.gather(*writing, return_exceptions=True)
    await until(lambda: board.program.process.poll() is not None, "the service ends")
    kept = [one["text"] for one in await messages(cluster, board.log)]

    assert board.program.process.returncode == 0, board.program.said
    answered = [answer for answer in answers if not isinstance(answer, BaseException)]
    assert answered
    assert {status for status, _ in answered} == {201}
    assert len(set(kept)) == len(kept) >= len(answered)
    for number, answer in enumerate(answers):
        if isinstance(answer, BaseException):
            assert isinstance(answer, aiohttp.ClientError | OSError), answer
        else:
            assert kept[answer[1]["offset"]] == f"message {number}"
