"""`quorumlog bookie …`."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final
from urllib.parse import quote

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from quorumlog.cli import cookies
from quorumlog.cli.common import (
    DEFAULT_GATEWAY,
    GatewayOption,
    JsonOption,
    print_json,
    print_object,
    print_rows,
    run,
)
from quorumlog.cli.operator import asked, autorecoveries, bare, drain_of, found_bookie
from quorumlog.client import Client
from quorumlog.errors import NoSuchBookie, VersionConflict

app = typer.Typer(no_args_is_help=True, help="The servers that keep entries.")
app.add_typer(cookies.app, name="cookie")

NOT_YET: Final = 5
_LOOK_S: Final = 1.0

BookieArgument = Annotated[str, typer.Argument(help="Its name, as bookie-1.")]
WaitOption = Annotated[bool, typer.Option("--wait", help="Until nothing names it any more.")]
TimeoutOption = Annotated[
    float | None, typer.Option("--timeout", min=0, help="Wait no longer (seconds); status 5.")
]


@app.command(name="list")
def list_(gateway: GatewayOption = DEFAULT_GATEWAY, as_json: JsonOption = False) -> None:
    """Print all bookies with their state."""
    found = run(gateway, lambda client: client.bookies())
    print_rows(list(found), ("id", "state", "url", "zone", "free_bytes"), as_json=as_json)


@app.command()
def info(
    name: BookieArgument, gateway: GatewayOption = DEFAULT_GATEWAY, as_json: JsonOption = False
) -> None:
    """Print what a bookie says of itself, and how many ledgers name it."""

    async def work(client: Client) -> dict[str, Any]:
        known = await found_bookie(client, name)
        if known["state"] != "lost":
            known |= await asked("GET", f"{known['url']}/v1/info")
        left = await drain_of(client, name)
        return known | {"ledgers": left["ledgers"], "repairs": left["repairs"]}

    print_object(run(gateway, work), as_json=as_json)


@app.command()
def damage(
    name: BookieArgument, gateway: GatewayOption = DEFAULT_GATEWAY, as_json: JsonOption = False
) -> None:
    """Print what a bookie can't read of its log, with its place; status 1 where there is something.
    What others have is copied from them.
    """

    async def work(client: Client) -> dict[str, Any]:
        known = await _living_bookie(client, name)
        found: dict[str, Any] = await asked("GET", f"{known['url']}/v1/damage")
        return found

    found = run(gateway, work)
    places = found["entries"] + found["stretches"]
    if as_json:
        print_json(found)
    elif places:
        print_rows(
            places,
            ("ledger_id", "ranges", "segment", "offset", "start", "end", "reason"),
            as_json=False,
        )
        if found["is_cut"]:
            Console(stderr=True).print("there is more: look again when these are repaired")
    else:
        Console(highlight=False).print(f"{found['bookie']}: nothing is damaged", markup=False)
    if places:
        raise typer.Exit(1)


@app.command()
def pause(
    name: BookieArgument, gateway: GatewayOption = DEFAULT_GATEWAY, as_json: JsonOption = False
) -> None:
    """Hold a bookie's scrubbing and compaction back until `resume`, or until it starts again."""
    told = run(gateway, lambda client: _set_paused(client, name, paused=True))
    print_object(told, as_json=as_json)


@app.command()
def resume(
    name: BookieArgument, gateway: GatewayOption = DEFAULT_GATEWAY, as_json: JsonOption = False
) -> None:
    """Let a bookie's scrubbing and compaction go on."""
    told = run(gateway, lambda client: _set_paused(client, name, paused=False))
    print_object(told, as_json=as_json)


@app.command()
def drain(
    name: BookieArgument,
    gateway: GatewayOption = DEFAULT_GATEWAY,
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Empty a bookie that lives: it takes nothing new, and what it has moves to others. Again, it
    shows how far that is.
    """

    async def work(client: Client) -> dict[str, Any]:
        await _set_state(client, name, "draining")
        return await _watched(
            lambda: drain_of(client, name), 0.0 if not wait else timeout, as_json=as_json
        )

    left = run(gateway, work)
    _print_left(left, as_json=as_json)
    if wait and not left["done"]:
        raise typer.Exit(NOT_YET)


@app.command()
def readonly(
    name: BookieArgument, gateway: GatewayOption = DEFAULT_GATEWAY, as_json: JsonOption = False
) -> None:
    """Have a bookie take no new entries; it keeps what it has."""
    told = run(gateway, lambda client: _set_state(client, name, "read-only"))
    if as_json:
        print_json(told)


@app.command()
def writable(
    name: BookieArgument, gateway: GatewayOption = DEFAULT_GATEWAY, as_json: JsonOption = False
) -> None:
    """Have a bookie take entries (again); this calls a drain off."""
    told = run(gateway, lambda client: _set_state(client, name, "writable"))
    if as_json:
        print_json(told)


@app.command()
def decommission(
    name: BookieArgument,
    gateway: GatewayOption = DEFAULT_GATEWAY,
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """List a dead bookie no more; refused while it lives or anything names it."""

    async def work(client: Client) -> dict[str, Any]:
        url = (await autorecoveries(client))[0]

        async def tried() -> dict[str, Any]:
            try:
                await asked("DELETE", f"{url}/v1/bookies/{quote(bare(name))}")
            except VersionConflict:
                if not wait:
                    raise
                return (await drain_of(client, name)) | {"done": False}
            return {"bookie": bare(name), "done": True, "ledgers": 0, "repairs": 0, "first": []}

        return await _watched(tried, timeout, as_json=as_json)

    left = run(gateway, work)
    _print_left(left, as_json=as_json)
    if not left["done"]:
        raise typer.Exit(NOT_YET)


async def _living_bookie(client: Client, name: str) -> dict[str, Any]:
    known = await found_bookie(client, name)
    if known["state"] == "lost":
        raise NoSuchBookie(f"{known['id']} does not live", bookie=name)
    return known


async def _set_paused(client: Client, name: str, *, paused: bool) -> dict[str, Any]:
    known = await _living_bookie(client, name)
    told = await asked("PUT", f"{known['url']}/v1/maintenance", {"paused": paused})
    return {"bookie": told["bookie"], **told["scrub"]}


async def _set_state(client: Client, name: str, state: str) -> dict[str, Any]:
    known = await _living_bookie(client, name)
    told: dict[str, Any] = await asked("PUT", f"{known['url']}/v1/state", {"state": state})
    return told


async def _watched(
    look: Callable[[], Awaitable[dict[str, Any]]], timeout_s: float | None, *, as_json: bool
) -> dict[str, Any]:
    """Look until it is done or the time is over, with a bar on standard error."""
    end = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True, highlight=False)
    with Progress(*columns, console=console, transient=True, disable=as_json) as progress:
        bar = progress.add_task("ledgers moved", total=None)
        total = 0
        while True:
            left = await look()
            total = max(total, left["ledgers"])
            progress.update(bar, total=total, completed=total - left["ledgers"])
            is_over = end is not None and asyncio.get_running_loop().time() >= end
            if left["done"] or is_over:
                return left
            await asyncio.sleep(_LOOK_S)


def _print_left(left: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(left)
        return
    console = Console(highlight=False)
    if left["done"]:
        console.print(f"{left['bookie']}: nothing names it", markup=False)
        return
    console.print(
        f"{left['bookie']}: {left['ledgers']} ledgers name it, {left['repairs']} queued",
        markup=False,
    )
    print_rows(left["first"], ("ledger_id", "bookie", "state", "reason"), as_json=False)
