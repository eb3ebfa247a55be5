"""An event loop in a thread of its own, for code without an event loop."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from quorumlog.client.paging import Paged

T = TypeVar("T")


class Portal:
    """Runs coroutines for other threads and returns the results. Any thread may call."""

    def __init__(self) -> None:
        """Start the thread, a daemon: it does not keep the process alive."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="quorumlog-client", daemon=True
        )
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result. If the wait is interrupted (Ctrl-C), cancel the
        coroutine.
        """
        if not self._thread.is_alive() or threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("the client is closed, or it is called from its own callback")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def future(self, awaited: "asyncio.Future[T]") -> "Future[T]":
        """An asyncio future as a future for threads."""

        async def result() -> T:
            return await awaited

        return asyncio.run_coroutine_threadsafe(result(), self._loop)

    def iterate(self, paged: Paged[T]) -> Iterator[T]:
        """The items; the calling thread waits for the loop once per page."""
        pages = paged.pages()
        try:
            while True:
                try:
                    page = self.run(anext(pages))
                except StopAsyncIteration:
                    return
                yield from page
        finally:
            # The end of the client has closed the generator already.
            if self._thread.is_alive():
                self.run(_closed(pages))

    def close(self) -> None:
        """Cancel what is under way, and end the thread."""
        self.run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_asyncgens()


async def _closed(pages: AsyncGenerator[Any, None]) -> None:
    """Close a generator whose last step may not have returned yet."""
    while True:
        try:
            await pages.aclose()
        except RuntimeError:
            await asyncio.sleep(0)
        else:
            return
