"""Runs pure work on all cores, with a progress bar where somebody is looking."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from services.local.process import Become, in_child

Item = TypeVar("Item")
Result = TypeVar("Result")

CORES: Final = os.cpu_count() or 1


def spread(
    work: Callable[[Item], Result], items: Iterable[Item], *, jobs: int = CORES
) -> Iterator[Result]:
    """`work` of each item, as they get done. Children end with their parent."""
    if jobs == 1:
        yield from map(work, items)
        return
    # Forked: what the parent has imported need not be imported again.
    forked = multiprocessing.get_context("fork")
    with forked.Pool(jobs, initializer=in_child(Become.SELF, signal.SIGKILL)) as pool:
        yield from pool.imap_unordered(work, items)


def progress() -> Progress:
    """A bar on stderr, which leaves stdout to the report; nothing where nobody looks."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
