"""What a run measured: tables for people, and JSON and an SVG with the machine's facts."""

import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import orjson
import psutil
from rich.console import Console
from rich.table import Table

from loadtest.bench.chart import chart
from loadtest.bench.goals import FLAT, GOALS, LOAD, Goal, Outcome, outcome
from loadtest.bench.measure import ROLES, Figures
from loadtest.bench.works import Work
from services.local.config import ROOT

_TIMES: Final = ("p50 ms", "p99 ms", "p99.9 ms", "ms", "gap ms", "failed")
_PER_MB: Final = tuple(f"{role} ms/MB" for role in ROLES[:3])
_PER_ENTRY: Final = (*(f"{role} us" for role in ROLES), "all us")


def facts(folder: Path) -> dict[str, str]:
    """Of the machine and the code, as of now."""
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "commit": _commit(),
        "CPU": _cpu(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{psutil.virtual_memory().total / 1e9:.0f} GB",
        "kernel": platform.release(),
        "Python": platform.python_version(),
        "disk": _disk(folder),
        "load before": " ".join(f"{load:.1f}" for load in os.getloadavg()),
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _disk(folder: Path) -> str:
    mounts = [m for m in psutil.disk_partitions(all=True) if folder.is_relative_to(m.mountpoint)]
    mount = max(mounts, key=lambda each: len(each.mountpoint))
    return f"{mount.device}, {mount.fstype}"


def _commit() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(
            ("git", "-C", ROOT, *words), check=False, capture_output=True, text=True
        )
        return done.stdout.strip()

    changes = " with changes" if git("status", "--porcelain") else ""
    return (git("rev-parse", "--short", "HEAD") or "unknown") + changes


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured until now."""

    facts: Mapping[str, str]
    works: Sequence[Work]
    seconds: float
    rounds: int
    is_tls: bool
    results: dict[str, list[Figures]] = field(default_factory=dict)
    """Of each measurement, round by round."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Systems and measurements that can't be run here, and why."""
    failed: list[str] = field(default_factory=list)
    """Of which measurement in which round there are no figures, and why."""

    def add(self, work: Work, figures: Figures) -> None:
        """What a measurement gave in its next round."""
        self.results.setdefault(work.name, []).append(figures)

    def fail(self, work: Work, why: str) -> None:
        """A measurement gave nothing in its next round."""
        self.add(work, {})
        self.failed.append(f"{work.name}, round {len(self.results[work.name])}: {why}")

    def line(self, work: Work) -> str:
        """What the last round of a measurement gave, in short."""
        if work.name in self.left_out:
            return f"{work.name} is left out: {self.left_out[work.name]}"
        figures = self.results[work.name][-1]
        if not figures:
            return self.failed[-1]
        shown = [n for n in ("entries/s", "MB/s", "p50 ms", "ms", "gap ms") if n in figures]
        return f"{work.name}: " + ", ".join(f"{_number(figures[n])} {n}" for n in shown)

    def show(self, console: Console, *, is_json: bool) -> None:
        """Print the tables, or all of it as JSON."""
        if is_json:
            console.out(orjson.dumps(self._document(), option=orjson.OPT_INDENT_2).decode())
            return
        console.print(f"\n{self._conditions()}\n", soft_wrap=True)
        for table in (self._rates(), self._cpu(), self._memory(), self._goals()):
            console.print(table)
            console.print()
        for name, why in self.left_out.items():
            console.print(f"{name} is left out: {why}")
        for what in self.failed:
            console.print(f"left out of a round: {what}")

    def write(self, folder: Path) -> None:
        """Write a JSON file and an SVG, which are named by date and commit."""
        folder.mkdir(parents=True, exist_ok=True)
        name = "-".join((self.facts["date"].partition(" ")[0], *self.facts["commit"].split()))
        document = orjson.dumps(self._document(), option=orjson.OPT_INDENT_2)
        (folder / f"{name}.json").write_bytes(document + b"\n")
        svg = chart(self._conditions(), self._outcomes(), self.results)
        (folder / f"{name}.svg").write_text(svg, encoding="utf-8")

    def _conditions(self) -> str:
        told = ", ".join(f"{name} {fact}" for name, fact in self.facts.items())
        inside = "mutual TLS inside" if self.is_tls else "no TLS inside"
        return f"{told}; {self.rounds} rounds of {self.seconds:g} s, {inside}"

    def _document(self) -> dict[str, Any]:
        return {
            "facts": self.facts,
            "seconds": self.seconds,
            "rounds": self.rounds,
            "tls": self.is_tls,
            "measurements": self.results,
            "goals": [
                {
                    "measurement": found.goal.work,
                    "figure": found.goal.figure,
                    "goal": str(found.goal),
                    "ours": found.ours,
                    "theirs": found.theirs,
                    "value": found.value,
                    "is_reached": found.is_reached,
                }
                for found in self._outcomes()
            ],
            "left_out": self.left_out,
            "failed": self.failed,
        }

    def _outcomes(self) -> list[Outcome]:
        """Of the goals of which all was measured."""
        found = [outcome(goal, self.results) for goal in GOALS]
        return [each for each in found if each is not None]

    def _rates(self) -> Table:
        table = _table("medians of the rounds", "entries/s", "least", "most", "MB/s", *_TIMES)
        for name, rounds in self.results.items():
            rates = [each["entries/s"] for each in rounds if "entries/s" in each]
            spread = [_number(min(rates)), _number(max(rates))] if rates else ["", ""]
            table.add_row(
                name,
                _median(rounds, "entries/s"),
                *spread,
                _median(rounds, "MB/s"),
                *(_median(rounds, figure) for figure in _TIMES),
            )
        return table

    def _cpu(self) -> Table:
        table = _table("CPU", *_PER_ENTRY, *_PER_MB)
        for name, rounds in self.results.items():
            if any("all us" in each for each in rounds):
                shown = (_median(rounds, figure) for figure in (*_PER_ENTRY, *_PER_MB))
                table.add_row(name, *shown)
        return table

    def _memory(self) -> Table:
        """Of the largest process of each role: the most of all measurements, and around the largest load."""
        names = ("first round", "last round", "load begins", "load ends", "flat")
        table = _table("RSS of the largest process, MB", *names)
        largest: dict[tuple[str, str], tuple[float, float]] = {}
        for work in self.works:
            for role in ROLES:
                rounds = [
                    r[f"{role} RSS"] for r in self.results.get(work.name, ()) if f"{role} RSS" in r
                ]
                if rounds:
                    first, last = largest.get((work.system, role), (0.0, 0.0))
                    largest[work.system, role] = max(first, rounds[0]), max(last, rounds[-1])
        for (system, role), (first, last) in largest.items():
            row = [_number(first), _number(last)]
            found = outcome(
                Goal(LOAD, f"{role} RSS", "<=", FLAT, (LOAD,), f"{role} RSS before"), self.results
            )
            if found is not None and found.theirs is not None and system == "quorumlog":
                is_flat = "yes" if found.is_reached else "no"
                row += [_number(found.theirs), _number(found.ours), is_flat]
            table.add_row(f"{system}: {role}", *row)
        return table

    def _goals(self) -> Table:
        table = _table("goals", "figure", "ours", "theirs", "goal", "value", "reached")
        asked = {work.name for work in self.works}
        for goal in GOALS:
            found = outcome(goal, self.results)
            if found is not None:
                table.add_row(
                    goal.work,
                    goal.figure,
                    _number(found.ours),
                    "" if found.theirs is None else _number(found.theirs),
                    str(goal),
                    f"{found.value:.2f}",
                    "yes" if found.is_reached else "no",
                )
            elif goal.work in asked:
                table.add_row(goal.work, goal.figure, "", "", str(goal), "", "not measured")
        return table


def _table(*names: str) -> Table:
    table = Table(names[0], box=None)
    for name in names[1:]:
        table.add_column(name, justify="right")
    return table


def _median(rounds: Sequence[Figures], figure: str) -> str:
    found = [each[figure] for each in rounds if figure in each]
    return _number(statistics.median(found)) if found else ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
