"""The commands `quorumlog queue …`."""

import asyncio
import os
import shlex
from typing import Annotated, Any, Literal

import typer

from quorumlog.cli.output import (
    YesOption,
    confirm_on_terminal,
    print_answer,
    print_object,
    print_rows,
)
from quorumlog.cli.session import print_all, run
from quorumlog.client import Client, Job, LogRecord, Queue, QueueInfo

LogArgument = Annotated[str, typer.Argument(help="The log's name.")]
QueueArgument = Annotated[str, typer.Argument(help="The queue's name.")]
JobsArgument = Annotated[
    list[str], typer.Argument(metavar="CLAIM:OFFSET…", help="Jobs, as `claim` prints them.")
]
MaxOption = Annotated[
    int, typer.Option("--max", min=1, max=1000, help="Maximum number of records.")
]
Order = Literal["none", "key"]

app = typer.Typer(no_args_is_help=True, help="Work queues, by which many workers share a log.")


@app.command(name="create")
def create_queue(
    log: LogArgument,
    queue: QueueArgument,
    lease_s: Annotated[float, typer.Option("--lease", min=1, help="Lease in seconds.")] = 30.0,
    max_attempts: Annotated[
        int | None, typer.Option(min=1, help="Attempts before a record becomes a dead letter.")
    ] = None,
    dead_letter_log: Annotated[str | None, typer.Option(help="The log for dead letters.")] = None,
    order: Annotated[Order, typer.Option(help="`key`: one record of a key at a time.")] = "none",
    max_in_flight: Annotated[
        int, typer.Option(min=1, help="Maximum number of claimed records.")
    ] = 1000,
    first: Annotated[
        str, typer.Option("--from", help="Where a new queue begins: earliest or latest.")
    ] = "earliest",
) -> None:
    """Create a queue, or change its settings."""

    async def work(client: Client) -> QueueInfo:
        return (
            await client.log(log)
            .queue(queue)
            .create(
                lease_s=lease_s,
                max_attempts=max_attempts,
                dead_letter_log=dead_letter_log,
                order=order,
                max_in_flight=max_in_flight,
                start=first,
            )
        )

    print_object(run(work))


@app.command(name="show")
def show_queue(log: LogArgument, queue: QueueArgument) -> None:
    """Print a queue's settings and progress."""
    print_object(run(lambda client: client.log(log).queue(queue).info()))


@app.command(name="list")
def list_queues(log: LogArgument) -> None:
    """Print a log's queues with their progress."""
    columns = ("queue", "state", "depth", "in_flight", "redelivered", "dead", "lost")
    print_all(lambda client: client.log(log).queues(), columns)


@app.command(name="delete")
def delete_queue(log: LogArgument, queue: QueueArgument, yes: YesOption = False) -> None:
    """Delete a queue and its progress. The records and the dead letters stay."""
    confirm_on_terminal(f"Delete the queue {queue} of {log} and its progress?", yes=yes)
    run(lambda client: client.log(log).queue(queue).delete())
    print_answer({"deleted": queue})


@app.command(name="claim")
def claim_jobs(
    log: LogArgument,
    queue: QueueArgument,
    count: MaxOption = 1,
    wait_s: Annotated[float, typer.Option("--wait", min=0, max=60, help="Seconds to wait.")] = 0.0,
) -> None:
    """Claim records and print them. Records without `ack` are delivered again after the lease."""
    found = run(lambda client: client.log(log).queue(queue).claim(count, wait_s=wait_s))
    rows = [
        {
            "job": f"{job.claim}:{job.record.offset}",
            "attempt": job.attempt,
            "key": None if job.record.key is None else _text(job.record.key),
            "value": None if job.record.is_tombstone else _text(job.record.value),
        }
        for job in found
    ]
    print_rows(rows, ("job", "attempt", "key", "value"))


@app.command(name="ack")
def ack_jobs(log: LogArgument, queue: QueueArgument, jobs: JobsArgument) -> None:
    """Acknowledge claimed records. Prints each refused record with the reason."""
    given = [_job(text) for text in jobs]
    refused = run(lambda client: client.log(log).queue(queue).ack(*given))
    rows = [{"job": f"{one.claim}:{one.offset}", "reason": one.reason} for one in refused]
    print_rows(rows, ("job", "reason"))


@app.command(name="work")
def work_on_queue(
    log: LogArgument,
    queue: QueueArgument,
    command: Annotated[
        str,
        typer.Option(
            "--exec",
            metavar="COMMAND",
            help="Command for each record, without a shell; {} and standard input are its value.",
        ),
    ],
    concurrency: Annotated[int, typer.Option(min=1, max=100, help="Concurrent commands.")] = 1,
    wait_s: Annotated[
        float | None, typer.Option("--wait", min=0, help="End after this many idle seconds.")
    ] = None,
    delay_s: Annotated[
        float, typer.Option("--delay", min=0, max=3600, help="Seconds until a failed job's retry.")
    ] = 1.0,
) -> None:
    """Run a command for each record. Exit status 0 acknowledges the record, any other status
    returns it to the queue.
    """
    words = shlex.split(command)
    if not words:
        raise typer.BadParameter("--exec needs a command")

    async def work(client: Client) -> None:
        mine = client.log(log).queue(queue)
        loops = (_work(mine, words, wait_s, delay_s) for _ in range(concurrency))
        await asyncio.gather(*loops)

    run(work)


async def _work(queue: Queue, words: list[str], wait_s: float | None, delay_s: float) -> None:
    async for job in queue.jobs(wait_s=wait_s):
        value = job.record.value
        arguments = [os.fsencode(word).replace(b"{}", value) for word in words]
        process = await asyncio.create_subprocess_exec(*arguments, stdin=asyncio.subprocess.PIPE)
        await process.communicate(value)
        if process.returncode:
            reason = f"the command ended with status {process.returncode}"
            await queue.nak(job, delay_s=delay_s, reason=reason)


@app.command(name="dead")
def list_dead(log: LogArgument, queue: QueueArgument) -> None:
    """Print a queue's dead letters, including those that were redriven."""

    async def work(client: Client) -> list[dict[str, Any]]:
        dead = (await client.log(log).queue(queue).info())["dead_letter_log"]
        if dead is None:
            return []
        return [
            {
                "offset": record.offset,
                "of": record.headers["Dead-Letter-Offset"],
                "attempts": record.headers["Dead-Letter-Attempts"],
                "reason": record.headers["Dead-Letter-Reason"],
                "value": None if record.is_tombstone else _text(record.value),
            }
            async for record in client.log(dead).records()
            if (record.headers.get("Dead-Letter-Log"), record.headers.get("Dead-Letter-Queue"))
            == (log, queue)
        ]

    print_rows(run(work), ("offset", "of", "attempts", "reason", "value"))


@app.command(name="redrive")
def redrive_dead(log: LogArgument, queue: QueueArgument, count: MaxOption = 100) -> None:
    """Append dead letters to the queue's log again, oldest first, each only once."""
    sent = run(lambda client: client.log(log).queue(queue).redrive(count))
    print_answer({"redriven": sent})


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _job(text: str) -> Job:
    """Parse a job, `CLAIM:OFFSET`. Raises: typer.BadParameter."""
    claim, _, offset = text.partition(":")
    if not (claim.isdecimal() and offset.isdecimal()):
        raise typer.BadParameter(f"a job must be CLAIM:OFFSET, not {text!r}")
    return Job(LogRecord(int(offset), b"", None, {}, "", 0, 0), 0, int(claim))
