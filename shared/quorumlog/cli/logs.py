"""`quorumlog log …`."""

import base64
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from quorumlog.cli.common import (
    DEFAULT_GATEWAY,
    GatewayOption,
    JsonOption,
    batches,
    print_json,
    print_object,
    print_rows,
    run,
)
from quorumlog.client import Client, LogRecord

NameArgument = Annotated[str, typer.Argument(help="The log's name.")]

app = typer.Typer(no_args_is_help=True, help="Named logs, which go on when a process dies.")


@app.command(name="create")
def create_log(
    name: NameArgument,
    gateway: GatewayOption = DEFAULT_GATEWAY,
    as_json: JsonOption = False,
    roll_bytes: Annotated[int | None, typer.Option(help="End a ledger at this size.")] = None,
    roll_seconds: Annotated[int | None, typer.Option(help="End a ledger at this age.")] = None,
    retention_bytes: Annotated[int | None, typer.Option(help="Keep this much at least.")] = None,
    retention_seconds: Annotated[int | None, typer.Option(help="Keep ledgers this long.")] = None,
) -> None:
    """Create a log; the same settings again are the same log."""

    async def work(client: Client) -> dict[str, Any]:
        log = await client.create_log(
            name,
            roll_bytes=roll_bytes,
            roll_seconds=roll_seconds,
            retention_bytes=retention_bytes,
            retention_seconds=retention_seconds,
        )
        return await log.info()

    print_object(run(gateway, work), as_json=as_json)


@app.command(name="append")
def append_to_log(
    name: NameArgument,
    texts: Annotated[list[str] | None, typer.Argument(help="Records; else lines of input.")] = None,
    gateway: GatewayOption = DEFAULT_GATEWAY,
    as_json: JsonOption = False,
    file: Annotated[Path | None, typer.Option(help="Each line becomes a record.")] = None,
) -> None:
    """Append records exactly once: arguments, or each line of a file or of standard input."""

    async def work(client: Client) -> tuple[int, int] | None:
        producer = client.log(name).producer()
        first, last = None, -1
        for batch in batches(texts, file):
            done = await producer.append(*batch)
            first = done.first_offset if first is None else first
            last = done.last_offset
        return None if first is None else (first, last)

    done = run(gateway, work)
    if as_json:
        first, last = done or (None, None)
        print_json({"log": name, "first_offset": first, "last_offset": last})
    elif done:
        sys.stdout.write(f"{done[0]}..{done[1]}\n")


def _print_record(record: LogRecord, *, as_json: bool) -> None:
    if as_json:
        data = base64.b64encode(record.value).decode()
        print_json({"offset": record.offset, "timestamp": record.timestamp, "data": data})
        return
    sys.stdout.buffer.write(record.value + b"\n")
    sys.stdout.flush()


@app.command(name="read")
def read_log(
    name: NameArgument,
    gateway: GatewayOption = DEFAULT_GATEWAY,
    as_json: JsonOption = False,
    first: Annotated[int | None, typer.Option("--from", help="The earliest by default.")] = None,
) -> None:
    """Print the records that are there now."""

    async def work(client: Client) -> None:
        async for record in client.log(name).records("earliest" if first is None else first):
            _print_record(record, as_json=as_json)

    run(gateway, work)


@app.command(name="tail")
def tail_log(
    name: NameArgument,
    gateway: GatewayOption = DEFAULT_GATEWAY,
    as_json: JsonOption = False,
    first: Annotated[int | None, typer.Option("--from", help="The latest by default.")] = None,
) -> None:
    """Print records as they come, until the log is closed."""

    async def work(client: Client) -> None:
        async for record in client.log(name).tail("latest" if first is None else first):
            _print_record(record, as_json=as_json)

    run(gateway, work)


@app.command(name="show")
def show_log(
    name: NameArgument, gateway: GatewayOption = DEFAULT_GATEWAY, as_json: JsonOption = False
) -> None:
    """Print a log's settings, ledgers, offsets and owner."""
    print_object(run(gateway, lambda client: client.log(name).info()), as_json=as_json)


@app.command(name="list")
def list_logs(gateway: GatewayOption = DEFAULT_GATEWAY, as_json: JsonOption = False) -> None:
    """Print all logs."""

    async def work(client: Client) -> list[dict[str, Any]]:
        return [log async for log in client.logs()]

    columns = ("name", "state", "first_offset", "next_offset", "created_at")
    print_rows(run(gateway, work), columns, as_json=as_json)


@app.command(name="roll")
def roll_log(
    name: NameArgument, gateway: GatewayOption = DEFAULT_GATEWAY, as_json: JsonOption = False
) -> None:
    """Go on in a new ledger."""
    print_object(run(gateway, lambda client: client.log(name).roll()), as_json=as_json)


@app.command(name="truncate")
def truncate_log(
    name: NameArgument,
    before: Annotated[int, typer.Argument(help="Ledgers that end below this offset are dropped.")],
    gateway: GatewayOption = DEFAULT_GATEWAY,
    as_json: JsonOption = False,
) -> None:
    """Drop old ledgers."""
    found = run(gateway, lambda client: client.log(name).truncate(before))
    print_object(found, as_json=as_json)


@app.command(name="close")
def close_log(
    name: NameArgument, gateway: GatewayOption = DEFAULT_GATEWAY, as_json: JsonOption = False
) -> None:
    """End a log for good."""
    print_object(run(gateway, lambda client: client.log(name).close()), as_json=as_json)


@app.command(name="delete")
def delete_log(name: NameArgument, gateway: GatewayOption = DEFAULT_GATEWAY) -> None:
    """Delete a log with its records."""
    run(gateway, lambda client: client.log(name).delete())
