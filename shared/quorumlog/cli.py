"""`quorumlog …`: ledgers, logs and the cluster from a shell.

Exit status: 0 done; 1 an error, and nothing was done; 2 wrong usage; 3 an error after which nobody
can say whether it was done; 4 what was asked for is not there.
"""

import asyncio
import base64
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import orjson
import typer
from rich.console import Console
from rich.table import Table

from quorumlog.client import Client, Entry, LogRecord
from quorumlog.errors import UNKNOWN, NotFound, QuorumLogError

T = TypeVar("T")

_BATCH = 1000

app = typer.Typer(no_args_is_help=True, add_completion=False, help="A replicated log over HTTP.")
ledgers = typer.Typer(no_args_is_help=True, help="Create, append, read, end ledgers.")
logs = typer.Typer(no_args_is_help=True, help="Named logs, which go on when a process dies.")
clusters = typer.Typer(no_args_is_help=True, help="How the cluster is.")
bookies = typer.Typer(no_args_is_help=True, help="The servers that keep entries.")
app.add_typer(ledgers, name="ledger")
app.add_typer(logs, name="log")
app.add_typer(clusters, name="cluster")
app.add_typer(bookies, name="bookie")

GatewayOption = Annotated[
    str,
    typer.Option("--gateway", envvar="QUORUMLOG_GATEWAY", help="URLs of gateways, with commas."),
]
PasswordOption = Annotated[
    str | None, typer.Option("--password", envvar="QUORUMLOG_PASSWORD", help="Of the ledger.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON in place of a table.")]
NameArgument = Annotated[str, typer.Argument(help="The log's name.")]
LedgerArgument = Annotated[int, typer.Argument(help="The ledger's id.")]
DEFAULT_GATEWAY = "http://127.0.0.1:8080"


def main() -> None:
    """Run the command line."""
    app()


def _run(gateway: str, work: Callable[[Client], Awaitable[T]]) -> T:
    """Do something with a client; an error ends the process with its exit status."""

    async def in_session() -> T:
        async with Client(*gateway.split(",")) as client:
            return await work(client)

    try:
        return asyncio.run(in_session())
    except QuorumLogError as error:
        Console(stderr=True, highlight=False).print(f"{error.code}: {error.detail}", markup=False)
        if error.outcome == UNKNOWN:
            raise typer.Exit(3) from None
        raise typer.Exit(4 if isinstance(error, NotFound) else 1) from None


def _print_json(value: Any) -> None:
    sys.stdout.write(orjson.dumps(value).decode() + "\n")
    sys.stdout.flush()


def _print_object(value: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        _print_json(value)
        return
    table = Table(show_header=False, box=None)
    for name, field in value.items():
        text = field if isinstance(field, str) else orjson.dumps(field).decode()
        table.add_row(name, text)
    Console(highlight=False).print(table)


def _print_rows(rows: list[dict[str, Any]], columns: tuple[str, ...], *, as_json: bool) -> None:
    if as_json:
        for row in rows:
            _print_json(row)
        return
    table = Table(*columns, box=None)
    for row in rows:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    Console(highlight=False).print(table)


def _print_entry(entry: Entry, *, as_json: bool) -> None:
    if as_json:
        data = base64.b64encode(entry.payload).decode()
        _print_json({"entry_id": entry.entry_id, "data": data})
        return
    sys.stdout.buffer.write(entry.payload + b"\n")
    sys.stdout.flush()


@ledgers.command()
def create(
    gateway: GatewayOption = DEFAULT_GATEWAY,
    password: PasswordOption = None,
    as_json: JsonOption = False,
    ensemble: Annotated[int | None, typer.Option("--ensemble", "-E")] = None,
    write_quorum: Annotated[int | None, typer.Option("--write-quorum", "-w")] = None,
    ack_quorum: Annotated[int | None, typer.Option("--ack-quorum", "-a")] = None,
    digest: Annotated[str | None, typer.Option(help="crc32c, hmac-sha256 or none")] = None,
) -> None:
    """Create a ledger and print its id."""

    async def work(client: Client) -> dict[str, Any]:
        ledger = await client.create_ledger(
            ensemble_size=ensemble,
            write_quorum=write_quorum,
            ack_quorum=ack_quorum,
            digest=digest,
            password=password,
        )
        return await ledger.info() if as_json else {"ledger_id": ledger.ledger_id}

    made = _run(gateway, work)
    if as_json:
        _print_json(made)
    else:
        sys.stdout.write(f"{made['ledger_id']}\n")


@ledgers.command()
def append(
    ledger_id: LedgerArgument,
    texts: Annotated[list[str] | None, typer.Argument(help="Entries; else lines of input.")] = None,
    gateway: GatewayOption = DEFAULT_GATEWAY,
    password: PasswordOption = None,
    as_json: JsonOption = False,
    file: Annotated[Path | None, typer.Option(help="Each line becomes an entry.")] = None,
) -> None:
    """Append entries: arguments, or each line of a file or of standard input."""

    async def work(client: Client) -> tuple[int, int] | None:
        ledger = client.ledger(ledger_id, password=password)
        first, last = None, -1
        for batch in _batches(texts, file):
            done = await ledger.append_batch(batch)
            first = done.first_entry if first is None else first
            last = done.last_entry
        return None if first is None else (first, last)

    done = _run(gateway, work)
    if as_json:
        first, last = done or (None, None)
        _print_json({"ledger_id": ledger_id, "first_entry": first, "last_entry": last})
    elif done:
        sys.stdout.write(f"{done[0]}..{done[1]}\n")


def _batches(texts: list[str] | None, file: Path | None) -> Iterator[list[bytes]]:
    if texts:
        yield [text.encode() for text in texts]
        return
    with file.open("rb") if file else sys.stdin.buffer as lines:
        batch: list[bytes] = []
        for line in lines:
            batch.append(line.rstrip(b"\r\n"))
            if len(batch) == _BATCH:
                yield batch
                batch = []
        if batch:
            yield batch


@ledgers.command()
def read(
    ledger_id: LedgerArgument,
    gateway: GatewayOption = DEFAULT_GATEWAY,
    password: PasswordOption = None,
    as_json: JsonOption = False,
    first: Annotated[int, typer.Option("--from")] = 0,
    last: Annotated[int | None, typer.Option("--to")] = None,
) -> None:
    """Print the confirmed entries, one a line."""

    async def work(client: Client) -> None:
        async for entry in client.ledger(ledger_id, password=password).entries(first, last=last):
            _print_entry(entry, as_json=as_json)

    _run(gateway, work)


@ledgers.command()
def tail(
    ledger_id: LedgerArgument,
    gateway: GatewayOption = DEFAULT_GATEWAY,
    password: PasswordOption = None,
    as_json: JsonOption = False,
    first: Annotated[int, typer.Option("--from")] = 0,
) -> None:
    """Print entries as they come, until the ledger is closed."""

    async def work(client: Client) -> None:
        async for entry in client.ledger(ledger_id, password=password).tail(first):
            _print_entry(entry, as_json=as_json)

    _run(gateway, work)


@ledgers.command()
def show(
    ledger_id: LedgerArgument, gateway: GatewayOption = DEFAULT_GATEWAY, as_json: JsonOption = False
) -> None:
    """Print a ledger's state, quorums and fragments."""
    found = _run(gateway, lambda client: client.ledger(ledger_id).info())
    _print_object(found, as_json=as_json)


@ledgers.command(name="list")
def list_(
    gateway: GatewayOption = DEFAULT_GATEWAY,
    as_json: JsonOption = False,
    state: Annotated[str | None, typer.Option(help="OPEN, IN_RECOVERY or CLOSED")] = None,
    bookie: Annotated[str | None, typer.Option(help="with entries there, as bookie-1@1")] = None,
) -> None:
    """Print all ledgers."""

    async def work(client: Client) -> list[dict[str, Any]]:
        return [ledger async for ledger in client.ledgers(state=state, bookie=bookie)]

    columns = ("ledger_id", "state", "last_entry", "length", "created_at")
    _print_rows(_run(gateway, work), columns, as_json=as_json)


@ledgers.command()
def close(
    ledger_id: LedgerArgument,
    gateway: GatewayOption = DEFAULT_GATEWAY,
    password: PasswordOption = None,
    as_json: JsonOption = False,
) -> None:
    """End a ledger, through its writer."""
    found = _run(gateway, lambda client: client.ledger(ledger_id, password=password).close())
    _print_object(found, as_json=as_json)


@ledgers.command()
def recover(
    ledger_id: LedgerArgument,
    gateway: GatewayOption = DEFAULT_GATEWAY,
    password: PasswordOption = None,
    as_json: JsonOption = False,
) -> None:
    """End a ledger whose writer is gone: fence, read on, close."""
    found = _run(gateway, lambda client: client.ledger(ledger_id, password=password).recover())
    _print_object(found, as_json=as_json)


@ledgers.command()
def delete(
    ledger_id: LedgerArgument,
    gateway: GatewayOption = DEFAULT_GATEWAY,
    password: PasswordOption = None,
) -> None:
    """Delete a ledger with its entries."""
    _run(gateway, lambda client: client.delete_ledger(ledger_id, password=password))


@logs.command(name="create")
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
    given = {
        "roll_bytes": roll_bytes,
        "roll_seconds": roll_seconds,
        "retention_bytes": retention_bytes,
        "retention_seconds": retention_seconds,
    }
    settings = {key: value for key, value in given.items() if value is not None}

    async def work(client: Client) -> dict[str, Any]:
        return await (await client.create_log(name, **settings)).info()

    _print_object(_run(gateway, work), as_json=as_json)


@logs.command(name="append")
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
        for batch in _batches(texts, file):
            done = await producer.append(*batch)
            first = done.first_offset if first is None else first
            last = done.last_offset
        return None if first is None else (first, last)

    done = _run(gateway, work)
    if as_json:
        first, last = done or (None, None)
        _print_json({"log": name, "first_offset": first, "last_offset": last})
    elif done:
        sys.stdout.write(f"{done[0]}..{done[1]}\n")


def _print_record(record: LogRecord, *, as_json: bool) -> None:
    if as_json:
        data = base64.b64encode(record.value).decode()
        _print_json({"offset": record.offset, "timestamp": record.timestamp, "data": data})
        return
    sys.stdout.buffer.write(record.value + b"\n")
    sys.stdout.flush()


@logs.command(name="read")
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

    _run(gateway, work)


@logs.command(name="tail")
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

    _run(gateway, work)


@logs.command(name="show")
def show_log(
    name: NameArgument, gateway: GatewayOption = DEFAULT_GATEWAY, as_json: JsonOption = False
) -> None:
    """Print a log's settings, ledgers, offsets and owner."""
    _print_object(_run(gateway, lambda client: client.log(name).info()), as_json=as_json)


@logs.command(name="list")
def list_logs(gateway: GatewayOption = DEFAULT_GATEWAY, as_json: JsonOption = False) -> None:
    """Print all logs."""

    async def work(client: Client) -> list[dict[str, Any]]:
        return [log async for log in client.logs()]

    columns = ("name", "state", "first_offset", "next_offset", "created_at")
    _print_rows(_run(gateway, work), columns, as_json=as_json)


@logs.command(name="roll")
def roll_log(
    name: NameArgument, gateway: GatewayOption = DEFAULT_GATEWAY, as_json: JsonOption = False
) -> None:
    """Go on in a new ledger."""
    _print_object(_run(gateway, lambda client: client.log(name).roll()), as_json=as_json)


@logs.command(name="truncate")
def truncate_log(
    name: NameArgument,
    before: Annotated[int, typer.Argument(help="Ledgers that end below this offset are dropped.")],
    gateway: GatewayOption = DEFAULT_GATEWAY,
    as_json: JsonOption = False,
) -> None:
    """Drop old ledgers."""
    found = _run(gateway, lambda client: client.log(name).truncate(before))
    _print_object(found, as_json=as_json)


@logs.command(name="close")
def close_log(
    name: NameArgument, gateway: GatewayOption = DEFAULT_GATEWAY, as_json: JsonOption = False
) -> None:
    """End a log for good."""
    _print_object(_run(gateway, lambda client: client.log(name).close()), as_json=as_json)


@logs.command(name="delete")
def delete_log(name: NameArgument, gateway: GatewayOption = DEFAULT_GATEWAY) -> None:
    """Delete a log with its records."""
    _run(gateway, lambda client: client.log(name).delete())


@clusters.command()
def status(gateway: GatewayOption = DEFAULT_GATEWAY, as_json: JsonOption = False) -> None:
    """Print every service with its state, and what is under-replicated."""
    _print_object(_run(gateway, lambda client: client.cluster()), as_json=as_json)


@bookies.command(name="list")
def list_bookies(gateway: GatewayOption = DEFAULT_GATEWAY, as_json: JsonOption = False) -> None:
    """Print all bookies with their state."""
    found = _run(gateway, lambda client: client.bookies())
    _print_rows(list(found), ("id", "state", "url", "zone", "free_bytes"), as_json=as_json)


if __name__ == "__main__":
    main()
