"""`python -m tests.cluster.chaos --time 60s --seed 1`: a storm over a cluster of its own (`make chaos`)."""

import argparse
import asyncio
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Final

from rich.console import Console

from loadtest.program import Seconds
from tests.cluster.chaos.report import Report
from tests.cluster.chaos.setting import Machine
from tests.cluster.chaos.storm import RESUME_S, Storm, Weights
from tests.support.spread import INTERRUPTED_STATUS
from tests.support.waiting import DeadlineMissed

BUILD: Final = Path(__file__).resolve().parents[3] / "build"
MISSED_STATUS: Final = 3
"""Something did not go on in time: no claim, and on a machine that stalls no fault either."""

SYNCED: Final = "synced"
DEFERRED: Final = "deferred"
"""The durabilities, in the order in which their storms come."""

TELL_EVERY_S: Final = 30.0
"""How often a line tells how far it is, where there is no terminal."""


SITES_WEIGHT: Final = 150.0
"""Of the calls that fail, where each is to: a recording shows about 120."""


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster.chaos",
        description="Without --time it goes on until the counts are reached, or for 60 s.",
    )
    parser.add_argument("--time", type=Seconds, help="at most so long, as in 60s or 5m")
    parser.add_argument("--seed", type=int, default=1, help="what is hurt, when and how")
    parser.add_argument("--kills", type=int, default=0, help="go on until there were so many")
    parser.add_argument("--power-cuts", type=int, default=0, help="the same of power cuts")
    parser.add_argument("--partitions", type=int, default=0, help="the same of partitions")
    parser.add_argument(
        "--metadata-cuts", type=int, default=0, help="the same of gateways that lose metadata only"
    )
    parser.add_argument(
        "--failovers", type=int, default=0, help="the same of Postgres's standbys that take over"
    )
    parser.add_argument(
        "--sites",
        action="store_true",
        help="the same of each call of a bookie, as recorded, that fails",
    )
    parser.add_argument("--durability", choices=(SYNCED, DEFERRED, "both"), default="both")
    parser.add_argument("--only", choices=("processes",), default="", help="nothing needs root")
    parser.add_argument(
        "--patience", type=Seconds, default=RESUME_S, help="how long appends may stand still"
    )
    parser.add_argument("--build", type=Path, default=BUILD, help="where the report goes")
    return parser.parse_args()


class Plan:
    """When it is enough."""

    def __init__(
        self, asked: argparse.Namespace, machine: Machine, share: float, *, with_sites: bool
    ) -> None:
        counts = {
            "kills": asked.kills,
            "power_cuts": 0 if "power cut" in machine.lacks else asked.power_cuts,
            "metadata_cuts": asked.metadata_cuts,
            "failovers": asked.failovers,
            "partitions": 0 if "partition" in machine.lacks else asked.partitions,
        }
        self.counts = {name: int(count * share) for name, count in counts.items() if count}
        self.sites = with_sites and asked.sites and "failing call" not in machine.lacks
        has_counts = bool(self.counts or self.sites)
        limit = asked.time if asked.time or has_counts else 60.0
        self._end = None if limit is None else time.monotonic() + limit * share
        self._has_counts = has_counts
        self.is_interrupted = False

    def __call__(self, report: Report) -> bool:
        """Whether it is."""
        if self.is_interrupted:
            return True
        if self._end is not None and time.monotonic() >= self._end:
            return True
        return self._has_counts and self._is_reached(report)

    def _is_reached(self, report: Report) -> bool:
        if any(getattr(report, name) < count for name, count in self.counts.items()):
            return False
        return not self.sites or report.has_every_site


def weights(asked: argparse.Namespace, *, is_deferred: bool) -> Weights:
    """So that the counts are reached at about the same time."""
    if is_deferred:
        # One bookie at a time is hurt, and most of them by power: that is what is promised.
        return Weights(cut_power=20)
    counts = (asked.kills, asked.power_cuts, asked.partitions, asked.metadata_cuts, asked.failovers)
    if not any(counts):
        return Weights(break_a_call=SITES_WEIGHT) if asked.sites else Weights()
    return Weights(
        kill=asked.kills * 0.7,  # a fault kills more than one, and others kill too
        cut_power=asked.power_cuts * 0.55,
        part=float(asked.partitions),
        cut_off_metadata=max(asked.metadata_cuts, asked.kills * 0.15, 1.0),
        pause=max(asked.kills * 0.1, 1),
        trouble_a_store=max(asked.kills * 0.1, 1),
        kill_a_store=max(asked.kills * 0.01, 0.1),
        fail_over=max(asked.failovers, asked.kills * 0.02, 0.1),
        break_a_call=SITES_WEIGHT if asked.sites else max(asked.kills * 0.03, 0.1),
    )


async def storm(asked: argparse.Namespace, machine: Machine, report: Report) -> None:
    """One storm with one durability."""
    is_deferred = report.durability == DEFERRED
    # A bookie that deferred its syncs must be filled again before the next one may be hurt.
    share = {"both": 0.1 if is_deferred else 0.9}.get(asked.durability, 1.0)
    console = Console(stderr=True)
    # Every second storm runs over mutual TLS.
    is_tls = (asked.seed + is_deferred) % 2 == 0
    world_of = machine.world(is_deferred=is_deferred, is_tls=is_tls)
    async with reported(report, console), world_of as world:
        # Where both are asked for, the calls fail in the first storm.
        with_sites = not is_deferred or asked.durability == DEFERRED
        plan = Plan(asked, machine, share, with_sites=with_sites)
        storm = Storm(
            world, report, weights=weights(asked, is_deferred=is_deferred), resume_s=asked.patience
        )
        with interruptible(plan, console):
            try:
                await storm.run(plan)
            except BaseException:
                logs = asked.build / f"chaos-{asked.seed}-logs"
                shutil.copytree(world.cluster.data / "log", logs, dirs_exist_ok=True)
                raise
            finally:
                report.is_interrupted = plan.is_interrupted
                if report.violations:
                    asked.build.mkdir(parents=True, exist_ok=True)
                    storm.write_history(asked.build)


@asynccontextmanager
async def reported(report: Report, console: Console) -> AsyncIterator[None]:
    """A line that tells how far it is: always the last one of a terminal, else one now and then."""
    with console.status("") if console.is_terminal else nullcontext() as status:

        async def notify() -> None:
            while True:
                if status is not None:
                    status.update(report.progress())
                    await asyncio.sleep(0.5)
                else:
                    console.print(report.progress(), soft_wrap=True, highlight=False)
                    await asyncio.sleep(TELL_EVERY_S)

        teller = asyncio.get_running_loop().create_task(notify())
        try:
            yield
        finally:
            teller.cancel()


@contextmanager
def interruptible(plan: Plan, console: Console) -> Iterator[None]:
    """Ctrl-C ends the storm, and what there is then is judged; a second one ends all."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def interrupt() -> None:
        if plan.is_interrupted:
            task.cancel()
            return
        plan.is_interrupted = True
        console.print("The storm ends; what was acknowledged is judged (Ctrl-C: not even that).")

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def main() -> int:
    asked = parsed()
    machine = Machine(only=asked.only)
    for what, why in sorted(machine.lacks.items()):
        print(f"no {what}: {why}")
    total: Report | None = None
    status = 0
    for durability in (SYNCED, DEFERRED):
        if asked.durability not in (durability, "both"):
            continue
        report = Report(seed=asked.seed, durability=durability)
        status = stormed(asked, machine, report)
        print(report.page(), flush=True)
        if total is None:
            total = report
        else:
            total.add(report)
        if status:
            break
    assert total is not None
    print(f"report: {total.write(asked.build)}")
    print(total.last_line())
    return 1 if total.has_failed else status


def causes(error: BaseException) -> list[str]:
    """What ended a storm, without the groups around it."""
    if isinstance(error, BaseExceptionGroup):
        return [cause for part in error.exceptions for cause in causes(part)]
    return [str(error) if isinstance(error, DeadlineMissed) else repr(error)]


def stormed(asked: argparse.Namespace, machine: Machine, report: Report) -> int:
    """One storm to its end, or as far as it comes: the status where nothing else is wrong.

    Raises: whatever the storm did not expect, after what was done until then was told.
    """
    try:
        asyncio.run(storm(asked, machine, report))
    except (asyncio.CancelledError, KeyboardInterrupt):
        report.broken_off = "interrupted"
        return INTERRUPTED_STATUS
    except BaseExceptionGroup as group:
        _, others = group.split(DeadlineMissed)
        report.broken_off = "; ".join(causes(group))
        if others is not None:
            print(report.page(), flush=True)
            raise
        return MISSED_STATUS
    except DeadlineMissed as error:
        report.broken_off = str(error)
        return MISSED_STATUS
    return INTERRUPTED_STATUS if report.is_interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
