"""A producer's request whose outcome is unknown keeps its number until it is settled."""

import asyncio

import pytest
from aiohttp import web

from quorumlog.client import Client, ClientBroke, Unsettled
from quorumlog.errors import (
    NOT_DONE,
    UNKNOWN,
    ExpiredProducer,
    MetadataUnavailable,
    QuorumTimeout,
    StaleProducer,
)
from tests.unit.client.test_transport import Gateway, serving

END = {"next_offset": 40, "created_at": "2026-01-01T00:00:00+00:00"}
"""What a gateway shows of a log, as far as a producer reads it."""


class Log(Gateway):
    """Cuts two connections, and then does not know what became of it; remembers what it was sent."""

    def __init__(self) -> None:
        super().__init__(None, None, QuorumTimeout("late", retryable=False))
        self.sent: list[tuple[str, bytes]] = []
        self.expected: list[str | None] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.expected.append(request.query.get("expect"))
        self.sent.append((request.headers["Producer-Seq"], await request.read()))
        return await super().handle(request)

    def answer(self, first: int, last: int) -> None:
        reported = {"first_offset": first, "last_offset": last, "ledger_id": 1, "entry_id": first}
        self.replies = [reported]


async def test_the_same_records_again_settle_it_and_nothing_else_is_sent_before() -> None:
    log = Log()
    async with serving(log) as url, Client(url) as client:
        producer = client.log("log").producer("p", epoch=1)
        with pytest.raises(QuorumTimeout) as lost:
            await producer.append(b"a")
        tries = len(log.sent)
        with pytest.raises(Unsettled) as refused:
            await producer.append(b"b")

        assert (lost.value.outcome, refused.value.outcome) == (UNKNOWN, NOT_DONE)
        assert len(log.sent) == tries == 3
        log.answer(7, 7)
        assert (await producer.append(b"a")).first_offset == 7
        log.answer(8, 8)
        assert (await producer.append(b"b")).first_offset == 8

    assert {seq for seq, _ in log.sent[:-1]} == {"0"}
    assert len({body for _, body in log.sent[:-1]}) == 1
    assert log.sent[-1][0] == "1"


async def test_records_that_travelled_together_are_settled_together() -> None:
    log = Log()
    async with serving(log) as url, Client(url) as client:
        producer = client.log("log").producer("p", epoch=1)
        futures = [await producer.submit(b"a"), await producer.submit(b"b")]
        for future in futures:
            with pytest.raises(QuorumTimeout):
                await future
        with pytest.raises(Unsettled):
            await producer.append(b"a")
        log.answer(7, 8)
        done = await producer.settle()

        assert done is not None
        assert (done.first_offset, done.last_offset) == (7, 8)
        assert await producer.settle() is None
        assert producer.seq == 1


async def test_a_request_with_an_expected_offset_is_settled_as_it_was_sent() -> None:
    log = Log()
    async with serving(log) as url, Client(url) as client:
        producer = client.log("log").producer("p", epoch=1)
        with pytest.raises(QuorumTimeout):
            await producer.append(b"a", expect=7)
        with pytest.raises(Unsettled):
            await producer.append(b"a")
        log.answer(7, 7)
        assert await producer.settle() is not None

    assert set(log.expected) == {"7"}
    assert {seq for seq, _ in log.sent} == {"0"}


async def test_a_request_is_settled_as_it_was_sent_whatever_is_appended_meanwhile() -> None:
    log = Log()
    async with serving(log) as url, Client(url) as client:
        producer = client.log("log").producer("p", epoch=1)
        with pytest.raises(QuorumTimeout):
            await producer.append(b"a")
        log.answer(7, 7)
        (settling,) = log.replies
        log.answer(8, 8)
        log.replies = [settling, *log.replies]
        settled, after = await asyncio.gather(producer.settle(), producer.append(b"b"))

    assert settled is not None
    assert (settled.first_offset, after.first_offset) == (7, 8)


async def test_a_defect_under_a_request_keeps_it_open(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    async with serving(log) as url, Client(url) as client:
        producer = client.log("log").producer("p", epoch=1)
        with monkeypatch.context() as patched:
            patched.setattr(producer, "_request", lambda *_args, **_named: 1 / 0)
            with pytest.raises(ClientBroke):
                await producer.append(b"a")
        with pytest.raises(Unsettled):
            await producer.append(b"b")


async def test_an_error_that_says_not_done_keeps_nothing_open() -> None:
    log = Log()
    log.replies = [StaleProducer("a newer one exists")]
    async with serving(log) as url, Client(url) as client:
        producer = client.log("log").producer("p", epoch=1)
        for value in (b"a", b"b"):
            with pytest.raises(StaleProducer):
                await producer.append(value)
        assert await producer.settle() is None


async def test_a_request_that_may_be_done_stays_open_whatever_its_repetitions_are_told() -> None:
    log = Log()
    async with serving(log) as url, Client(url) as client:
        producer = client.log("log").producer("p", epoch=1)
        log.replies = [None, StaleProducer("a newer one exists")]
        for _ in range(2):
            with pytest.raises(StaleProducer) as reported:
                await producer.append(b"a")
            assert reported.value.outcome == UNKNOWN
        with pytest.raises(Unsettled):
            await producer.append(b"b")

    assert len({body for _, body in log.sent}) == 1


class Seen(Gateway):
    """A log that ends at 40; remembers which headers came."""

    def __init__(self) -> None:
        super().__init__(END)
        self.headers: list[tuple[str, str | None]] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.headers.append((request.method, request.headers.get("Producer-Since")))
        return await super().handle(request)


TOLD = {"first_offset": 41, "last_offset": 41, "ledger_id": 1, "entry_id": 41}


async def test_a_new_producer_tells_where_the_log_ended_before_its_first_request() -> None:
    log = Seen()
    log.replies = [END, None, TOLD, {**END, "next_offset": 50}]
    async with serving(log) as url, Client(url) as client:
        producer = client.log("log").producer("p")
        await producer.append(b"a")
        log.replies = [TOLD]
        await producer.append(b"b")

        assert producer.since == 40
    assert log.headers == [("GET", None), *[("POST", "40")] * 3]


async def test_nothing_is_sent_of_a_producer_that_can_not_learn_where_the_log_ends() -> None:
    log = Seen()
    log.replies = [MetadataUnavailable("gone", retryable=False, outcome=UNKNOWN)]
    async with serving(log) as url, Client(url) as client:
        producer = client.log("log").producer("p")
        with pytest.raises(MetadataUnavailable) as reported:
            await producer.append(b"a")
        log.replies = [END, TOLD]
        await producer.append(b"b")

    assert reported.value.outcome == NOT_DONE
    assert log.headers == [("GET", None), ("GET", None), ("POST", "40")]


@pytest.mark.parametrize(("since", "sent"), [(None, None), (7, "7")])
async def test_who_gives_an_epoch_may_have_sent_before_so_that_nothing_is_read_for_him(
    since: int | None, sent: str | None
) -> None:
    log = Seen()
    log.replies = [TOLD]
    async with serving(log) as url, Client(url) as client:
        await client.log("log").producer("p", epoch=1, since=since).append(b"a")

    assert log.headers == [("POST", sent)]


async def test_of_an_expired_producer_only_what_was_sent_before_may_be_done() -> None:
    log = Seen()
    async with serving(log) as url, Client(url) as client:
        producer = client.log("log").producer("p")
        log.replies = [END, ExpiredProducer("who?")]
        for value in (b"a", b"b"):
            with pytest.raises(ExpiredProducer) as once:
                await producer.append(value)
            assert once.value.outcome == NOT_DONE
        log.replies = [None, ExpiredProducer("who?")]
        with pytest.raises(ExpiredProducer) as again:
            await producer.append(b"c")
        assert again.value.outcome == UNKNOWN


async def test_under_an_epoch_of_the_caller_s_an_expired_producer_may_have_sent_it_before() -> None:
    log = Log()
    async with serving(log) as url, Client(url) as client:
        producer = client.log("log").producer("p", epoch=1)
        log.replies = [ExpiredProducer("who?")]
        with pytest.raises(ExpiredProducer) as once:
            await producer.append(b"a")

    assert once.value.outcome == UNKNOWN


async def test_a_new_producer_is_newer_than_its_ended_one_by_any_clock() -> None:
    newer = 1 << 52  # thousands of years from now
    log = Log()
    log.replies = [StaleProducer("the producer is in a newer epoch", producer_epoch=newer)]
    async with serving(log) as url, Client(url) as client:
        first = client.log("log").producer("p", since=0)
        with pytest.raises(StaleProducer):
            await first.append(b"a")

        second = client.log("log").producer("p", since=0)
        elsewhere = client.log("other").producer("p", since=0)

    assert first.epoch < newer < second.epoch == newer + 1
    assert elsewhere.epoch < newer
