"""Careless callers: wrong types, calls outside of `with`, threads that break. Every call ends, and says why."""

import asyncio
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import pytest
from aiohttp import web

from quorumlog import client as sdk
from quorumlog.client import Batching, Client, ClientClosed, ConnectionLost, LogRecord, Record, sync
from quorumlog.errors import NOT_DONE, UNKNOWN, ClientBroke, QuorumLogError
from tests.support.waiting import until, until_sync
from tests.unit.client.test_transport import Gateway, serving

URL = "http://127.0.0.1:1"
_FIELDS = {"ledger_id": 1, "entry_id": 0, "last_add_confirmed": 0, "first_offset": 0}
TOLD = {**_FIELDS, "last_offset": 0, "transaction": "t", "next_offset": 0, "created_at": "x"}

WRONG_RECORDS: list[Callable[[], Any]] = [
    lambda: "text",
    lambda: 7,
    lambda: None,
    lambda: bytearray(b"x"),
    lambda: Record("text"),  # type: ignore[arg-type]
    lambda: Record(b"x", key="alice"),  # type: ignore[arg-type]
    lambda: Record(b"x", headers={"a": b"x"}),  # type: ignore[dict-item]
    lambda: Record(b"x", headers={b"a": "x"}),  # type: ignore[dict-item]
    lambda: Record(b"x", headers={"a": "\ud800"}),
    lambda: Record(b"x", headers=[("a", "b")]),  # type: ignore[arg-type]
    lambda: Record(b"x", timestamp=12),  # type: ignore[arg-type]
]


class Held(Gateway):
    """Answers no append before `gate` is set."""

    def __init__(self) -> None:
        super().__init__(TOLD)
        self.gate = asyncio.Event()

    async def handle(self, request: web.Request) -> web.Response:
        response = await super().handle(request)
        await self.gate.wait()
        return response


@pytest.mark.parametrize("number", range(len(WRONG_RECORDS)))
async def test_a_wrong_record_is_refused_at_once_without_harm_to_others(number: int) -> None:
    gateway = Held()
    async with serving(gateway) as url, Client(url) as client:
        log = client.log("log")
        for handle in (log, log.producer("p", epoch=1)):
            first = await handle.submit(b"a")
            neighbour = await handle.submit(b"b")
            with pytest.raises((TypeError, ValueError)) as refused:
                await handle.append(b"good", WRONG_RECORDS[number]())
            other = await handle.submit(b"c")
            gateway.gate.set()
            await asyncio.gather(first, neighbour, other)
            _is_clear(refused.value)


async def test_what_a_caller_changes_afterwards_is_not_sent_and_breaks_nothing() -> None:
    gateway = Held()
    headers: dict[Any, Any] = {"a": "b"}
    async with serving(gateway) as url, Client(url) as client:
        first = await client.log("log").submit(b"a")
        record = Record(b"x", headers=headers)
        changed = await client.log("log").submit(record)
        headers["a"] = b"bytes"
        gateway.gate.set()
        await asyncio.gather(first, changed)
    assert record.headers == {"a": "b"}


async def test_an_unencodable_append_ends_the_queued(caplog: pytest.LogCaptureFixture) -> None:
    gateway = Held()
    async with serving(gateway) as url, Client(url) as client:
        log = client.log("log")
        first = await log.submit(b"a")
        await until(lambda: gateway.paths, "the first append is sent")
        record = Record(b"x", headers={"a": "b"})
        changed = await log.submit(record)
        behind = await log.submit(b"c")
        record.headers["a"] = b"bytes"  # type: ignore[index]
        gateway.gate.set()
        await first
        for future in (changed, behind):
            with pytest.raises(ClientBroke):
                await future
        await log.append(b"d")
    assert "batching-broke" in caplog.text


@pytest.mark.parametrize("handle", ["ledger", "log", "producer"])
async def test_an_append_before_the_client_s_begin_or_after_its_end_is_refused(handle: str) -> None:
    gateway = Gateway(TOLD)
    async with serving(gateway) as url:
        client = Client(url)
        used: Any = {
            "ledger": client.ledger(1),
            "log": client.log("log"),
            "producer": client.log("log").producer(),
        }[handle]
        for _ in range(2):
            for call in (used.append, used.submit):
                with pytest.raises(ClientClosed) as closed:
                    await call(b"x")
                assert closed.value.outcome == NOT_DONE
            await used.flush()
            async with client:
                await used.append(b"x")


async def test_leaving_with_an_exception_ends_appends_that_have_not_begun() -> None:
    futures = []

    async def fail() -> None:
        async with Client(URL) as client:
            futures.append(await client.log("log").submit(b"x"))
            raise ValueError("the caller's")

    with pytest.raises(ValueError, match="the caller's"):
        await fail()
    (future,) = futures
    with pytest.raises(ConnectionLost) as lost:
        await future
    assert lost.value.outcome == NOT_DONE


async def test_the_deadline_holds_for_all_that_waits_behind_a_gateway_that_is_silent() -> None:
    gateway = Held()
    async with serving(gateway) as url, Client(url, deadline_s=0.2) as client:
        log = client.log("log")
        futures = [await log.submit(b"x", b"y") for _ in range(5)]
        await asyncio.wait(futures)
        outcomes = [getattr(future.exception(), "outcome", None) for future in futures]
        gateway.gate.set()
    assert set(outcomes) <= {UNKNOWN, NOT_DONE}
    assert outcomes[0] == UNKNOWN


@pytest.mark.parametrize(
    "wrong", ["127.0.0.1:8080", "localhost:8080", "ftp://a", "http://", "http://a:x", "http://a/?b"]
)
def test_what_is_no_gateway_s_url_is_refused_at_once_in_a_sentence(wrong: str) -> None:
    for face in (Client, sync.Client):
        with pytest.raises(ValueError, match="is not a gateway URL: use http://host:port"):
            face(URL, wrong)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"deadline_s": "60"}, TypeError),
        ({"deadline_s": 0}, ValueError),
        ({"deadline_s": float("nan")}, ValueError),
        ({"batching": {"linger_ms": 5}}, TypeError),
        ({"batching": Batching(linger_ms=5000), "deadline_s": 5}, ValueError),
    ],
)
def test_a_client_s_settings_are_checked(wrong: dict[str, Any], error: type[Exception]) -> None:
    for face in (Client, sync.Client):
        with pytest.raises(error) as refused:
            face(URL, **wrong)
        _is_clear(refused.value)


def _is_clear(error: BaseException) -> None:
    for internal in ("has no attribute", "_portal", "_batcher", "assert"):
        assert internal not in str(error), error
    assert str(error)


def _first_of(found: Any) -> None:
    if isinstance(found, Iterator):
        next(found)


_METHODS = [
    (name, method)
    for name in ("Client", "Ledger", "Log", "Producer", "Transaction", "TransactionLedger")
    for method, _ in inspect.getmembers(getattr(sdk, name), inspect.isfunction)
    if method[0] != "_"
]


def _handles(client: Any) -> dict[str, Any]:
    log = client.log("log")
    transaction = client.transaction("t")
    return {
        "Client": client,
        "Ledger": client.ledger(1),
        "Log": log,
        "Producer": log.producer("p", epoch=1),
        "Transaction": transaction,
        "TransactionLedger": transaction.ledger(),
    }


_GOOD: dict[str, Any] = {"ledger_id": 1, "name": "a", "log": "a", "transaction_id": "t"}
_GOOD |= {"owner": "me", "before": 1, "through": 1, "first": 0, "last": 0}
_GOOD |= {"to": 1, "record": LogRecord(0, b"", None, {}, "", 1, 0)}
_GOOD |= {"password": "secret", "grants": ["read:*"], "token_id": "0" * 16}
_GOOD |= {"key": "a", "payload": b"x", "payloads": [b"x"], "records": b"x", "ledger_ids": 1}


def _wrong_calls(function: Any) -> Iterator[Callable[[Any], Any]]:
    """Calls with one argument each that no parameter takes."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    for wrong in parameters:
        given = [p for p in parameters if p is wrong or p.default is p.empty]
        args = [
            object() if p is wrong else _GOOD[p.name] for p in given if p.kind is not p.KEYWORD_ONLY
        ]
        named = {p.name: object() for p in given if p.kind is p.KEYWORD_ONLY}
        if wrong.kind is wrong.KEYWORD_ONLY or wrong.annotation is not bool:
            yield lambda method, args=args, named=named: method(*args, **named)  # type: ignore[misc]


@pytest.mark.parametrize(("name", "method"), _METHODS, ids=str)
async def test_every_call_with_a_wrong_argument_says_so(name: str, method: str) -> None:
    gateway = Gateway(TOLD)
    async with serving(gateway) as url:

        def use() -> None:
            with sync.Client(url) as client:
                handle = _handles(client)[name]
                sent = len(gateway.paths)
                for call in _wrong_calls(getattr(type(handle), method)):
                    with pytest.raises((TypeError, ValueError)) as refused:
                        call(getattr(handle, method))
                    _is_clear(refused.value)
                assert len(gateway.paths) == sent, "a wrong call was sent"

        await asyncio.to_thread(use)


@pytest.mark.parametrize(("name", "method"), _METHODS, ids=str)
async def test_every_call_outside_of_with_says_so(name: str, method: str) -> None:
    gateway = Gateway(TOLD)
    async with serving(gateway) as url:

        def use() -> None:
            client = sync.Client(url)
            with client:
                handle = _handles(client)[name]
            function = getattr(type(handle), method)
            given = [
                _GOOD[p.name]
                for p in list(inspect.signature(function).parameters.values())[1:]
                if p.default is p.empty and p.kind is not p.KEYWORD_ONLY
            ]
            sends_nothing = not inspect.iscoroutinefunction(getattr(getattr(sdk, name), method))
            is_lazy = method in ("ledgers", "logs", "records", "entries", "tail")
            if sends_nothing and not is_lazy:
                return
            with pytest.raises(ClientClosed, match="inside `with`"):
                _first_of(getattr(handle, method)(*given))

        await asyncio.to_thread(use)


def test_a_client_that_was_never_entered_says_so() -> None:
    with pytest.raises(ClientClosed, match="inside `with`"):
        sync.Client(URL).bookies()
    with pytest.raises(ClientClosed, match="inside `with`"):
        sync.Client(URL).log("log").submit(b"x")


async def test_a_sync_client_can_be_entered_again_with_its_handles() -> None:
    gateway = Gateway(TOLD)
    async with serving(gateway) as url:

        def use() -> None:
            client = sync.Client(url)
            log = client.log("log")
            for _ in range(2):
                with client:
                    assert log.submit(b"x").result().first_offset == 0

        await asyncio.to_thread(use)


async def test_threads_that_wait_end_when_the_client_s_thread_dies() -> None:
    gateway = Held()
    async with serving(gateway) as url:

        def use() -> list[BaseException | None]:
            client = sync.Client(url)
            client.__enter__()
            log = client.log("log")
            futures: list[Future[Any]] = [log.submit(b"x") for _ in range(3)]
            errors: list[BaseException | None] = []

            def ask() -> None:
                try:
                    client.bookies()
                except QuorumLogError as error:
                    errors.append(error)

            asking = threading.Thread(target=ask)
            asking.start()
            portal = client._portal

            async def seen() -> None:
                await until(lambda: len(gateway.paths) == 2, "both are asked")
                asyncio.get_running_loop().call_soon(sys.exit)
                await asyncio.Event().wait()

            with pytest.raises(ClientClosed):
                portal.run(seen())
            asking.join()
            errors += [future.exception() for future in futures]
            with pytest.raises(ClientClosed):
                client.bookies()
            with pytest.raises(ClientClosed):
                client.__exit__(None)
            return errors

        errors = await asyncio.to_thread(use)
        gateway.gate.set()
    assert len(errors) == 4
    assert all(isinstance(error, QuorumLogError) for error in errors)
    assert isinstance(errors[0], ClientClosed)
    assert errors[0].outcome == UNKNOWN


async def test_a_callback_that_ends_the_client_s_thread_leaves_no_submission_waiting() -> None:
    gateway = Held()
    async with serving(gateway) as url:

        def use() -> None:
            client = sync.Client(url, batching=Batching(count_max=2))
            client.__enter__()
            log = client.log("log")
            first = log.submit(b"x")
            until_sync(first.running, "the first record is under way")
            futures = [log.submit(b"x") for _ in range(6)]
            futures[0].add_done_callback(lambda _: sys.exit())
            loop.call_soon_threadsafe(gateway.gate.set)
            until_sync(lambda: all(f.done() for f in futures), "every submission ends")
            assert [f.exception() for f in (first, *futures[:2])] == [None] * 3
            with pytest.raises(ClientClosed):
                client.__exit__(None)

        loop = asyncio.get_running_loop()
        await asyncio.to_thread(use)


async def test_submissions_of_threads_keep_their_order_and_wait_for_room() -> None:
    gateway = Bodies()
    async with serving(gateway) as url:

        def use() -> None:
            batching = Batching(count_max=7, queued_bytes_max=1000)
            with sync.Client(url, batching=batching) as client:
                ledger = client.ledger(1)
                futures = [ledger.submit(b"%03d" % n + b"x" * 97) for n in range(100)]
                last = ledger.append(b"100" + b"x" * 97)
                assert [future.result() for future in futures]
                assert last >= 0

        await asyncio.to_thread(use)

    assert gateway.values == [b"%03d" % n for n in range(101)]


class Bodies(Gateway):
    """Remembers the first bytes of each entry."""

    def __init__(self) -> None:
        super().__init__(TOLD)
        self.values: list[bytes] = []

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        if request.method == "GET":
            raise web.HTTPNotFound  # no sockets here
        if request.content_type == "application/octet-stream":
            self.values.append(body[:3])
        else:
            self.values += [body[at + 4 : at + 7] for at in range(0, len(body), 104)]
        return await super().handle(request)


async def test_many_threads_that_wait_for_room_all_get_it() -> None:
    gateway = Gateway(TOLD)
    async with serving(gateway) as url:

        def use() -> list[Any]:
            batching = Batching(count_max=2, queued_bytes_max=200)
            with sync.Client(url, batching=batching) as client, ThreadPoolExecutor(8) as pool:
                ledger = client.ledger(1)

                def submit(_number: int) -> Any:
                    return ledger.submit(b"x" * 150).result()

                return list(pool.map(submit, range(100)))

        assert len(await asyncio.to_thread(use)) == 100


async def test_a_submission_of_a_thread_can_be_taken_back_while_it_is_queued() -> None:
    gateway = Held()
    async with serving(gateway) as url:

        def use() -> None:
            with sync.Client(url) as client:
                log = client.log("log")
                first = log.submit(b"a")
                until_sync(first.running, "the first record is under way")
                queued = log.submit(b"b")
                assert queued.cancel()
                loop.call_soon_threadsafe(gateway.gate.set)
                assert log.submit(b"c").result().first_offset == 0
                assert first.result().first_offset == 0

        loop = asyncio.get_running_loop()
        await asyncio.to_thread(use)


_FORK: Final = """
import os, signal, sys
from quorumlog.client.sync import Client
from quorumlog.errors import ClientClosed

unopened = Client(sys.argv[1])
with Client(sys.argv[1]) as client:
    log = client.log("log")
    future = log.submit(b"x")
    future.result()
    del future._result
    future._state = "PENDING"
    calls = (log.info, lambda: log.append(b"x"), lambda: log.submit(b"x"), future.result, client.__enter__)
    client._portal._lock.acquire()  # as a thread that submits has it at times
    child = os.fork()
    if child == 0:
        told = 0
        signal.alarm(600)
        for call in calls:
            try:
                call()
            except ClientClosed as error:
                told += "fork" in error.detail
        client.__exit__(None, None, None)
        with unopened:
            unopened.log("log").append(b"x")
        os._exit(0 if told == len(calls) else 1)
    client._portal._lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    log.append(b"x")
"""


async def test_a_client_that_a_fork_inherits_says_so_and_never_hangs() -> None:
    async with serving(Gateway(TOLD)) as url:
        program = await asyncio.create_subprocess_exec(
            sys.executable, "-W", "ignore", "-c", _FORK, url, stderr=asyncio.subprocess.PIPE
        )
        _, stderr = await program.communicate()

    assert program.returncode == 0, stderr.decode()
