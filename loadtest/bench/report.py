"""The report of a run: tables for people, and JSON and an SVG with facts about the machine."""

import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from math import log10
from pathlib import Path
from typing import Any, Final

import orjson
import psutil
from rich.console import Console
from rich.table import Table

from loadtest.bench.goals import FLAT, LOAD, Goal, Outcome, Rounds, outcome
from loadtest.bench.measure import Figures, medians
from loadtest.bench.plan import Columns, Plan, Work
from services.local.config import ROOT

_ROW: Final = 20
_LABELS: Final = 380
_BARS: Final = 420
_WIDTH: Final = _LABELS + _BARS + 340
_LEAST: Final = 10.0
"""Entries per second at the start of the logarithmic bars."""
_BEYOND: Final = 1.5
"""Longest bar of a goal, as a multiple of the goal."""
_COLOURS: Final = {"quorumlog": "#2b6cb0", "JetStream": "#b7791f", "BookKeeper": "#6b46c1"}
_REACHED: Final = "#2f855a"
_MISSED: Final = "#c05621"


def facts(folder: Path) -> dict[str, str]:
    """Facts about the machine and the code at the start of the run."""
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
    """The results of a run so far."""

    name: str
    """The name of the benchmark."""
    facts: Mapping[str, str]
    plan: Plan
    results: dict[str, list[Figures]] = field(default_factory=dict)
    """The figures of each measurement, round by round."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Systems and measurements that can't run on this machine, with the reasons."""
    failed: list[str] = field(default_factory=list)
    """Failures: the measurement, the round and the reason of each."""

    def add(self, work: Work, figures: Figures) -> None:
        """Add the figures of a measurement's next round."""
        self.results.setdefault(work.name, []).append(figures)

    def fail(self, work: Work, why: str) -> None:
        """Note that a measurement's next round failed."""
        self.add(work, {})
        self.failed.append(f"{work.name}, round {len(self.results[work.name])}: {why}")

    def line(self, work: Work) -> str:
        """A line with the figures of a measurement's last round."""
        if work.name in self.left_out:
            return f"{work.name} is left out: {self.left_out[work.name]}"
        figures = self.results[work.name][-1]
        if not figures:
            return self.failed[-1]
        named = [name for table in self.plan.tables for name in table.figures if name in figures]
        shown = dict.fromkeys(named or figures)
        return f"{work.name}: " + ", ".join(f"{_number(figures[n])} {n}" for n in shown)

    def show(self, console: Console, *, is_json: bool) -> None:
        """Print the report as tables or as JSON."""
        if is_json:
            console.out(orjson.dumps(self._document(), option=orjson.OPT_INDENT_2).decode())
            return
        console.print(f"\n{self._conditions()}\n", soft_wrap=True)
        tables = [self._table(columns) for columns in self.plan.tables]
        for table in (*tables, self._memory(), self._goals()):
            if table.row_count:
                console.print(table)
                console.print()
        for name, why in self.left_out.items():
            console.print(f"{name} is left out: {why}")
        for what in self.failed:
            console.print(f"left out of a round: {what}")

    def write(self, folder: Path) -> None:
        """Write a JSON file and an SVG, named after the date, the commit and the benchmark."""
        folder.mkdir(parents=True, exist_ok=True)
        parts = [self.facts["date"].partition(" ")[0], *self.facts["commit"].split()]
        name = "-".join(parts if self.name == "compare" else [*parts, self.name])
        document = orjson.dumps(self._document(), option=orjson.OPT_INDENT_2)
        (folder / f"{name}.json").write_bytes(document + b"\n")
        svg = _chart(self._conditions(), self._outcomes(), self.results)
        (folder / f"{name}.svg").write_text(svg, encoding="utf-8")

    def _conditions(self) -> str:
        plan = self.plan
        reported = ", ".join(f"{name} {fact}" for name, fact in self.facts.items())
        lasting = f" of {plan.seconds:g} s" if plan.seconds else ""
        said = f", {plan.conditions}" if plan.conditions else ""
        return f"{reported}; rounds: {plan.rounds}{lasting}{said}"

    def _document(self) -> dict[str, Any]:
        return {
            "benchmark": self.name,
            "facts": self.facts,
            "seconds": self.plan.seconds,
            "rounds": self.plan.rounds,
            "tls": self.plan.is_tls,
            "conditions": self.plan.conditions,
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
        """The outcomes of the goals whose figures were all measured."""
        found = [outcome(goal, self.results) for goal in self.plan.goals]
        return [each for each in found if each is not None]

    def _table(self, columns: Columns) -> Table:
        """A table with the medians of the rounds. A column without figures is left out."""
        works = [w for w in self.plan.works if w.system.startswith(columns.system)]
        rows = {w.name: _shown(self.results[w.name]) for w in works if w.name in self.results}
        wanted = columns.figures or dict.fromkeys(name for row in rows.values() for name in row)
        rows = {name: row for name, row in rows.items() if row.keys() & set(wanted)}
        figures = [each for each in wanted if any(each in row for row in rows.values())]
        cells = [[_cell(row, each) for each in figures] for row in rows.values()]
        if columns.is_turned:
            return _table(columns.title, rows, zip(figures, zip(*cells, strict=True), strict=True))
        return _table(columns.title, figures, zip(rows, cells, strict=True))

    def _memory(self) -> Table:
        """A table with the memory of each role's largest process. It has the maximum over all measurements
        in the first and the last round, and the values before and after the largest load.
        """
        names = ["first round", "last round"]
        if LOAD in self.results:
            names += ["load begins", "load ends", "flat"]
        table = _table("RSS of the largest process, MB", names)
        largest: dict[tuple[str, str], tuple[float, float]] = {}
        for work in self.plan.works:
            for role, rounds in _memory_of(self.results.get(work.name, ())).items():
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
        names = ("figure", "ours", "theirs", "goal", "value", "reached")
        table = _table("goals", names)
        asked = {work.name for work in self.plan.works}
        for goal in self.plan.goals:
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


def _shown(rounds: Sequence[Figures]) -> Figures:
    """The medians of the rounds, with the extremes of `entries/s`."""
    rates = [each["entries/s"] for each in rounds if "entries/s" in each]
    extremes = {"least": min(rates), "most": max(rates)} if rates else {}
    return medians(rounds) | extremes


def _memory_of(rounds: Sequence[Figures]) -> Mapping[str, Sequence[float]]:
    """The resident memory (RSS) of each role, round by round."""
    found: dict[str, list[float]] = {}
    for name, value in ((name, value) for each in rounds for name, value in each.items()):
        if name.endswith(" RSS"):
            found.setdefault(name.removesuffix(" RSS"), []).append(value)
    return found


def _table(
    title: str, names: Iterable[str], rows: Iterable[tuple[str, Iterable[str]]] = ()
) -> Table:
    table = Table(box=None)
    table.add_column(title, no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    for head, cells in rows:
        table.add_row(head, *cells)
    return table


def _cell(row: Figures, figure: str) -> str:
    return _number(row[figure]) if figure in row else ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _chart(conditions: str, outcomes: Sequence[Outcome], rounds: Rounds) -> str:
    """An SVG of a run: the goals with their figures, and each measurement's entries per second."""
    rates = {
        name: [each["entries/s"] for each in measured if "entries/s" in each]
        for name, measured in rounds.items()
        if any("entries/s" in each for each in measured)
    }
    parts = [_text(10, 20, conditions, size=9)]
    top = 50
    parts += [_text(10, top, "goals: the line is the goal", size=14)]
    for number, found in enumerate(outcomes):
        parts += _goal(found, top + _ROW * (number + 1))
    goal_x = _LABELS + _BARS / _BEYOND
    end = top + _ROW * (len(outcomes) + 1)
    if outcomes:
        parts.append(_line(goal_x, top + 5, end - _ROW + 6))
    top = end + 10
    parts += [
        _text(
            10, top, "entries a second, logarithmic: median, least and most of the rounds", size=14
        )
    ]
    decades = log10(max((_LEAST * 10, *(max(each) for each in rates.values()))) / _LEAST)
    for number, (name, each) in enumerate(rates.items()):
        parts += _rate(name, each, decades, top + _ROW * (number + 1))
    height = top + _ROW * (len(rates) + 2)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}"'
        f' width="{_WIDTH}" height="{height}" font-family="sans-serif">'
        f'<rect width="100%" height="100%" fill="white"/>'
    )
    return "\n".join((head, *parts, "</svg>\n"))


def _goal(found: Outcome, y: int) -> list[str]:
    goal = found.goal
    part = found.value / goal.bound if goal.sign == ">=" else _over(goal.bound, found.value)
    colour = _REACHED if found.is_reached else _MISSED
    return [
        _text(10, y, f"{goal.work}: {goal.figure}"),
        _bar(y, _BARS * min(part, _BEYOND) / _BEYOND, colour),
        _text(_LABELS + _BARS + 10, y, f"{found.value:.2f} ({goal})", size=10),
    ]


def _over(bound: float, value: float) -> float:
    """The ratio of an upper bound to a value; a value of 0 gives a full bar."""
    return bound / value if value else _BEYOND


def _rate(name: str, rates: Sequence[float], decades: float, y: int) -> list[str]:
    def length(rate: float) -> float:
        return _BARS * max(0.0, log10(rate / _LEAST)) / decades

    median = statistics.median(rates)
    colour = _COLOURS.get(name.partition(":")[0], "#4a5568")
    least, most = (_LABELS + length(each) for each in (min(rates), max(rates)))
    return [
        _text(10, y, name),
        _bar(y, length(median), colour),
        f'<line x1="{least:.1f}" x2="{most:.1f}" y1="{y - 4}" y2="{y - 4}" stroke="black"/>',
        _text(_LABELS + _BARS + 10, y, f"{median:,.0f}", size=10),
    ]


def _text(x: float, y: float, text: str, *, size: int = 12) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}">{escape(text)}</text>'


def _bar(y: int, width: float, colour: str) -> str:
    return f'<rect x="{_LABELS}" y="{y - 10}" width="{width:.1f}" height="12" fill="{colour}"/>'


def _line(x: float, top: float, end: float) -> str:
    return f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{end}" stroke="black"/>'
