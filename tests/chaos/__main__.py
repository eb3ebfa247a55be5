"""`python -m tests.chaos --time 60s --seed 1`: a storm over a cluster of its own (`make chaos`)."""

import argparse
import asyncio
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rich.console import Console

from services.local.cluster import StartTimeout
from tests.chaos.faults import TRIES
from tests.chaos.report import Report
from tests.chaos.setting import Machine
from tests.chaos.storm import Storm, Weights
from tests.chaos.syscalls import SITES
from tests.support.waiting import DeadlineMissed

BUILD: Final = Path(__file__).resolve().parents[2] / "build"
MISSED_STATUS: Final = 3
"""Something did not go on in time: no claim, and on a machine that stalls no fault either."""


def seconds(text: str) -> float:
    """`90`, `90s`, `2m` or `1h` in seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: 90s, 2m, 1h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description="Without --time it goes on until the counts are reached, or for 60 s.",
    )
    parser.add_argument("--time", type=seconds, help="at most so long, as in 60s or 5m")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=0, help="go on until there were so many")
    parser.add_argument("--power-cuts", type=int, default=0, help="the same of power cuts")
    parser.add_argument("--partitions", type=int, default=0, help="the same of partitions")
    parser.add_argument("--sites", action="store_true", help="the same of each call that can fail")
    parser.add_argument("--durability", choices=("synced", "deferred", "both"), default="both")
    parser.add_argument("--only", choices=("processes",), default="", help="nothing needs root")
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
        tried = report.sites.total() + report.others["call not made"]
        return not self.sites or len(report.sites) >= len(SITES) or tried >= TRIES * len(SITES)


def weights(asked: argparse.Namespace, *, is_deferred: bool) -> Weights:
    """So that the counts are reached at about the same time."""
    if is_deferred:
        # One bookie at a time is hurt, and most of them by power: that is what is promised.
        return Weights(cut_power=20)
    if not (asked.kills or asked.power_cuts or asked.partitions):
        return Weights()
    return Weights(
        kill=asked.kills * 0.7,  # a fault kills more than one, and others kill too
        cut_power=asked.power_cuts * 0.55,
        part=float(asked.partitions),
        pause=max(asked.kills * 0.1, 1),
        trouble_a_store=max(asked.kills * 0.1, 1),
        kill_a_store=max(asked.kills * 0.01, 0.1),
        break_a_call=len(SITES) * 1.2 if asked.sites else max(asked.kills * 0.03, 0.1),
    )


async def storm(asked: argparse.Namespace, machine: Machine, *, is_deferred: bool) -> Report:
    """One storm with one durability."""
    # A bookie that deferred its syncs must be filled again before the next one may be hurt.
    share = {"both": 0.1 if is_deferred else 0.9}.get(asked.durability, 1.0)
    console = Console(stderr=True)
    async with machine.world(is_deferred=is_deferred) as world:
        # Where both are asked for, the calls fail in the first storm.
        with_sites = not is_deferred or asked.durability == "deferred"
        plan = Plan(asked, machine, share, with_sites=with_sites)
        storm = Storm(world, asked.seed, weights=weights(asked, is_deferred=is_deferred))
        with told(storm.report, console), interruptible(plan, console):
            try:
                return await storm.run(plan)
            except BaseException:
                logs = asked.build / f"chaos-{asked.seed}-logs"
                shutil.copytree(world.cluster.data / "log", logs, dirs_exist_ok=True)
                raise
            finally:
                if storm.report.violations:
                    storm.history.write(asked.build / f"chaos-{asked.seed}-history.txt")


@contextmanager
def told(report: Report, console: Console) -> Iterator[None]:
    """A line that tells how far it is, where somebody is looking."""
    if not console.is_terminal:
        yield
        return
    with console.status("") as status:

        async def tell() -> None:
            while True:
                status.update(
                    f"{report.durability}: {report.kills} kills, {report.power_cuts} power cuts,"
                    f" {report.partitions} partitions, {report.sites.total()} failed calls,"
                    f" {report.acknowledged} acknowledged"
                )
                await asyncio.sleep(0.5)

        teller = asyncio.get_running_loop().create_task(tell())
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
    for is_deferred in (False, True):
        if asked.durability == ("synced" if is_deferred else "deferred"):
            continue
        try:
            report = asyncio.run(storm(asked, machine, is_deferred=is_deferred))
        except (asyncio.CancelledError, KeyboardInterrupt):
            print("chaos: interrupted, nothing judged")
            return 130
        except BaseExceptionGroup as group:
            missed, others = group.split((DeadlineMissed, StartTimeout))
            print(f"seed {asked.seed}: {others or missed!r}")
            if others is not None:
                raise
            return MISSED_STATUS
        except (DeadlineMissed, StartTimeout) as error:
            print(f"seed {asked.seed}: {error}")
            return MISSED_STATUS
        print(report.page())
        if total is None:
            total = report
        else:
            total.add(report)
    assert total is not None
    print(f"report: {total.write(asked.build)}")
    print(total.last_line())
    return 1 if total.has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
