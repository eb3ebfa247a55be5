"""The portal: an event loop in its own thread, for code without an event loop."""

import asyncio
import logging
import os
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Generic, TypeVar

from quorumlog.client.batching import Batcher, Submission
from quorumlog.client.checks import check_process
from quorumlog.client.records import Paged
from quorumlog.errors import UNKNOWN, ClientClosed

log = logging.getLogger(__name__)


T = TypeVar("T")
P = TypeVar("P")


class _Submitted(Future[T]):
    """The future of an append. A forked child has no thread that could set the result."""

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()

    def result(self, timeout: float | None = None) -> T:
        """Like `Future.result`, but raises ClientClosed in a forked child."""
        check_process(self._pid)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Like `Future.exception`, but raises ClientClosed in a forked child."""
        check_process(self._pid)
        return super().exception(timeout)


class Portal:
    """Runs coroutines for other threads and returns the results. Any thread may use a portal.

    Invariants: however the portal's thread ends, all of its work ends too. Once `_is_open` is
    False, the event loop gets no more work, and every task is cancelled. A forked child has no
    portal thread, and its copy of the lock may be locked for ever, so it never takes the lock.
    """

    def __init__(self) -> None:
        """`open` starts the thread."""
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._is_open = False
        self._loop: asyncio.AbstractEventLoop
        self._inner: AbstractAsyncContextManager[object]
        self._thread: threading.Thread | None = None
        self._posted: list[Batcher[Any, Any, Any]] = []
        """The batchers to which threads have posted submissions."""

    def open(self, inner: AbstractAsyncContextManager[object]) -> None:
        """Start the thread, which enters `inner`. The thread does not keep the process alive."""
        if self._is_open:
            self._check_process()
            raise RuntimeError("the client is already open: enter `with` only once")
        self._loop = asyncio.new_event_loop()
        self._inner = inner
        self._thread = threading.Thread(target=self._work, name="quorumlog-client", daemon=True)
        self._is_open, self._pid = True, os.getpid()
        self._thread.start()
        try:
            self.run(inner.__aenter__())
        except BaseException:
            self._stop()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result. If the wait is interrupted (Ctrl-C), cancel the
        coroutine.

        Raises: the coroutine's exceptions; ClientClosed before `open`, after `close`, and in a
        forked child.
        """
        try:
            self._check_process()
            with self._lock:
                self._check_callable()
                future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except BaseException:
            work.close()
            raise
        try:
            return future.result()
        except CancelledError:
            raise ClientClosed("the client was closed during this call", outcome=UNKNOWN) from None
        except BaseException:
            future.cancel()
            raise

    def submit(self, batcher: Batcher[P, Any, T], payloads: Sequence[P]) -> Future[T]:
        """Submit an append from a thread, like `Batcher.submit`. Waits for the event loop only while
        the queue is full. One wake-up of the loop handles all submissions that threads post until
        the loop runs.
        """
        given, size = batcher.checked(payloads)
        self._check_process()
        done: Future[T] = _Submitted()
        with self._lock:
            self._check_callable()
            end = self._loop.time() + batcher.deadline_s
            submission = Submission(given, size, None, False, end, done)
            if batcher.has_room(size):
                if batcher.post(submission):
                    self._posted.append(batcher)
                    if len(self._posted) == 1:
                        self._loop.call_soon_threadsafe(self._deliver)
                return done
        self.run(batcher.queue_with_room(submission))
        return done

    def _deliver(self) -> None:
        """Hand the posted submissions of threads to the batchers, in the order of the calls."""
        with self._lock:
            batchers, self._posted = self._posted, []
            collected = [(batcher, batcher.collect()) for batcher in batchers]
        for batcher, posted in collected:
            batcher.receive(posted)

    def iterate(self, paged: Paged[T]) -> Iterator[T]:
        """Yield the items of a list. The calling thread waits for the event loop once per page."""
        pages = paged.pages()
        try:
            while True:
                try:
                    page = self.run(anext(pages))
                except StopAsyncIteration:
                    return
                yield from page
        finally:
            # ClientClosed: the end of the client has already closed the generator.
            with suppress(ClientClosed):
                self.run(_closed(pages))

    def close(self, *reason: Any) -> None:
        """Leave `inner`, cancel all tasks, and end the thread. Does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        try:
            self.run(self._inner.__aexit__(*reason))
        finally:
            self._stop()

    def _stop(self) -> None:
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread is not None:
            self._thread.join()

    def _check_process(self) -> None:
        if self._is_open:
            check_process(self._pid)

    def _check_callable(self) -> None:
        if not self._is_open or self._thread is None or not self._thread.is_alive():
            raise ClientClosed("the client is not open: use it inside `with`")
        if threading.current_thread() is self._thread:
            raise RuntimeError("a callback of the client can't make blocking calls to the client")

    def _work(self) -> None:
        """The thread's body: run the event loop, and end all tasks however the loop ends."""
        loop = self._loop
        try:
            loop.run_forever()
        except BaseException:
            log.exception("client-thread-broke")
        finally:
            with self._lock:
                self._is_open = False
            loop.run_until_complete(_end(self._inner))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()


class Face(Generic[T]):
    """A synchronous object: wraps an asynchronous object and the portal that runs its methods."""

    def __init__(self, portal: Portal, inner: T) -> None:
        """Only a client or another synchronous object calls this method."""
        self._portal, self._inner = portal, inner

    def __repr__(self) -> str:
        """The asynchronous object's representation."""
        return repr(self._inner)


async def _end(inner: AbstractAsyncContextManager[object]) -> None:
    """Cancel every task, including the tasks that a cancelled task starts, and leave `inner`."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    await inner.__aexit__(None, None, None)


async def _closed(pages: AsyncGenerator[Any, None]) -> None:
    """Close a generator whose last step may still be running."""
    while True:
        try:
            await pages.aclose()
        except RuntimeError:
            await asyncio.sleep(0)
        else:
            return
