"""Runs pure work on all cores, shows its progress, and ends orderly at Ctrl-C."""

import argparse
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from services.local.process import Become, in_child

Item = TypeVar("Item")
Result = TypeVar("Result")

CORES: Final = os.cpu_count() or 1

INTERRUPTED_STATUS: Final = 130
"""As a shell says that Ctrl-C ended a command."""

TELL_EVERY_S: Final = 30.0
"""How often a line tells how far it is, where there is no terminal."""


def spread(
    work: Callable[[Item], Result], items: Iterable[Item], *, jobs: int = CORES
) -> Iterator[Result]:
    """The results of `work` for each item, as they are done. Children end with their parent."""
    if jobs == 1:
        yield from map(work, items)
        return
    # Forked: what the parent has imported need not be imported again.
    forked = multiprocessing.get_context("fork")
    with forked.Pool(jobs, initializer=in_child(Become.SELF, signal.SIGKILL)) as pool:
        yield from pool.imap_unordered(work, items)


def count(text: str) -> int:
    """A number on a command line that must be positive, because 0 would prove nothing."""
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


@dataclass(slots=True)
class End:
    """Whether a campaign was completed."""

    is_interrupted: bool = False

    @property
    def word(self) -> str:
        """The end of the report's last line."""
        return ", interrupted" if self.is_interrupted else ""

    def status(self, *, is_right: bool) -> int:
        """The exit status: 0 only if the claim held until the campaign's end."""
        if not is_right:
            return 1
        return INTERRUPTED_STATUS if self.is_interrupted else 0


@contextmanager
def interruptible() -> Iterator[End]:
    """Ctrl-C ends the block but not the report, which has the work done until then."""
    end = End()
    try:
        yield end
    except KeyboardInterrupt:
        end.is_interrupted = True


class Bar(Protocol):
    """The progress."""

    def update(self, *, completed: int) -> None:
        """Show how many are done."""


@contextmanager
def progress(what: str, total: int) -> Iterator[Bar]:
    """A bar on stderr, which leaves stdout to the report; without a terminal, a line now and then."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(what, total)
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as bar:
        yield _Bar(bar, bar.add_task(what, total=total))


class _Bar:
    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar = bar
        self._task = task

    def update(self, *, completed: int) -> None:
        self._bar.update(self._task, completed=completed)


class _Lines:
    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._began = self._reported = time.monotonic()

    def update(self, *, completed: int) -> None:
        now = time.monotonic()
        if now - self._reported >= TELL_EVERY_S:
            self._reported = now
            line = f"{self._what}: {completed} of {self._total}, {now - self._began:.0f} s\n"
            sys.stderr.write(line)
            sys.stderr.flush()
