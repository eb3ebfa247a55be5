"""`quorumlog bookie …`."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import quote
from uuid import uuid4

import orjson
import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from quorumlog.cli.ends import ExitStatus, print_error
from quorumlog.cli.operator import ask, autorecoveries, bare, drain_of, find_bookie
from quorumlog.cli.pipes import bar_of
from quorumlog.cli.printing import (
    print_answer,
    print_json,
    print_line,
    print_object,
    print_rows,
)
from quorumlog.cli.session import common_options, parse_urls, run, run_async
from quorumlog.client import Client
from quorumlog.errors import NoSuchBookie, VersionConflict

cookie_app = typer.Typer(
    no_args_is_help=True,
    help="The data that a bookie's name stands for. Asks the metadata service.",
)

BookieArgument = Annotated[str, typer.Argument(help="The bookie's name, such as bookie-1.")]
MetadataOption = Annotated[
    str,
    typer.Option(
        "--metadata",
        envvar="METADATA_URLS",
        help="URLs of metadata services, separated by commas, as in the bookies' settings.",
    ),
]
DirectoryOption = Annotated[
    Path | None, typer.Option("--data-dir", help="Compare with the cookie in this directory.")
]


@cookie_app.command()
def show(
    name: BookieArgument,
    metadata: MetadataOption,
    data_dir: DirectoryOption = None,
) -> None:
    """Print the registered cookie, and beside it the cookie in a directory."""
    row = _ask_metadata("GET", name, metadata)
    found = {"name": row["name"], "version": row["version"], **row["cookie"]}
    if data_dir is not None:
        local = _cookie_in(data_dir)
        found["directory"] = local
        found["matches"] = (
            local is not None
            and all(local[field] == row["cookie"][field] for field in ("incarnation", "instance"))
            and _is_own_marker(data_dir, local)
        )
    print_object(found)


@cookie_app.command()
def fix(name: BookieArgument, metadata: MetadataOption) -> None:
    """Permit a bookie's next start to continue without the entries that it lost: the bookie comes back
    as a new incarnation, which denies no entry until it is refilled from its peers. For one start only.
    """
    row = _ask_metadata("GET", name, metadata)
    if not row["cookie"]["may_fix"]:
        cookie = row["cookie"] | {"may_fix": True}
        body = {"cookie": cookie, "version": row["version"], "attempt": str(uuid4())}
        row = _ask_metadata("PUT", name, metadata, body)
    print_answer(
        row,
        f"{bare(name)} may start once without the entries that it lost, as incarnation"
        f" {row['cookie']['incarnation'] + 1} or later",
    )


@cookie_app.command()
def delete(name: BookieArgument, metadata: MetadataOption) -> None:
    """Remove a bookie from the list; refused while the bookie lives or any ledger names it. An empty
    directory may then register under the name, as a later incarnation.
    """
    _ask_metadata("DELETE", name, metadata)
    print_answer({"deleted": bare(name)}, f"{bare(name)} is removed from the list")


def _ask_metadata(method: str, name: str, metadata: str, body: dict[str, Any] | None = None) -> Any:
    urls = ",".join(parse_urls(metadata))
    path = f"/v1/bookies/{quote(bare(name))}/cookie"
    return run_async(lambda: ask(method, f"{urls}{path}", body))


def _is_own_marker(directory: Path, local: Any) -> bool:
    """Whether the cookie was written for this very directory, which is no copy (rule 15a)."""
    identity = local.get("identity")
    try:
        return identity is None or bool((directory / "marker").stat().st_ino == identity["inode"])
    except OSError:
        return False


def _cookie_in(directory: Path) -> Any:
    """The directory's own cookie, or None where no cookie can be read."""
    try:
        return orjson.loads((directory / "cookie.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None


app = typer.Typer(no_args_is_help=True, help="The servers that store entries.")
app.add_typer(cookie_app, name="cookie")

_LOOK_S: Final = 1.0

WaitOption = Annotated[
    bool, typer.Option("--wait", help="Wait until nothing names the bookie any more.")
]
TimeoutOption = Annotated[
    float | None,
    typer.Option("--timeout", min=0, help="Wait at most this long (seconds); status 5 after that."),
]


@app.command(name="list")
def list_() -> None:
    """Print all bookies with their state."""
    found = run(lambda client: client.bookies())
    print_rows(list(found), ("id", "state", "url", "zone", "free_bytes"))


@app.command()
def info(name: BookieArgument) -> None:
    """Print a bookie's own status, and how many ledgers name the bookie."""

    async def work(client: Client) -> dict[str, Any]:
        known = await find_bookie(client, name)
        if known["state"] != "lost":
            known |= await ask("GET", f"{known['url']}/v1/info")
        left = await drain_of(client, name)
        return known | {"ledgers": left["ledgers"], "repairs": left["repairs"]}

    print_object(run(work))


@app.command()
def damage(name: BookieArgument) -> None:
    """Print the damaged entries of a bookie's log, with their places; status 1 if there are any. The
    bookie copies them from other members that have them.
    """

    async def work(client: Client) -> dict[str, Any]:
        known = await _living_bookie(client, name)
        found: dict[str, Any] = await ask("GET", f"{known['url']}/v1/damage")
        return found

    found = run(work)
    places = found["entries"] + found["stretches"]
    if common_options().as_json:
        print_json(found)
    else:
        _print_damage(found, places)
    if places or found["is_cut"]:
        raise typer.Exit(ExitStatus.FAILED)


@app.command()
def pause(name: BookieArgument) -> None:
    """Pause a bookie's scrubbing and compaction until `resume`, or until the bookie restarts."""
    print_object(run(lambda client: _set_paused(client, name, paused=True)))


@app.command()
def resume(name: BookieArgument) -> None:
    """Resume a bookie's scrubbing and compaction."""
    print_object(run(lambda client: _set_paused(client, name, paused=False)))


@app.command()
def drain(
    name: BookieArgument,
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
) -> None:
    """Drain a live bookie: it takes no new entries, and its entries move to other bookies. Repeat the
    command to see the progress.
    """

    async def work(client: Client) -> dict[str, Any]:
        await _set_state(client, name, "draining")
        return await _follow_drain(lambda: drain_of(client, name), 0.0 if not wait else timeout)

    left = run(work)
    _print_left(left)
    if wait and not left["done"]:
        raise typer.Exit(ExitStatus.WAITED)


@app.command()
def readonly(name: BookieArgument) -> None:
    """Make a bookie read-only: it takes no new entries and keeps those it has."""
    print_answer(run(lambda client: _set_state(client, name, "read-only")))


@app.command()
def writable(name: BookieArgument) -> None:
    """Make a bookie take entries again. Cancels a drain."""
    print_answer(run(lambda client: _set_state(client, name, "writable")))


@app.command()
def decommission(
    name: BookieArgument,
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
) -> None:
    """Remove a dead bookie from the list; refused while the bookie lives or anything names it."""

    async def work(client: Client) -> dict[str, Any]:
        url = (await autorecoveries(client))[0]

        async def tried() -> dict[str, Any]:
            try:
                await ask("DELETE", f"{url}/v1/bookies/{quote(bare(name))}")
            except VersionConflict:
                if not wait:
                    raise
                return (await drain_of(client, name)) | {"done": False}
            return {"bookie": bare(name), "done": True, "ledgers": 0, "repairs": 0, "first": []}

        return await _follow_drain(tried, timeout)

    left = run(work)
    _print_left(left)
    if not left["done"]:
        raise typer.Exit(ExitStatus.WAITED)


async def _living_bookie(client: Client, name: str) -> dict[str, Any]:
    known = await find_bookie(client, name)
    if known["state"] == "lost":
        raise NoSuchBookie(f"{known['id']} does not live", bookie=name)
    return known


async def _set_paused(client: Client, name: str, *, paused: bool) -> dict[str, Any]:
    known = await _living_bookie(client, name)
    answer = await ask("PUT", f"{known['url']}/v1/maintenance", {"paused": paused})
    return {"bookie": answer["bookie"], **answer["scrub"]}


async def _set_state(client: Client, name: str, state: str) -> dict[str, Any]:
    known = await _living_bookie(client, name)
    answer: dict[str, Any] = await ask("PUT", f"{known['url']}/v1/state", {"state": state})
    return answer


async def _follow_drain(
    look: Callable[[], Awaitable[dict[str, Any]]], timeout_s: float | None
) -> dict[str, Any]:
    """Repeat until the drain is done or the time is over, with a progress bar on standard error."""
    end = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with bar_of(*columns, TimeElapsedColumn()) as progress:
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


def _print_left(left: dict[str, Any]) -> None:
    if left["done"]:
        text = f"{left['bookie']}: nothing names the bookie"
    else:
        text = (
            f"{left['bookie']}: {left['ledgers']} ledgers name the bookie,"
            f" {left['repairs']} repairs are queued"
        ) + (f"; waits: {left['why']}" if left.get("why") else "")
    print_answer(left, text)
    if not left["done"] and not common_options().as_json:
        print_rows(left["first"], ("ledger_id", "bookie", "state", "reason"))


def _print_damage(found: dict[str, Any], places: list[dict[str, Any]]) -> None:
    if places:
        print_rows(places, ("ledger_id", "ranges", "segment", "offset", "start", "end", "reason"))
    if found["is_cut"]:
        print_error(
            "there is more: run the command again when these are repaired and the next scrub has ended"
        )
    elif not places:
        print_line(f"{found['bookie']}: nothing is damaged")
