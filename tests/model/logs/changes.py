"""Changes of a log that clients repeat, and gateways that stand still with one copy (rule 6a).

One client makes a log, changes it, closes it and deletes it, again and again under one name, one thing after the other. It
gives each request a name and repeats it elsewhere when a gateway is slow, as the SDK does; nobody cancels the first copy,
which is carried out whenever its gateway goes on. The judge knows what each answer must have left, and compares after
every answer, and once more when all gateways have woken: a copy that is carried out late makes a difference.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from quorumlog.errors import UNKNOWN, NoSuchLog, QuorumLogError
from quorumlog.net.operations import Operation
from quorumlog.protocol.batch import Record
from quorumlog.protocol.log import LogMetadata, LogSettings, LogState
from quorumlog.protocol.log.messages import Append
from quorumlog.protocol.once import Once
from tests.model.logs.demands import ARCHIVED, CLOSE, PATCH, PATIENCE_S, PUT, TRUNCATE, judge_error
from tests.model.logs.judge import Violation
from tests.model.logs.model import Cluster, Gateway
from tests.support.once import once

TRY_S: Final = 1.0
"""How long the client waits before it repeats a request elsewhere."""


@dataclass(frozen=True, slots=True)
class Known:
    """What the client knows of the log."""

    created_at: str
    roll_bytes: int
    is_protected: bool
    state: LogState
    first_offset: int
    archived_through: int | None

    @classmethod
    def of(cls, row: LogMetadata) -> "Known":
        """A row, as far as clients change it."""
        return cls(
            row.created_at,
            row.settings.roll_bytes,
            row.deletion_protection,
            row.state,
            row.first_offset,
            row.archived_through,
        )


class Changes:
    """The client, and the gateways that stand still while it asks them."""

    NAME: Final = "changed"

    def __init__(
        self,
        cluster: Cluster,
        settings: LogSettings,
        *,
        alive: Callable[[], list[Gateway]],
        stand_still: Callable[[Gateway, float], None],
        seed: int,
    ) -> None:
        self.cluster, self.settings = cluster, settings
        self.alive, self.stand_still = alive, stand_still
        self.random = random.Random(f"once-{seed}")
        self.copies: list[asyncio.Task[Any]] = []
        self.sent = 0
        self.known: Known | None = None
        """After the last answer; None: there is no log."""

    async def run(self) -> None:
        """Some logs of one name; the last one stays."""
        for generation in range(3):
            await self.begin()
            for _ in range(4):
                await self.change()
            if self.random.random() < 0.7:
                await self.close()
            if generation < 2:
                await self.delete()

    async def end(self) -> None:
        """No copy that comes late has changed anything, nor told members of a deletion that was none."""
        await asyncio.gather(*self.copies, return_exceptions=True)
        self.judge("when every copy was carried out")
        if self.cluster.wrong_tombstones:
            named = sorted(self.cluster.wrong_tombstones)
            raise Violation(f"rule 18e: members are told that ledgers {named} are deleted")

    # --- what the client asks for ------------------------------------------------------------------

    async def begin(self) -> None:
        """The log is made, and gets ledgers with records."""
        for _ in range(self.random.choice((1, 1, 2))):  # the second one finds it there
            await self.ask(
                PUT, {}, lambda gateway, name: gateway.logs.put(self.NAME, self.settings, once=name)
            )
        call = Append.of((Record(b"a record"),))
        for _ in range(3):
            await self.insist(lambda gateway: gateway.logs.append(self.NAME, call))
            await self.insist(lambda gateway: gateway.logs.roll(self.NAME))

    async def change(self) -> None:
        """One change, or one that changes nothing."""
        assert self.known is not None
        match self.random.randrange(4):
            case 0:
                size = self.random.choice((1 << 40, (1 << 40) + self.sent, self.known.roll_bytes))
                limits = {"roll_bytes": size}
                await self.ask(
                    PATCH,
                    {"roll_bytes": size},
                    lambda gateway, name: gateway.logs.change(self.NAME, limits, once=name),
                )
            case 1:
                await self.protect(is_on=self.random.random() < 0.5)
                await self.protect(is_on=False)  # or it could be neither truncated nor deleted
            case 2:
                before = self.random.choice((0, 1, 3))
                row = self.cluster.logs[self.NAME]
                await self.ask(
                    TRUNCATE,
                    {"first_offset": row.truncated(before).first_offset},
                    lambda gateway, name: gateway.logs.truncate(self.NAME, before, once=name),
                )
            case _:
                known = self.known.archived_through
                through = self.random.choice((1, 2, 3))
                if through >= (known or 0):
                    await self.ask(
                        ARCHIVED,
                        {"archived_through": through},
                        lambda gateway, name: gateway.logs.archived(
                            self.NAME, through, expect=known, once=name
                        ),
                    )

    async def protect(self, *, is_on: bool) -> None:
        """The log's protection from deletion, on or off."""
        await self.ask(
            PATCH,
            {"is_protected": is_on},
            lambda gateway, name: gateway.logs.change(
                self.NAME, {}, deletion_protection=is_on, once=name
            ),
        )

    async def close(self) -> None:
        """The log is closed, sometimes twice."""
        for _ in range(self.random.choice((1, 1, 2))):
            await self.ask(
                CLOSE,
                {"state": LogState.CLOSED},
                lambda gateway, name: gateway.logs.close(self.NAME, once=name),
            )

    async def delete(self) -> None:
        """The SDK doesn't repeat a deletion: its outcome is unknown then, until somebody looks."""
        while self.NAME in self.cluster.logs:
            try:
                await self.insist(lambda gateway: gateway.logs.delete(self.NAME))
            except NoSuchLog:
                break
        self.known = None
        # Where a name is free for long, copies of what once found a log there may come.
        await asyncio.sleep(self.random.choice((0, 0, 13)))

    # --- how it asks -------------------------------------------------------------------------------

    async def ask(
        self,
        asked: Operation,
        wanted: dict[str, Any],
        work: Callable[[Gateway, Once], Awaitable[Any]],
    ) -> None:
        """A request under one name, until it is answered; `wanted`: what it changes of what is known. A gateway may stop at
        any step of it, for longer than the client waits, and than the client's next requests take.
        """
        self.judge(f"before {asked.name}")
        self.sent += 1
        name = once(f"{self.sent}", asked.name)
        end = self.cluster.now() + PATIENCE_S
        while self.cluster.now() < end:
            gateway = self.random.choice(self.alive())
            if not gateway.is_silent and self.random.random() < 0.4:
                at_s, for_s = self.random.random() * 0.02, self.random.uniform(0.5, 12)
                loop = asyncio.get_running_loop()
                loop.call_later(at_s, self.stand_still, gateway, for_s)
            copy = asyncio.ensure_future(gateway.while_it_lives(work(gateway, name)))
            self.copies.append(copy)
            await asyncio.wait((copy,), timeout=TRY_S)
            if not copy.done():
                continue
            try:
                await copy
            except ConnectionResetError:
                continue
            except QuorumLogError as error:
                judge_error(asked, error)
                if not error.retryable and error.outcome != UNKNOWN:
                    raise Violation(f"{asked.name} is refused: {error!r}") from error
                await asyncio.sleep(0.02)
                continue
            if self.known is None:
                self.known = Known.of(self.cluster.logs[self.NAME])
            self.known = replace(self.known, **wanted)
            self.judge(f"after {asked.name}")
            return
        raise Violation(f"liveness: {asked.name} never comes to an end")

    async def insist(self, work: Callable[[Gateway], Awaitable[Any]]) -> Any:
        """The answer to a request without a name, through a gateway that goes on."""
        end = self.cluster.now() + PATIENCE_S
        while self.cluster.now() < end:
            try:
                gateway = self.random.choice(self.alive())
                return await gateway.while_it_lives(work(gateway))
            except ConnectionResetError:
                continue
            except QuorumLogError as error:
                if not error.retryable and error.outcome != UNKNOWN:
                    raise
            await asyncio.sleep(0.02)
        raise Violation("liveness: a request never comes to an end")

    # --- the judge ---------------------------------------------------------------------------------

    def judge(self, when: str) -> None:
        """The log is what the answers so far have made of it."""
        row = self.cluster.logs.get(self.NAME)
        found = None if row is None else Known.of(row)
        if found != self.known:
            raise Violation(f"rule 6a: {when} the log is {found}, and was {self.known}")
