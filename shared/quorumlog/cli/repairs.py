"""`quorumlog repair …`."""

from typing import Annotated, Any

import typer

from quorumlog.cli.operator import ask, auditor, autorecoveries
from quorumlog.cli.printing import (
    WatchOption,
    print_answer,
    print_json,
    print_object,
    print_rows,
    show_repeatedly,
)
from quorumlog.cli.session import common_options, run
from quorumlog.client import Client

app = typer.Typer(no_args_is_help=True, help="Repair of missing copies.")


@app.command()
def status(
    watch: WatchOption = None,
) -> None:
    """Print what each process of autorecovery does, how many entries lack copies, and the first items
    of the queue with their reasons.
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
        if common_options().as_json:
            print_json(found)
            return
        for service in found["autorecovery"]:
            print_object(service)
        print_object(found["queue"])
        print_rows(found["first"], ("ledger_id", "member", "failures", "detail"))

    show_repeatedly(work, show, watch)


@app.command()
def trigger() -> None:
    """Audit everything now, and retry postponed repairs."""
    _send_change("POST", "/v1/audits")


@app.command()
def check() -> None:
    """Compare all copies of all ledgers now and repair what is missing; `status` shows the progress."""

    async def work(client: Client) -> Any:
        return await ask("POST", f"{await auditor(client)}/v1/checks")

    print_answer(run(work))


@app.command()
def pause() -> None:
    """Pause copying in all processes, across restarts, until `resume`; findings are still queued."""
    _send_change("PATCH", "/v1/settings", {"paused": True})


@app.command()
def resume() -> None:
    """Resume copying."""
    _send_change("PATCH", "/v1/settings", {"paused": False})


@app.command()
def limit(
    bytes_per_s: Annotated[
        int | None, typer.Option(min=0, help="For all processes together; 0: no limit.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, max=64, help="Concurrent repairs in each process.")
    ] = None,
) -> None:
    """Limit the rate of copying; takes effect at once and survives restarts."""
    given: dict[str, Any] = {}
    if bytes_per_s is not None:
        given["bytes_per_s"] = bytes_per_s or None
    if concurrency is not None:
        given["concurrency"] = concurrency
    if not given:
        raise typer.BadParameter("give --bytes-per-s, --concurrency, or both")
    _send_change("PATCH", "/v1/settings", given)


@app.command()
def delay(
    seconds: Annotated[float, typer.Argument(min=0, max=86_400)],
) -> None:
    """Set how long a bookie may be away before its ledgers are copied; survives restarts. Repeating the
    same value starts an audit now.
    """
    _send_change("PUT", "/v1/lost-bookie-delay", {"seconds": seconds})


def _send_change(method: str, path: str, body: dict[str, Any] | None = None) -> None:
    """Send a change to one process; the others learn it from the metadata."""

    async def work(client: Client) -> Any:
        url = (await autorecoveries(client))[0]
        return await ask(method, f"{url}{path}", body)

    print_answer(run(work))
