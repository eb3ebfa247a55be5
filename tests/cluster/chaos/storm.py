"""Processes, disks, links and stores of a real cluster are hurt while clients write and read.

Everything that clients see goes into a history, and at the end every ledger is recovered, read
whole and judged (tests/support/history.py and log_history.py). What is hurt, when and for how long comes from the
seed; what the machine makes of it does not. The storm goes on by what happens, not by the clock:
the next fault comes when appends are acknowledged again, so that a slow machine only takes longer.
"""

import asyncio
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.cluster.chaos.clients import Clients
from tests.cluster.chaos.faults import FILL_S, Faults, Mend, World
from tests.cluster.chaos.report import IsEnough, Report
from tests.support import history, log_history
from tests.support.waiting import until

RESUME_S: Final = 120.0
"""How long appends may take to go on after a fault; the cluster needs a few seconds."""

FILL_FAULTS: Final = 6
"""Faults while a bookie gets again what it lost. Then they wait for it: autorecovery that is killed every
ten seconds never sees that a writer has been gone for its grace (rule 21).
"""

QUIET_ACKS: Final = 4
"""Acknowledgements between two faults."""


@dataclass(frozen=True, slots=True)
class Weights:
    """How often each kind comes, relative to the others."""

    kill: float = 10
    cut_power: float = 4
    part: float = 1
    cut_off_metadata: float = 2
    pause: float = 2
    trouble_a_store: float = 2
    kill_a_store: float = 0.2
    fail_over: float = 0.4
    break_a_call: float = 1


class Storm:
    """One storm over one cluster."""

    def __init__(
        self,
        world: World,
        report: Report,
        *,
        weights: Weights | None = None,
        writers: int = 3,
        resume_s: float = RESUME_S,
    ) -> None:
        """What was done and found goes into `report`, also where the storm breaks off."""
        self.report = report
        self._seed = seed = report.seed
        self._weights = weights or Weights()
        self._writers = writers
        self._resume_s = resume_s
        self._faults = Faults(world, report)
        self._clients = Clients(world.cluster, seed, report)

    def write_history(self, folder: Path) -> None:
        """Write down what the clients saw, for a person who looks for a cause."""
        self._clients.history.write(folder / f"chaos-{self._seed}-history.txt")
        self._clients.log_history.write(folder / f"chaos-{self._seed}-logs.txt")

    async def run(self, is_enough: IsEnough) -> None:
        """Write and read under faults until it is enough, then recover, read and judge it all.

        Where it breaks off, what the clients saw until then is judged all the same: all but what
        only the whole of a ledger or log shows (lost at its end).
        """
        began = time.monotonic()
        try:
            self.report.stage = "storm"
            try:
                await self._clients.run(lambda: self._rage(is_enough), writers=self._writers)
            finally:
                self.report.seconds = time.monotonic() - began
            self.report.stage = "everything is recovered and read"
            await self._clients.learn()
        finally:
            self.report.violations += history.check(self._clients.history)
            self.report.violations += log_history.check(self._clients.log_history.events)

    async def _rage(self, is_enough: IsEnough) -> None:
        names = [name for name in Weights.__slots__ if getattr(self._weights, name)]
        weights = [getattr(self._weights, name) for name in names]
        dice = random.Random(f"storm-{self._seed}")
        await self._until_going()
        async with asyncio.TaskGroup() as mending:
            meanwhile = 0
            while not is_enough(self.report):
                meanwhile = meanwhile + 1 if self._faults.filling else 0
                if meanwhile > FILL_FAULTS:
                    await until(
                        lambda: not self._faults.filling or is_enough(self.report),
                        "bookies have again what they lost",
                        FILL_S,
                    )
                    continue
                name = dice.choices(names, weights)[0]
                mend: Mend | None = await getattr(self._faults, name)(
                    random.Random(f"fault-{self._seed}-{dice.random()}")
                )
                if mend is not None:
                    mending.create_task(_run(mend))
                await self._until_going()
            self._faults.is_over = True

    async def _until_going(self) -> None:
        wanted = self.report.acknowledged + QUIET_ACKS
        await until(
            lambda: self.report.acknowledged >= wanted,
            "appends are acknowledged again",
            self._resume_s,
        )


async def _run(mend: Mend) -> None:
    await mend()
