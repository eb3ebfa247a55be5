"""The commands `quorumlog bookie …`, and `quorumlog repair …` for missing copies."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import quote
from uuid import uuid4

import orjson
import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from quorumlog.cli.operator import (
    MetadataOption,
    ask,
    ask_autorecovery,
    ask_metadata,
    auditor,
    autorecoveries,
    bare,
    drain_of,
    find_bookie,
)
from quorumlog.cli.output import (
    ExitStatus,
    bar_of,
    common_options,
    print_answer,
    print_error,
    print_line,
    print_object,
    print_rows,
    print_value,
)
from quorumlog.cli.session import WatchOption, run, show_repeatedly
from quorumlog.client import Client
from quorumlog.errors import NoSuchBookie, VersionConflict

cookie_app = typer.Typer(
    no_args_is_help=True,
    help="The registered identity of a bookie's data. Sends requests to the metadata service.",
)

BookieArgument = Annotated[str, typer.Argument(help="The bookie's name, such as bookie-1.")]


@cookie_app.command()
def show(
    name: BookieArgument,
    metadata: MetadataOption,
    data_dir: Annotated[
        Path | None, typer.Option(help="Compare with the cookie in this directory of a bookie.")
    ] = None,
) -> None:
    """Print a bookie's registered cookie and, with --data-dir, the cookie in a directory."""
    row = _ask_cookie("GET", name, metadata)
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
    """Permit a bookie to start once without the entries that it lost. The bookie comes back as a new
    incarnation, which reports no entry as missing until other bookies have refilled it.
    """
    row = _ask_cookie("GET", name, metadata)
    if not row["cookie"]["may_fix"]:
        cookie = row["cookie"] | {"may_fix": True}
        body = {"cookie": cookie, "version": row["version"], "attempt": str(uuid4())}
        row = _ask_cookie("PUT", name, metadata, body)
    print_answer(
        row,
        f"{bare(name)} may start once without the entries that it lost, as incarnation"
        f" {row['cookie']['incarnation'] + 1} or later",
    )


@cookie_app.command()
def delete(name: BookieArgument, metadata: MetadataOption) -> None:
    """Remove a bookie from the list. Refused while the bookie is alive or any ledger references it.
    Afterwards an empty directory may register under the name, as a later incarnation.
    """
    _ask_cookie("DELETE", name, metadata)
    print_answer({"deleted": bare(name)}, f"{bare(name)} is removed from the list")


def _ask_cookie(method: str, name: str, metadata: str, body: dict[str, Any] | None = None) -> Any:
    return ask_metadata(method, metadata, f"/v1/bookies/{quote(bare(name))}/cookie", body)


def _is_own_marker(directory: Path, local: Any) -> bool:
    """Whether the cookie was written for this directory, and not copied (rule 15a)."""
    identity = local.get("identity")
    try:
        return identity is None or bool((directory / "marker").stat().st_ino == identity["inode"])
    except OSError:
        return False


def _cookie_in(directory: Path) -> Any:
    """The cookie in a directory, or None if no cookie can be read."""
    try:
        return orjson.loads((directory / "cookie.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None


app = typer.Typer(no_args_is_help=True, help="The servers that store entries.")
app.add_typer(cookie_app, name="cookie")
repair_app = typer.Typer(no_args_is_help=True, help="Repair of missing copies.")

_LOOK_S: Final = 1.0

WaitOption = Annotated[
    bool, typer.Option("--wait", help="Wait until no ledger and no repair references the bookie.")
]
TimeoutOption = Annotated[
    float | None,
    typer.Option(min=0, help="Wait at most this many seconds, then exit with status 5."),
]


@app.command(name="list")
def list_() -> None:
    """Print all bookies with their state."""
    print_rows(run(lambda client: client.bookies()), ("id", "state", "url", "zone", "free_bytes"))


@app.command()
def info(name: BookieArgument) -> None:
    """Print the status that a bookie reports, and how many ledgers reference the bookie."""

    async def work(client: Client) -> dict[str, Any]:
        known = await find_bookie(client, name)
        if known["state"] != "lost":
            known |= await ask("GET", f"{known['url']}/v1/info")
        left = await drain_of(client, name)
        return known | {"ledgers": left["ledgers"], "repairs": left["repairs"]}

    print_object(run(work))


@app.command()
def damage(name: BookieArgument) -> None:
    """Print the damaged entries of a bookie's log, and their positions in its files. Exit status 1
    if any entry is damaged. The bookie replaces damaged entries with copies from other bookies.
    """
    found = run(lambda client: _ask_bookie(client, name, "GET", "/v1/damage"))
    print_value(found, _print_damage)
    if found["entries"] or found["stretches"] or found["is_cut"]:
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
    """Drain a live bookie: it accepts no new entries, and its entries move to other bookies. Repeat
    the command to see the progress.
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
    """Make a bookie read-only: it accepts no new entries, and keeps its existing entries."""
    print_answer(run(lambda client: _set_state(client, name, "read-only")))


@app.command()
def writable(name: BookieArgument) -> None:
    """Make a bookie accept entries again. Cancels a drain."""
    print_answer(run(lambda client: _set_state(client, name, "writable")))


@app.command()
def decommission(
    name: BookieArgument,
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
) -> None:
    """Remove a dead bookie from the list. Refused while it is alive or any ledger references it."""

    async def work(client: Client) -> dict[str, Any]:
        path = f"/v1/bookies/{quote(bare(name))}"

        async def tried() -> dict[str, Any]:
            try:
                await ask_autorecovery(client, "DELETE", path)
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


async def _ask_bookie(
    client: Client, name: str, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    known = await find_bookie(client, name)
    if known["state"] == "lost":
        raise NoSuchBookie(f"{known['id']} is not alive: start the bookie first", bookie=name)
    answer: dict[str, Any] = await ask(method, f"{known['url']}{path}", body)
    return answer


async def _set_paused(client: Client, name: str, *, paused: bool) -> dict[str, Any]:
    answer = await _ask_bookie(client, name, "PUT", "/v1/maintenance", {"paused": paused})
    return {"bookie": answer["bookie"], **answer["scrub"]}


async def _set_state(client: Client, name: str, state: str) -> dict[str, Any]:
    return await _ask_bookie(client, name, "PUT", "/v1/state", {"state": state})


async def _follow_drain(
    look: Callable[[], Awaitable[dict[str, Any]]], timeout_s: float | None
) -> dict[str, Any]:
    """Call `look` until the drain is done or times out. Shows a progress bar on standard error."""
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
        text = f"{left['bookie']}: no ledger and no repair references the bookie"
    else:
        text = (
            f"{left['bookie']}: {left['ledgers']} ledgers reference the bookie,"
            f" {left['repairs']} repairs are queued"
        ) + (f"; waits: {left['why']}" if left.get("why") else "")
    print_answer(left, text)
    if not left["done"] and not common_options().as_json:
        print_rows(left["first"], ("ledger_id", "bookie", "state", "reason"))


def _print_damage(found: dict[str, Any]) -> None:
    places = found["entries"] + found["stretches"]
    if places:
        print_rows(places, ("ledger_id", "ranges", "segment", "offset", "start", "end", "reason"))
    if found["is_cut"]:
        print_error(
            "more damage exists: run the command again after these repairs and the next scrub"
        )
    elif not places:
        print_line(f"{found['bookie']}: nothing is damaged")


# --- repairs ---------------------------------------------------------------------------------------


@repair_app.command()
def status(watch: WatchOption = None) -> None:
    """Print the status of each autorecovery process, the state of the repair queue, and the queue's
    first items with their reasons.
    """

    async def work(client: Client) -> dict[str, Any]:
        urls = await autorecoveries(client)
        found = [{"url": url, **await ask("GET", f"{url}/v1/status")} for url in urls]
        queue = found[0].get("queue")
        for service in found:
            service.pop("queue", None)
        first = (await ask("GET", f"{urls[0]}/v1/repairs"))["repairs"]
        return {"autorecovery": found, "queue": queue, "first": first}

    def show(found: dict[str, Any]) -> None:
        for service in found["autorecovery"]:
            print_object(service)
        print_object(found["queue"])
        print_rows(found["first"], ("ledger_id", "member", "failures", "detail"))

    show_repeatedly(work, show, watch)


@repair_app.command()
def trigger() -> None:
    """Start an audit of all ledgers now, and retry postponed repairs."""
    _send_change("POST", "/v1/audits")


@repair_app.command()
def check() -> None:
    """Compare all copies of all ledgers now, and repair missing copies; see `repair status`."""

    async def work(client: Client) -> Any:
        return await ask("POST", f"{await auditor(client)}/v1/checks")

    print_answer(run(work))


@repair_app.command(name="pause")
def pause_repairs() -> None:
    """Pause copying in all autorecovery processes until `resume`, even across restarts. New
    repairs are still queued.
    """
    _send_change("PATCH", "/v1/settings", {"paused": True})


@repair_app.command(name="resume")
def resume_repairs() -> None:
    """Resume copying in all autorecovery processes."""
    _send_change("PATCH", "/v1/settings", {"paused": False})


@repair_app.command()
def limit(
    bytes_per_s: Annotated[
        int | None,
        typer.Option(min=0, help="Bytes per second of all processes together; 0 for no limit."),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, max=64, help="Concurrent repairs in each process.")
    ] = None,
) -> None:
    """Limit the rate of copying. The limit takes effect at once and survives restarts."""
    given: dict[str, Any] = {}
    if bytes_per_s is not None:
        given["bytes_per_s"] = bytes_per_s or None
    if concurrency is not None:
        given["concurrency"] = concurrency
    if not given:
        raise typer.BadParameter("give --bytes-per-s, --concurrency, or both")
    _send_change("PATCH", "/v1/settings", given)


@repair_app.command()
def delay(seconds: Annotated[float, typer.Argument(min=0, max=86_400)]) -> None:
    """Set how many seconds a bookie may be away before its ledgers are copied. The delay
    survives restarts. Repeating the command with the same value starts an audit now.
    """
    _send_change("PUT", "/v1/lost-bookie-delay", {"seconds": seconds})


def _send_change(method: str, path: str, body: dict[str, Any] | None = None) -> None:
    print_answer(run(lambda client: ask_autorecovery(client, method, path, body)))
