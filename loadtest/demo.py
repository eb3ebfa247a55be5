"""`make demo [FILE=<file>]`: sends every line of a file through a cluster in which processes are
killed.

After a third of the file, a bookie of the ledger's ensemble is killed; after two thirds, the
gateway that writes the ledger. The other gateway recovers the ledger, appends the rest to a new
ledger, and reads both ledgers back. Exit status 0 only if the bytes that are read are the bytes of
the file.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console

from loadtest.cluster import Cluster, running
from loadtest.program import Teller
from quorumlog.client import Client, Ledger
from quorumlog.errors import QuorumLogError

_BATCH_LINES: Final = 100
_BATCH_BYTES: Final = 4 << 20
_ENTRY_BYTES: Final = (
    1 << 20
)  # the largest entry (docs/reference/http.md); a longer line becomes several entries

_LOGS: Final = Path("/var/log")
_LOG_BYTES_MIN: Final = 64 << 10
_LOG_BYTES_MAX: Final = 64 << 20
_LOG_LINES_MIN: Final = 100


@dataclass(slots=True)
class Story:
    """The progress of the demo, and its output."""

    console: Console
    acknowledged: int = 0
    """Lines of the file that are known to be durable."""
    ledgers: list[int] = field(default_factory=list)

    def notify(self, line: str) -> None:
        """Print an event, with the line of the file at which it happened."""
        self.console.print(f"[dim]line {self.acknowledged + 1:>9,}[/] {line}")


def main() -> None:
    """Run the demo with FILE, or else with a log file of this machine."""
    name = os.environ.get("FILE", "")
    path = Path(name) if name else _log_of_this_machine()
    if not path.is_file():
        raise SystemExit(f"run make demo FILE=<a file with lines>: {name!r} is not a file")
    raise SystemExit(asyncio.run(run(path, Console(highlight=False))))


def _log_of_this_machine() -> Path:
    """The largest readable log file of this machine, or README.md if no log has enough lines."""
    sizes = {}
    for path in sorted(_LOGS.rglob("*.log")):
        try:
            with path.open("rb") as file:
                head = file.read(_LOG_BYTES_MIN)
            size = path.stat().st_size
        except OSError:
            continue  # not readable by this user
        if head.count(b"\n") >= _LOG_LINES_MIN and b"\0" not in head and size <= _LOG_BYTES_MAX:
            sizes[path] = size
    return max(sizes, key=lambda path: sizes[path], default=Path("README.md"))


async def run(path: Path, console: Console) -> int:
    """Send a file through a new cluster. Returns the exit status, 0 if every byte was read back."""
    total = sum(len(batch) for batch in batches(path))
    if total == 0:
        raise SystemExit(f"{path} is empty")
    console.print(f"{path}: {total:,} entries. Starting Postgres, Redis, 4 bookies, 2 gateways…")
    async with running(None, bookies=4, gateways=2) as cluster:
        story = Story(console)
        started = time.monotonic()
        with Teller(console) as teller:
            await _send(
                path,
                cluster,
                story,
                total,
                lambda: teller.show("appending", story.acknowledged, total),
            )
        seconds = time.monotonic() - started
        console.print(
            f"{story.acknowledged:,} entries acknowledged in {seconds:.1f} s; "
            f"reading back ledgers {story.ledgers} through {cluster.gateways[1]}"
        )
        missing = await _compare(path, cluster, story)
    if missing:
        console.print(f"[bold red]{missing}[/]")
        return 1
    console.print("[bold green]every acknowledged byte was read back, in order[/]")
    return 0


async def _send(
    path: Path, cluster: Cluster, story: Story, total: int, show: Callable[[], None]
) -> None:
    """Append the file, and kill the bookie and the gateway on the way."""
    first, second = cluster.gateways
    async with Client(first, deadline_s=20) as client:
        ledger = await client.create_ledger()
        story.ledgers.append(ledger.ledger_id)
        story.notify(f"ledger {ledger.ledger_id} is created; its writer is gateway-1")
        victims = [(total // 3, await _bookie_of(ledger)), (2 * total // 3, "gateway-1")]
        try:
            # A short file is sent in small batches, so that batches are left after each kill.
            for batch in batches(path, lines_max=min(_BATCH_LINES, 1 + total // 20)):
                appending = asyncio.ensure_future(ledger.append_batch(batch))
                while victims and story.acknowledged + len(batch) > victims[0][0]:
                    # Kill while an append is in flight.
                    name = victims.pop(0)[1]
                    await cluster.kill(name)
                    story.notify(f"{name} is killed (SIGKILL)")
                done = await appending
                story.acknowledged = done.last_entry + 1
                show()
        except QuorumLogError as error:
            story.notify(f"gateway-1 does not answer: {error.code}, outcome {error.outcome}")
    async with Client(second, deadline_s=60) as client:
        story.notify("gateway-2 recovers the ledger")
        closed = await client.ledger(ledger.ledger_id).recover()
        end = int(closed["last_entry"]) + 1
        if end < story.acknowledged:
            story.notify(f"[bold red]recovery ended at {end}: acknowledged entries are lost[/]")
            return
        story.notify(f"the ledger is CLOSED with {end:,} entries, including all acknowledged ones")
        # Recovery also kept sent entries that were not acknowledged. They must not be sent again.
        story.acknowledged = end
        rest = await client.create_ledger()
        story.ledgers.append(rest.ledger_id)
        story.notify(f"ledger {rest.ledger_id} takes the rest, written by gateway-2")
        for batch in batches(path, end):
            story.acknowledged = end + (await rest.append_batch(batch)).last_entry + 1
            show()
        await rest.close()


async def _bookie_of(ledger: Ledger) -> str:
    member: str = (await ledger.info())["fragments"][-1]["bookies"][0]
    return member.partition("@")[0]


async def _compare(path: Path, cluster: Cluster, story: Story) -> str:
    """Read all ledgers back and compare them with the file. Returns the first difference, or ''."""
    expected = (entry for batch in batches(path) for entry in batch)
    count = 0
    async with Client(cluster.gateways[1]) as client:
        async for payload in _payloads(client, story.ledgers):
            if payload != next(expected, None):
                return f"entry {count:,} differs from the sent entry"
            count += 1
    if count < story.acknowledged or next(expected, None) is not None:
        return f"only {count:,} entries were read back"
    return ""


async def _payloads(client: Client, ledgers: list[int]) -> AsyncIterator[bytes]:
    for ledger_id in ledgers:
        async for entry in client.ledger(ledger_id).entries():
            yield entry.payload


def batches(path: Path, skipped: int = 0, lines_max: int = _BATCH_LINES) -> Iterator[list[bytes]]:
    """Split the file into batches of one entry per line, without the first `skipped` entries."""
    batch: list[bytes] = []
    size = 0
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_ENTRY_BYTES):
            number += 1
            if number <= skipped:
                continue
            if batch and (len(batch) >= lines_max or size + len(line) > _BATCH_BYTES):
                yield batch
                batch, size = [], 0
            batch.append(line)
            size += len(line)
    if batch:
        yield batch


if __name__ == "__main__":
    main()
