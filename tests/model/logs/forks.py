"""Forks of a log that is under everything at once (rule 27a): what a fork had when it was created is what it has until it
is deleted, before what was appended to it, whatever becomes of its source and of other forks.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quorumlog.errors import (
    UNKNOWN,
    InvalidRequest,
    NoSuchLog,
    OffsetTruncated,
    QuorumLogError,
)
from quorumlog.protocol.batch import ProducerSeq, Record
from quorumlog.protocol.log import LogMetadata, LogSettings
from quorumlog.protocol.log.messages import Append
from tests.model.logs.demands import PATIENCE_S
from tests.model.logs.judge import Violation, told
from tests.model.logs.model import Gateway
from tests.model.logs.rewrites import key_of, look_up


@dataclass(slots=True)
class Fork:
    """A fork, with all that it must have: the first offset, and the values from there on."""

    name: str
    first: int
    values: list[bytes]
    sent: int = 0
    """Requests to append to it."""


class Forks:
    """One client that forks a log and these forks, writes, reads and deletes them."""

    def __init__(
        self,
        source: str,
        settings: LogSettings,
        *,
        pick: Callable[[], Gateway],
        stored: Mapping[int, bytes],
        may_lack: Callable[[int], bool],
        has_expired: Callable[[int], bool],
        seed: int,
    ) -> None:
        """`stored`: every record that a sealed ledger of the source ever held, by offset. `may_lack`: whether the source
        may lack the record at an offset, since it was removed or has expired.
        """
        self.source, self.settings = source, settings
        self.may_lack, self.has_expired = may_lack, has_expired
        self.pick, self.stored = pick, stored
        self.random = random.Random(f"forks-{seed}")
        self.count = 6 if self.random.random() < 0.3 else 0
        """Most seeds have no forks: they are the schedules that they were without."""
        self.alive: list[Fork] = []

    async def run(self) -> None:
        """Make some, and let go of some."""
        for number in range(self.count):
            await asyncio.sleep(self.random.random() * 0.3)
            fork = await self.made(f"fork-{number}")
            if fork is None:
                continue
            self.alive.append(fork)
            for _ in range(self.random.choice((0, 1, 3))):
                await self.append(self.random.choice(self.alive))
            await self.check(self.random.choice(self.alive))
            if len(self.alive) > 1 and self.random.random() < 0.5:
                await self.delete(self.random.choice(self.alive))

    async def end(self) -> None:
        """Read them all, and delete them."""
        for fork in tuple(self.alive):
            await self.check(fork)
            gateway = self.pick()
            await look_up(gateway, fork.name, await gateway.contents(fork.name), self.has_expired)
        for fork in tuple(self.alive):
            await self.delete(fork)

    async def made(self, name: str) -> Fork | None:
        """A new fork, of the log or of a fork; None where what it asked for was dropped meanwhile."""
        parent = self.random.choice((None, None, *self.alive))
        source = self.source if parent is None else parent.name
        row = await self.insist(lambda gateway: gateway.logs.rows.row(source))
        end = await self.insist(lambda gateway: gateway.logs.reader.end(source))
        at = self.random.choice((end, self.random.randint(row.first_offset, end)))
        try:
            made, _ = await self.insist(
                lambda gateway: gateway.logs.fork(LogMetadata(name, self.settings), row, at)
            )
        except (OffsetTruncated, InvalidRequest):
            return None
        # A repeated request finds the fork with an empty ledger of its own.
        last = made.last_item
        end = last.first_offset if last and made.end_offset is None else made.end_offset
        if (made.forked_at, end) != (at, at):
            raise Violation(
                f"rule 27a: {name} is asked for at {at}, begins at {made.forked_at}, ends at {end}"
            )
        if parent is None:
            values = [self.stored[offset] for offset in range(made.first_offset, at)]
        else:
            values = parent.values[made.first_offset - parent.first : at - parent.first]
        fork = Fork(name, made.first_offset, values)
        await self.check(fork)
        return fork

    async def append(self, fork: Fork) -> None:
        """One record, which must be at the fork's end."""
        value = f"{fork.name}/{fork.sent}".encode()
        record = Record(value, key_of(value.decode()))
        call = Append.of((record,), ProducerSeq(fork.name, 0, fork.sent))
        done = await self.insist(lambda gateway: gateway.logs.append(fork.name, call))
        end = fork.first + len(fork.values)
        if done.first_offset != end:
            raise Violation(f"rule 27a: {value!r} is told to be at {done.first_offset}, not {end}")
        fork.values.append(value)
        fork.sent += 1
        if self.random.random() < 0.3:
            await self.insist(lambda gateway: gateway.logs.roll(fork.name))

    async def check(self, fork: Fork) -> None:
        """Read a fork from its beginning."""
        records = await self.insist(lambda gateway: gateway.contents(fork.name))
        found = [(record.offset, told(record.record)) for record in records]
        known = dict(found)
        whole = list(enumerate(fork.values, fork.first))
        # The log may have been compacted before it was forked.
        wanted = [(at, value) for at, value in whole if at in known or not self.may_lack(at)]
        if found != wanted:
            raise Violation(f"rule 27a: {fork.name} holds {found}, not {fork.values}")

    async def delete(self, fork: Fork) -> None:
        """Delete one; what others share with it stays."""
        self.alive.remove(fork)
        await self.insist(lambda gateway: gateway.logs.delete(fork.name), may_be_gone=True)

    async def insist(
        self, work: Callable[[Gateway], Awaitable[Any]], *, may_be_gone: bool = False
    ) -> Any:
        """The answer through any gateway, another one if one dies."""
        is_again = False
        end = asyncio.get_running_loop().time() + PATIENCE_S
        while asyncio.get_running_loop().time() < end:
            gateway = self.pick()
            try:
                return await gateway.while_it_lives(work(gateway))
            except ConnectionResetError:
                pass
            except QuorumLogError as error:
                if may_be_gone and is_again and isinstance(error, NoSuchLog):
                    return None
                if isinstance(error, OffsetTruncated | InvalidRequest):
                    raise
                if not error.retryable and error.outcome != UNKNOWN:
                    raise Violation(f"a fork is refused: {error!r}") from error
            is_again = True
            await asyncio.sleep(0.02)
        raise Violation("liveness: a request of a fork never comes to an end")
