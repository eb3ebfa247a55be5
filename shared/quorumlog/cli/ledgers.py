"""The commands `quorumlog ledger …`."""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from quorumlog.cli import pipes
from quorumlog.cli.operator import ask_autorecovery
from quorumlog.cli.output import (
    ExitStatus,
    YesOption,
    common_options,
    confirm_on_terminal,
    is_progress_shown,
    print_answer,
    print_error,
    print_object,
)
from quorumlog.cli.session import print_all, run
from quorumlog.client import Client

PasswordOption = Annotated[
    str | None,
    typer.Option(envvar="QUORUMLOG_PASSWORD", help="The ledger's password."),
]
LedgerArgument = Annotated[int, typer.Argument(help="The ledger's id.")]

app = typer.Typer(no_args_is_help=True, help="Create, append to, read, close ledgers.")


@app.command()
def create(
    password: PasswordOption = None,
    ensemble: Annotated[
        int | None,
        typer.Option("--ensemble", "-E", help="Number of bookies that store the ledger."),
    ] = None,
    write_quorum: Annotated[
        int | None,
        typer.Option("--write-quorum", "-w", help="Number of bookies that store each entry."),
    ] = None,
    ack_quorum: Annotated[
        int | None,
        typer.Option(
            "--ack-quorum", "-a", help="Number of bookies that must have an entry on disk."
        ),
    ] = None,
    digest: Annotated[
        str | None, typer.Option(help="Checksum of the entries: crc32c, hmac-sha256 or none.")
    ] = None,
) -> None:
    """Create a ledger and print its id."""

    async def work(client: Client) -> Mapping[str, Any]:
        ledger = await client.create_ledger(
            ensemble_size=ensemble,
            write_quorum=write_quorum,
            ack_quorum=ack_quorum,
            digest=digest,
            password=password,
        )
        return await ledger.info() if common_options().as_json else {"ledger_id": ledger.ledger_id}

    made = run(work)
    print_answer(made, str(made["ledger_id"]))


@app.command()
def append(
    ledger_id: LedgerArgument,
    texts: Annotated[
        list[str] | None, typer.Argument(help="Entries; default: standard input.")
    ] = None,
    password: PasswordOption = None,
    file: pipes.FileOption = None,
    framing: pipes.FramingOption = pipes.Framing.LINES,
) -> None:
    """Append entries: the arguments, or the records of a file or standard input as they arrive."""

    async def work(client: Client) -> pipes.Places | None:
        ledger = client.ledger(ledger_id, password=password)

        async def append_group(group: Sequence[bytes]) -> pipes.Places:
            done = await ledger.append_batch(group)
            return pipes.Places(done.first_entry, done.last_entry)

        async def submit(group: Sequence[bytes]) -> asyncio.Future[pipes.Places]:
            return asyncio.create_task(append_group(group))

        return await pipes.send_input(texts, file, framing, submit, pipes.ENTRIES)

    pipes.print_places(pipes.ENTRIES, {"ledger_id": ledger_id}, run(work))


@app.command()
def read(
    ledger_id: LedgerArgument,
    password: PasswordOption = None,
    first: Annotated[int, typer.Option("--from", min=0, help="The first entry.")] = 0,
    last: Annotated[int | None, typer.Option("--to", min=0, help="The last entry.")] = None,
    follow: pipes.FollowOption = False,
    framing: pipes.FramingOption = pipes.Framing.LINES,
) -> None:
    """Print the confirmed entries, and with --follow also new entries."""

    async def work(client: Client) -> None:
        ledger = client.ledger(ledger_id, password=password)
        if first > 0 and common_options().shows_notices:
            end = await ledger.last_add_confirmed() + 1
            if first > end:
                print_error(f"entry {first} does not exist yet: the ledger's next entry is {end}")
        found = ledger.tail(first) if follow else ledger.entries(first, last=last)
        count = None
        if not follow and is_progress_shown():
            end = await ledger.last_add_confirmed() if last is None else last
            count = max(0, end + 1 - first)
        await pipes.write_items(found, framing, pipes.ENTRIES, count)

    if follow and last is not None:
        raise typer.BadParameter("give either --to or --follow, not both")
    run(work)


@app.command()
def tail(
    ledger_id: LedgerArgument,
    password: PasswordOption = None,
    first: Annotated[
        int | None, typer.Option("--from", min=0, help="The first entry; replaces -n.")
    ] = None,
    lines: pipes.LinesOption = 10,
    framing: pipes.FramingOption = pipes.Framing.LINES,
) -> None:
    """Print the last entries, and new entries until the ledger is closed."""

    async def work(client: Client) -> None:
        ledger = client.ledger(ledger_id, password=password)
        start = first
        if start is None:
            start = max(0, await ledger.last_add_confirmed() + 1 - lines)
        await pipes.write_items(ledger.tail(start), framing, pipes.ENTRIES)

    run(work)


@app.command()
def show(ledger_id: LedgerArgument) -> None:
    """Print a ledger's state, quorums and fragments."""
    print_object(run(lambda client: client.ledger(ledger_id).info()))


@app.command(name="list")
def list_(
    state: Annotated[str | None, typer.Option(help="OPEN, IN_RECOVERY or CLOSED.")] = None,
    bookie: Annotated[
        str | None, typer.Option(help="Only ledgers of this bookie, such as bookie-1@1.")
    ] = None,
) -> None:
    """Print all ledgers."""
    columns = ("ledger_id", "state", "last_entry", "length", "created_at")
    print_all(lambda client: client.ledgers(state=state, bookie=bookie), columns)


@app.command(name="password")
def change_password(
    ledger_id: LedgerArgument,
    password: PasswordOption = None,
    new_password: Annotated[
        str,
        typer.Option("--new-password", envvar="QUORUMLOG_NEW_PASSWORD", help="The new password."),
    ] = "",
) -> None:
    """Change a ledger's password. Pass both passwords in the environment: all users can see arguments."""
    print_object(
        run(
            lambda client: client.ledger(ledger_id, password=password).change_password(new_password)
        )
    )


@app.command()
def close(ledger_id: LedgerArgument, password: PasswordOption = None) -> None:
    """Close a ledger, through its writer."""
    print_object(run(lambda client: client.ledger(ledger_id, password=password).close()))


@app.command()
def recover(
    ledger_id: LedgerArgument,
    password: PasswordOption = None,
    declare_lost: Annotated[
        list[str] | None,
        typer.Option(
            help="A bookie that is gone for ever, such as bookie-1@1. The ledger may then lack entries."
        ),
    ] = None,
) -> None:
    """Recover a ledger whose writer is gone: fence it, read to its end, close it."""
    lost = declare_lost or ()
    print_object(
        run(lambda client: client.ledger(ledger_id, password=password).recover(declare_lost=lost))
    )


@app.command(name="accept-loss")
def accept_loss(
    ledger_id: LedgerArgument,
    first: Annotated[int, typer.Option("--from", min=0, help="The first lost entry.")],
    last: Annotated[int, typer.Option("--to", min=0, help="The last lost entry.")],
    password: PasswordOption = None,
    declare_lost: Annotated[
        list[str] | None,
        typer.Option(
            help="A bookie that is gone for ever and need not respond, such as bookie-1@1."
        ),
    ] = None,
    yes: YesOption = False,
) -> None:
    """Give up lost entries of a closed ledger for ever. Refused unless every bookie that could
    store the entries reports them as missing. `ledger verify` lists lost entries.
    """
    if first > last:
        raise typer.BadParameter("--from must not be above --to")
    if not yes and not sys.stdin.isatty():
        raise typer.BadParameter("this can't be undone: without a terminal, confirm it with --yes")
    question = f"Give up entries {first} to {last} of ledger {ledger_id} for ever?"
    confirm_on_terminal(question, yes=yes)

    async def work(client: Client) -> dict[str, Any]:
        ledger = client.ledger(ledger_id, password=password)
        return await ledger.accept_loss(first, last, declare_lost=declare_lost or ())

    print_object(run(work))


@app.command()
def delete(
    ledger_id: LedgerArgument, password: PasswordOption = None, yes: YesOption = False
) -> None:
    """Delete a ledger with its entries. On a terminal, the command asks for confirmation."""
    confirm_on_terminal(f"Delete the ledger {ledger_id} with its entries for ever?", yes=yes)
    run(lambda client: client.delete_ledger(ledger_id, password=password))
    print_answer({"deleted": ledger_id})


@app.command()
def verify(
    ledger_id: LedgerArgument,
    repair: Annotated[bool, typer.Option("--repair", help="Repair missing copies.")] = False,
) -> None:
    """Compare a ledger's copies by digests that the bookies compute. Exit status 1 if copies are
    missing. `lost` lists the entries that no bookie has. Entries from `open_from` on are still
    being written, and are not compared.
    """
    method = "POST" if repair else "GET"
    found = run(lambda client: ask_autorecovery(client, method, f"/v1/checks/{ledger_id}"))
    print_object(found)
    if not found["whole"]:
        raise typer.Exit(ExitStatus.FAILED)
