"""An SVG of a run: the goals with their figures, and each measurement's entries per second."""

import statistics
from collections.abc import Sequence
from html import escape
from math import log10
from typing import Final

from loadtest.bench.goals import Outcome, Rounds

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


def chart(conditions: str, outcomes: Sequence[Outcome], rounds: Rounds) -> str:
    """Draw the SVG of a run."""
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
