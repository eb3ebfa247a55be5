"""The commands `quorumlog log …`."""

import asyncio
import os
import re
import sys
from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, Literal, cast

import typer

from quorumlog.cli import pipes
from quorumlog.cli.output import (
    YesOption,
    common_options,
    confirm_on_terminal,
    is_progress_shown,
    print_answer,
    print_object,
    print_rows,
)
from quorumlog.cli.session import print_all, run
from quorumlog.client import Client, LogAppended, LogInfo, LogRecord, Paged, Record, Start
from quorumlog.errors import NoSuchKey

_STARTS: Final = "an offset, earliest, latest, -N (N offsets before the end), an RFC 3339 time, or how long ago: 30s, 5m, 2h, 7d"
_AGO: Final = re.compile(r"([0-9]{1,6})([smhd])", re.ASCII)
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_OFFSET: Final = re.compile(r"-?(0|[1-9][0-9]{0,17})", re.ASCII)
BatchCompression = Literal["none", "zstd"]
CleanupPolicy = Literal["delete", "compact", "compact,delete"]

NameArgument = Annotated[str, typer.Argument(help="The log's name.")]
ConsumerArgument = Annotated[str, typer.Argument(help="The consumer's name.")]
RollBytesOption = Annotated[
    int | None, typer.Option(min=0, help="Roll to a new ledger at this size in bytes.")
]
RollSecondsOption = Annotated[
    int | None, typer.Option(min=0, help="Roll to a new ledger at this age in seconds.")
]
RetentionBytesOption = Annotated[
    int | None, typer.Option(min=0, help="Retain at least this many bytes.")
]
RetentionSecondsOption = Annotated[
    int | None, typer.Option(min=0, help="Retain ledgers for this many seconds.")
]
MergeBelowBytesOption = Annotated[
    int | None, typer.Option(min=0, help="Merge ledgers smaller than this many bytes.")
]
CleanupPolicyOption = Annotated[
    CleanupPolicy | None, typer.Option(help="compact: keep the newest record of each key.")
]
CompactionLagOption = Annotated[
    int | None, typer.Option(min=0, help="Compact ledgers that were closed this long ago.")
]
DeleteRetentionOption = Annotated[
    int | None, typer.Option(min=0, help="Keep tombstones for this many seconds.")
]
MaxDirtyOption = Annotated[
    int | None, typer.Option(min=0, max=100, help="Compact once this percentage of bytes is new.")
]

app = typer.Typer(
    no_args_is_help=True, help="Named logs, which survive the failure of any process."
)


@app.command(name="create")
def create_log(
    name: NameArgument,
    roll_bytes: RollBytesOption = None,
    roll_seconds: RollSecondsOption = None,
    retention_bytes: RetentionBytesOption = None,
    retention_seconds: RetentionSecondsOption = None,
    merge_below_bytes: MergeBelowBytesOption = None,
    cleanup_policy: CleanupPolicyOption = None,
    min_compaction_lag_s: CompactionLagOption = None,
    delete_retention_s: DeleteRetentionOption = None,
    max_dirty_percent: MaxDirtyOption = None,
    batch_compression: Annotated[
        BatchCompression | None, typer.Option(help="Store record batches compressed.")
    ] = None,
    deletion_protection: Annotated[
        bool | None, typer.Option(help="Protect the log from deletion, truncation and overwriting.")
    ] = None,
) -> None:
    """Create a log. Repeating the command with the same settings is harmless."""

    async def work(client: Client) -> LogInfo:
        log = await client.create_log(
            name,
            roll_bytes=roll_bytes,
            roll_seconds=roll_seconds,
            retention_bytes=retention_bytes,
            retention_seconds=retention_seconds,
            merge_below_bytes=merge_below_bytes,
            cleanup_policy=cleanup_policy,
            min_compaction_lag_s=min_compaction_lag_s,
            delete_retention_s=delete_retention_s,
            max_dirty_percent=max_dirty_percent,
            batch_compression=batch_compression,
            deletion_protection=deletion_protection,
        )
        return await log.info()

    print_object(run(work))


@app.command(name="append")
def append_to_log(
    name: NameArgument,
    texts: Annotated[
        list[str] | None, typer.Argument(help="Records; default: standard input.")
    ] = None,
    file: pipes.FileOption = None,
    framing: pipes.FramingOption = pipes.Framing.LINES,
    key: Annotated[str | None, typer.Option(help="The key of each record.")] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A header of each record; repeatable."),
    ] = None,
    tombstone: Annotated[
        bool, typer.Option("--tombstone", help="Append a tombstone, which deletes --key.")
    ] = False,
    ttl: Annotated[
        int | None, typer.Option(min=1, help="The records expire after this many seconds.")
    ] = None,
) -> None:
    """Append records exactly once: the arguments, or the records of a file or standard input."""
    headers = _headers(header or [])
    if tombstone:
        if key is None or texts or file is not None:
            raise typer.BadParameter("--tombstone needs --key, and takes no records")
        texts = [""]

    def made(value: bytes) -> bytes | Record:
        if key is None and not headers and ttl is None:
            return value
        name = None if key is None else os.fsencode(key)
        return Record(None if tombstone else value, name, headers, ttl_s=ttl)

    async def work(client: Client) -> pipes.Places | None:
        producer = client.log(name).producer()

        async def submit(group: Sequence[bytes]) -> asyncio.Future[pipes.Places]:
            return asyncio.ensure_future(_places(await producer.submit(*map(made, group))))

        return await pipes.send_input(texts, file, framing, submit, pipes.RECORDS)

    pipes.print_places(pipes.RECORDS, {"log": name}, run(work))


async def _places(future: asyncio.Future[LogAppended]) -> pipes.Places:
    done = await future
    return pipes.Places(done.first_offset, done.last_offset)


def _headers(given: Sequence[str]) -> dict[str, str]:
    """Parse headers of the form `name=value`. Raises: typer.BadParameter."""
    found = {}
    for header in given:
        name, equals, found[name] = header.partition("=")
        is_utf8 = os.fsencode(header).decode(errors="ignore") == header
        if not name or not equals or not is_utf8:
            raise typer.BadParameter(f"--header must be NAME=VALUE in UTF-8, not {header!r}")
    return found


def _start(text: str, option: str = "--from") -> Start:
    """Parse the offset, time or name at which a read begins. Raises: typer.BadParameter."""
    if text in ("earliest", "latest"):
        return cast("Start", text)
    if _OFFSET.fullmatch(text):
        return int(text)
    if ago := _AGO.fullmatch(text):
        return datetime.now(UTC) - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        at = None
    if at is None or at.tzinfo is None:
        raise typer.BadParameter(f"{option} must be {_STARTS}; a time needs a time zone")
    return at


KeyOption = Annotated[str | None, typer.Option("--key", help="Only records with this key.")]
PrefixOption = Annotated[
    str | None, typer.Option("--key-prefix", help="Only records whose key begins with this text.")
]
HeaderOption = Annotated[
    list[str] | None,
    typer.Option("--header", metavar="NAME=VALUE", help="Only with this header; repeatable."),
]


@app.command(name="read")
def read_log(
    name: NameArgument,
    first: Annotated[str, typer.Option("--from", help=f"Where to begin: {_STARTS}.")] = "earliest",
    key: KeyOption = None,
    key_prefix: PrefixOption = None,
    header: HeaderOption = None,
    follow: pipes.FollowOption = False,
    framing: pipes.FramingOption = pipes.Framing.LINES,
) -> None:
    """Print the confirmed records, and with --follow also new records."""
    start, headers = _start(first), _headers(header or [])
    is_filtered = bool(headers) or key is not None or key_prefix is not None

    async def work(client: Client) -> None:
        log = client.log(name)
        read = log.tail if follow else log.records
        found = read(start, key=key, key_prefix=key_prefix, headers=headers)
        count = None
        if not follow and not is_filtered and isinstance(start, int) and is_progress_shown():
            info = await log.info()
            end = int(info["next_offset"])
            at = start if start >= 0 else end + start
            count = max(0, end - max(at, int(info["first_offset"])))
        await pipes.write_items(found, framing, pipes.RECORDS, count)

    run(work)


@app.command(name="tail")
def tail_log(
    name: NameArgument,
    first: Annotated[
        str | None, typer.Option("--from", help=f"Where to begin: {_STARTS}; instead of -n.")
    ] = None,
    lines: pipes.LinesOption = 10,
    key: KeyOption = None,
    key_prefix: PrefixOption = None,
    header: HeaderOption = None,
    framing: pipes.FramingOption = pipes.Framing.LINES,
) -> None:
    """Print the last records, and new records until the log is closed. Only records that match the
    key and headers are printed.
    """
    last: Start = -lines if lines else "latest"
    start = last if first is None else _start(first)
    headers = _headers(header or [])

    async def work(client: Client) -> None:
        found = client.log(name).tail(start, key=key, key_prefix=key_prefix, headers=headers)
        await pipes.write_items(found, framing, pipes.RECORDS)

    run(work)


@app.command(name="get")
def get_newest(
    name: NameArgument,
    key: Annotated[str, typer.Argument(help="The key.")],
    framing: pipes.FramingOption = pipes.Framing.LINES,
) -> None:
    """Print the newest record of a key."""

    async def work(client: Client) -> None:
        record = await client.log(name).get(key)
        if record is None:
            raise NoSuchKey(f"the log {name} has no record with the key {key}", log=name)

        async def found() -> AsyncGenerator[Sequence[LogRecord], None]:
            yield [record]

        await pipes.write_items(Paged(found()), framing, pipes.RECORDS)

    run(work)


@app.command(name="keys")
def list_keys(
    name: NameArgument,
    prefix: Annotated[str, typer.Option(help="Only keys that begin with this text.")] = "",
) -> None:
    """Print the keys of a log's records."""

    async def work(client: Client) -> list[dict[str, Any]]:
        keys = client.log(name).keys(prefix)
        return [{"key": key.decode(errors="backslashreplace")} async for key in keys]

    print_rows(run(work), ("key",))


@app.command(name="show")
def show_log(name: NameArgument) -> None:
    """Print a log's settings, ledgers, offsets and owner."""
    print_object(run(lambda client: client.log(name).info()))


@app.command(name="list")
def list_logs(
    prefix: Annotated[
        str | None, typer.Option(help="Only logs whose names begin with this text.")
    ] = None,
) -> None:
    """Print all logs."""
    columns = ("name", "state", "first_offset", "next_offset", "created_at")
    print_all(lambda client: client.logs(prefix=prefix), columns)


@app.command(name="roll")
def roll_log(name: NameArgument) -> None:
    """Roll: close the log's open ledger and continue in a new ledger."""
    print_object(run(lambda client: client.log(name).roll()))


@app.command(name="truncate")
def truncate_log(
    name: NameArgument,
    before: Annotated[int, typer.Argument(help="Ledgers that end below this offset are dropped.")],
) -> None:
    """Drop ledgers that end below an offset."""
    print_object(run(lambda client: client.log(name).truncate(before)))


@app.command(name="close")
def close_log(name: NameArgument) -> None:
    """Close a log for good."""
    print_object(run(lambda client: client.log(name).close()))


@app.command(name="set")
def set_log(
    name: NameArgument,
    roll_bytes: RollBytesOption = None,
    roll_entries: Annotated[
        int | None,
        typer.Option(min=0, help="Roll to a new ledger after this many append requests."),
    ] = None,
    roll_seconds: RollSecondsOption = None,
    retention_bytes: RetentionBytesOption = None,
    retention_seconds: RetentionSecondsOption = None,
    merge_below_bytes: MergeBelowBytesOption = None,
    cleanup_policy: CleanupPolicyOption = None,
    min_compaction_lag_s: CompactionLagOption = None,
    delete_retention_s: DeleteRetentionOption = None,
    max_dirty_percent: MaxDirtyOption = None,
    if_version: Annotated[
        int | None,
        typer.Option(min=1, help="Change only if the log has this version (`log show`)."),
    ] = None,
) -> None:
    """Change the given limits of a log, with effect within seconds; 0 removes a limit."""
    limits: dict[str, Any] = {
        "roll_bytes": roll_bytes,
        "roll_entries": roll_entries,
        "roll_seconds": roll_seconds,
        "retention_bytes": retention_bytes,
        "retention_seconds": retention_seconds,
        "merge_below_bytes": merge_below_bytes,
        "cleanup_policy": cleanup_policy,
        "min_compaction_lag_s": min_compaction_lag_s,
        "delete_retention_s": delete_retention_s,
        "max_dirty_percent": max_dirty_percent,
    }
    if all(value is None for value in limits.values()):
        raise typer.BadParameter("give at least one limit to change")
    print_object(run(lambda client: client.log(name).change(**limits, if_version=if_version)))


@app.command(name="protect")
def protect_log(
    name: NameArgument,
    is_off: Annotated[bool, typer.Option("--off", help="End the protection.")] = False,
) -> None:
    """Protect a log from deletion, truncation and overwriting, until `protect --off`."""
    print_object(run(lambda client: client.log(name).protect(deletion_protection=not is_off)))


@app.command(name="delete")
def delete_log(name: NameArgument, yes: YesOption = False) -> None:
    """Delete a log with its records. On a terminal, the command asks for confirmation, and deletes
    nothing if the log is replaced before the answer.
    """
    created_at = None
    if not yes and sys.stdin.isatty():
        info = run(lambda client: client.log(name).info())
        count, created_at = info["next_offset"] - info["first_offset"], info["created_at"]
        confirm_on_terminal(f"Delete the log {name} with {count:,} records for ever?", yes=yes)
    run(lambda client: client.log(name).delete(created_at=created_at))
    print_answer({"deleted": name})


@app.command(name="consume")
def consume_log(
    name: NameArgument,
    consumer: ConsumerArgument,
    first: Annotated[
        str,
        typer.Option(
            "--from", help=f"Where a consumer without a committed offset begins: {_STARTS}."
        ),
    ] = "earliest",
    follow: pipes.FollowOption = False,
    framing: pipes.FramingOption = pipes.Framing.LINES,
) -> None:
    """Print the records that a consumer has not processed, and commit the printed records."""
    start = _start(first)

    async def work(client: Client) -> None:
        async with client.log(name).consumer(consumer, start=start) as mine:

            async def printed() -> AsyncGenerator[Sequence[LogRecord], None]:
                async for page in mine.records(follow=follow).pages():
                    yield page
                    if page:
                        mine.taken(page[-1])
                        await mine.commit()

            await pipes.write_items(Paged(printed()), framing, pipes.RECORDS)

    run(work)


@app.command(name="consumers")
def list_consumers(
    name: Annotated[str | None, typer.Argument(help="The log's name; default: all logs.")] = None,
    prefix: Annotated[
        str | None, typer.Option(help="Only consumers whose names begin with this text.")
    ] = None,
) -> None:
    """Print a log's consumers with their lags, or the consumers of all logs without lags."""

    async def work(client: Client) -> list[dict[str, Any]]:
        of = client if name is None else client.log(name)
        return [shown async for shown in of.consumers(prefix=prefix)]

    found = run(work)
    if not common_options().as_json:
        for shown in found:
            lag, lease = shown.pop("lag", None) or {}, shown.pop("lease") or {}
            shown |= {"lag": lag.get("records"), "lag_bytes": lag.get("bytes")}
            shown |= {"lag_ms": lag.get("ms"), "holder": lease.get("holder")}
    of_all = ("log", "consumer", "offset", "committed_at", "holder")
    of_one = ("consumer", "offset", "lag", "lag_bytes", "lag_ms", "state", "holder")
    print_rows(found, of_all if name is None else of_one)


@app.command(name="reset")
def reset_consumer(
    name: NameArgument,
    consumer: ConsumerArgument,
    to: Annotated[str, typer.Option("--to", help=f"{_STARTS.capitalize()}.")],
) -> None:
    """Set a consumer's committed offset. Its worker loses the lease."""
    start = _start(to, "--to")
    print_object(run(lambda client: client.log(name).reset_consumer(consumer, start)))
