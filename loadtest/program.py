"""Common parts of the programs in this folder: their options and their output."""

import argparse
import os
import re
from collections.abc import Mapping
from pathlib import Path
from time import monotonic as clock
from typing import Any, Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from services.local.config import ROOT

Options = Mapping[str, tuple[Any, str]]
"""The options of a program by name: the default value, which determines the type, and the help
text.

A bool makes a switch, and a tuple an option with any number of integers.
"""
_LINE_EVERY_S: Final = 5.0
"""Seconds between lines of progress if the output is not a terminal."""


def arguments(
    program: str, about: str | None, options: Options, given: list[str] | None = None
) -> argparse.Namespace:
    """Parse the command line, or the arguments `given`."""
    parser = argparse.ArgumentParser(prog=program, description=about)
    for name, (default, text) in options.items():
        more: dict[str, Any] = {"type": type(default)}
        if isinstance(default, bool):
            more = {"action": "store_true"}
        elif isinstance(default, tuple):
            more = {"type": int, "nargs": "*"}
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, dest=name, default=default, help=text, **more)
    return parser.parse_args(given)


class Seconds(float):
    """A duration on the command line: `90`, `90s`, `2.5m` or `1h`."""

    def __new__(cls, text: str) -> Self:
        """Parse the text."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
        if found is None:
            raise argparse.ArgumentTypeError(f"{text!r} is not a duration: use 90s, 2m or 1h")
        return super().__new__(cls, float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]])


def is_set(variable: str) -> bool:
    """Whether a make variable is set to a value other than 0."""
    return os.environ.get(variable, "") not in ("", "0")


def build_folder() -> Path:
    """Create and return the folder for the output of programs, which is in the clone."""
    folder = ROOT / "build"
    folder.mkdir(exist_ok=True)
    return folder


class Teller:
    """Prints lines with the elapsed time, and progress: a bar, or lines without a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        """The bar is shown only within the `with` block."""
        self.console = console or Console(highlight=False)
        self._began = self._shown = clock()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f}"),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("", total=1)

    def __enter__(self) -> Self:
        """Start to show the bar."""
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar."""
        self._bar.stop()

    def say(self, line: str) -> None:
        """Print a line with the elapsed time."""
        self._shown = clock()
        took = f"{self._shown - self._began:7.1f} s  "
        self.console.print(took + line, soft_wrap=True, markup=False, highlight=False)

    def show(self, what: str, done: int = 0, total: int = 1) -> None:
        """Show the current work, and how much of it is done."""
        self._bar.update(self._task, description=what, completed=done, total=total)
        if done and self._bar.disable and clock() - self._shown >= _LINE_EVERY_S:
            self.say(f"{what}: {done:,} of {total:,}")
