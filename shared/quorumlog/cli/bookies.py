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
    Out,
    print_json,
    print_object,
    print_rows,
)
from quorumlog.cli.ends import Status
from quorumlog.cli.operator import asked, autorecoveries, bare, drain_of, found_bookie
from quorumlog.cli.pipes import is_progress_shown
from quorumlog.cli.session import run
from quorumlog.client import Client
from quorumlog.errors import NoSuchBookie, VersionConflict

app = typer.Typer(no_args_is_help=True, help="The servers that store entries.")
app.add_typer(cookies.app, name="cookie")

_LOOK_S: Final = 1.0

BookieArgument = Annotated[str, typer.Argument(help="The bookie's name, such as bookie-1.")]
WaitOption = Annotated[
    bool, typer.Option("--wait", help="Wait until nothing names the bookie any more.")
]
TimeoutOption = Annotated[
    float | None,
    typer.Option("--timeout", min=0, help="Wait at most this long (seconds); status 5 after that."),
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
    """Print a bookie's own status, and how many ledgers name the bookie."""

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
    """Print the damaged entries of a bookie's log, with their places; status 1 if there are any. The
    bookie copies them from other members that have them.
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
    elif not found["is_cut"]:
        Out().print(f"{found['bookie']}: nothing is damaged", markup=False)
    if found["is_cut"] and not as_json:
        Console(stderr=True).print(
            "there is more: run the command again when these are repaired and the next scrub has ended"
        )
    if places or found["is_cut"]:
        raise typer.Exit(1)


@app.command()
def pause(
    name: BookieArgument, gateway: GatewayOption = DEFAULT_GATEWAY, as_json: JsonOption = False
) -> None:
    """Pause a bookie's scrubbing and compaction until `resume`, or until the bookie restarts."""
    answer = run(gateway, lambda client: _set_paused(client, name, paused=True))
    print_object(answer, as_json=as_json)


@app.command()
def resume(
    name: BookieArgument, gateway: GatewayOption = DEFAULT_GATEWAY, as_json: JsonOption = False
) -> None:
    """Resume a bookie's scrubbing and compaction."""
    answer = run(gateway, lambda client: _set_paused(client, name, paused=False))
    print_object(answer, as_json=as_json)


@app.command()
def drain(
    name: BookieArgument,
    gateway: GatewayOption = DEFAULT_GATEWAY,
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Drain a live bookie: it takes no new entries, and its entries move to other bookies. Repeat the
    command to see the progress.
    """

    async def work(client: Client) -> dict[str, Any]:
        await _set_state(client, name, "draining")
        return await _follow_drain(lambda: drain_of(client, name), 0.0 if not wait else timeout)

    left = run(gateway, work)
    _print_left(left, as_json=as_json)
    if wait and not left["done"]:
        raise typer.Exit(Status.WAITED)


@app.command()
def readonly(
    name: BookieArgument, gateway: GatewayOption = DEFAULT_GATEWAY, as_json: JsonOption = False
) -> None:
    """Make a bookie read-only: it takes no new entries and keeps those it has."""
    answer = run(gateway, lambda client: _set_state(client, name, "read-only"))
    if as_json:
        print_json(answer)


@app.command()
def writable(
    name: BookieArgument, gateway: GatewayOption = DEFAULT_GATEWAY, as_json: JsonOption = False
) -> None:
    """Make a bookie take entries again. Cancels a drain."""
    answer = run(gateway, lambda client: _set_state(client, name, "writable"))
    if as_json:
        print_json(answer)


@app.command()
def decommission(
    name: BookieArgument,
    gateway: GatewayOption = DEFAULT_GATEWAY,
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove a dead bookie from the list; refused while the bookie lives or anything names it."""

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

        return await _follow_drain(tried, timeout)

    left = run(gateway, work)
    _print_left(left, as_json=as_json)
    if not left["done"]:
        raise typer.Exit(Status.WAITED)


async def _living_bookie(client: Client, name: str) -> dict[str, Any]:
    known = await found_bookie(client, name)
    if known["state"] == "lost":
        raise NoSuchBookie(f"{known['id']} does not live", bookie=name)
    return known


async def _set_paused(client: Client, name: str, *, paused: bool) -> dict[str, Any]:
    known = await _living_bookie(client, name)
    answer = await asked("PUT", f"{known['url']}/v1/maintenance", {"paused": paused})
    return {"bookie": answer["bookie"], **answer["scrub"]}


async def _set_state(client: Client, name: str, state: str) -> dict[str, Any]:
    known = await _living_bookie(client, name)
    answer: dict[str, Any] = await asked("PUT", f"{known['url']}/v1/state", {"state": state})
    return answer


async def _follow_drain(
    look: Callable[[], Awaitable[dict[str, Any]]], timeout_s: float | None
) -> dict[str, Any]:
    """Repeat until the drain is done or the time is over, with a progress bar on standard error."""
    end = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True, highlight=False)
    with Progress(
        *columns, console=console, transient=True, disable=not is_progress_shown()
    ) as progress:
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
    console = Out()
    if left["done"]:
        console.print(f"{left['bookie']}: nothing names the bookie", markup=False)
        return
    console.print(
        f"{left['bookie']}: {left['ledgers']} ledgers name the bookie, {left['repairs']} repairs are queued",
        markup=False,
    )
    print_rows(left["first"], ("ledger_id", "bookie", "state", "reason"), as_json=False)
