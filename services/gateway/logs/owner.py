"""The owner of one log in this process: its machine (`protocol/log/owner.py`), driven.

Appends that arrive in one turn of the event loop reach the machine in one step.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from quorumlog.errors import NOT_DONE, UNKNOWN, QuorumLogError
from quorumlog.protocol.heads import LogHead
from quorumlog.protocol.log import LogMetadata
from quorumlog.protocol.log.messages import (
    Append,
    AppendsAsked,
    HeadLearned,
    LogAppended,
    NotOwner,
    OwnerEnded,
    Publish,
    PublishAsked,
    ReleaseAsked,
    Resolve,
    Retired,
    RollAsked,
    RowTaken,
    Settled,
    Sizes,
    Stopped,
    TakeoverDone,
    Ticked,
)
from quorumlog.protocol.log.owner import Owner, not_the_owner
from quorumlog.protocol.log.takeover import Takeover
from quorumlog.protocol.transaction import Transaction
from services.gateway.logs.driver import LogDriver, Told, World

Waiting = tuple[asyncio.Future[LogAppended], Append]
"""A request to append that certainly was not done yet, and who waits for it."""


class LogOwner:
    """Appends to one log, in this process."""

    def __init__(
        self,
        taken: Takeover,
        log: LogMetadata,
        world: World,
        *,
        settle_s: float,
        on_end: Callable[["LogOwner"], None],
    ) -> None:
        """`taken` has made this process the owner by the row `log`; `on_end` is called once, when
        the owner failed.
        """
        self._machine = Owner(log, taken.producers, world.now(), settle_s=settle_s)
        self._driver = LogDriver(self._machine, log.name, world, self._told)
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._gathered: list[Waiting] = []
        self._again: list[Waiting] = []
        self._settled = asyncio.Event()

    # --- what it knows ---------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The log's."""
        return self._machine.log.name

    @property
    def ledger_id(self) -> int:
        """The ledger that it writes."""
        return self._machine.ledger_id

    @property
    def error(self) -> QuorumLogError | None:
        """Why it failed, where another owner is not the reason."""
        return self._machine.error

    @property
    def is_ended(self) -> bool:
        """Whether this owner is over."""
        return self._machine.is_ended

    @property
    def acknowledged_offset(self) -> int:
        """The end of what is acknowledged."""
        return self._machine.acknowledged_offset

    def is_mine(self, log: LogMetadata) -> bool:
        """Whether a row still says that this owner writes the log's last ledger."""
        return self._machine.is_mine(log)

    # --- what happens to it ----------------------------------------------------------------------

    def append(self, call: Append) -> asyncio.Future[LogAppended] | None:
        """Begin an append, in the order of the calls; None: this owner takes nothing any more."""
        if self._machine.is_ended:
            return None
        future: asyncio.Future[LogAppended] = self._loop.create_future()
        self._gathered.append((future, call))
        if len(self._gathered) == 1:
            self._loop.call_soon(self._flush)
        return future

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, []
        if gathered:
            self._driver.post(AppendsAsked(tuple(gathered)))

    def adopt(self, again: Sequence[Waiting]) -> None:
        """Append what has waited elsewhere, before whatever comes."""
        if again:
            self._driver.post(AppendsAsked(tuple(again), are_again=True))

    def roll(self) -> asyncio.Future[NotOwner | None]:
        """Go on in a new ledger (rule 23). An empty ledger stays."""
        future: asyncio.Future[NotOwner | None] = self._loop.create_future()
        self._driver.post(RollAsked(future))
        return future

    def publish(self, call: Publish, sizes: Sizes) -> asyncio.Future[Transaction | NotOwner]:
        """Put a transaction's ledgers onto the log, and go on in a new one after them (rule 28).

        `sizes`: (ledger, records, bytes) of each of them. One that was ended before is answered as
        then.
        """
        future: asyncio.Future[Transaction | NotOwner] = self._loop.create_future()
        self._driver.post(PublishAsked(future, call, sizes))
        return future

    def learn(self, head: LogHead) -> None:
        """A row of the primary was read (rule 16a)."""
        self._driver.post(HeadLearned(head))

    def took(self, log: LogMetadata) -> None:
        """Somebody else changed the row without ending this owner (truncated it)."""
        self._driver.post(RowTaken(log))

    def tick(self) -> None:
        """Time has passed."""
        self._driver.post(Ticked())

    async def release(self) -> None:
        """Settle what is in flight, close the ledger, and end."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._driver.post(ReleaseAsked(future))
        await future

    async def retire(self) -> list[Waiting]:
        """End without a failure. What was in flight is answered where the end of its ledger says so;
        gives those that certainly were not appended, in order.
        """
        gathered, self._gathered = self._gathered, []
        self._driver.post(Retired())
        try:
            await self._settled.wait()
        except asyncio.CancelledError:
            self._driver.post(Stopped())
            refuse(gathered, not_the_owner(self.name))
            raise
        again, self._again = self._again, []
        return again + gathered

    def _told(self, told: Told) -> None:
        match told:
            case Resolve(future, answer):
                resolve(future, answer)
            case Settled(again):
                self._again += again
                self._settled.set()
            case OwnerEnded():
                self._on_end(self)
            case TakeoverDone():
                raise AssertionError("an owner takes nothing over")


def resolve(future: asyncio.Future[Any], answer: object) -> None:
    """Answer, unless the client went away."""
    if future.done():
        return
    if isinstance(answer, QuorumLogError):
        # Each waiter gets an error of its own: raising one adds to its traceback.
        future.set_exception(answer.replace())
        future.exception()  # maybe nobody waits: that is not to be reported as forgotten
    else:
        future.set_result(answer)


def refuse(waiting: Sequence[Waiting], error: QuorumLogError) -> None:
    """These requests certainly were not done."""
    for future, _ in waiting:
        resolve(future, error.with_outcome(NOT_DONE))


def lose(waiting: Sequence[Waiting], error: QuorumLogError) -> None:
    """Whether these requests were done, nobody can say."""
    for future, _ in waiting:
        resolve(future, error.with_outcome(UNKNOWN))
