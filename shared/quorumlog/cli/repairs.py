"""`quorumlog repair …`."""

from typing import Annotated, Any

import typer

from quorumlog.cli.common import (
    DEFAULT_GATEWAY,
    GatewayOption,
    JsonOption,
    print_json,
    print_object,
    print_rows,
    run,
)
from quorumlog.cli.operator import asked, autorecoveries
from quorumlog.client import Client

app = typer.Typer(no_args_is_help=True, help="How lost copies are made again.")


@app.command()
def status(gateway: GatewayOption = DEFAULT_GATEWAY, as_json: JsonOption = False) -> None:
    """Print what each autorecovery does, and the first places that lack copies."""

    async def work(client: Client) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        found = [
            {"url": url, **await asked("GET", f"{url}/v1/status")}
            for url in await autorecoveries(client)
        ]
        return found, (await client.cluster())["under_replicated"]

    services, lacking = run(gateway, work)
    if as_json:
        print_json({"autorecovery": services, "under_replicated": lacking})
        return
    for service in services:
        print_object(service, as_json=False)
    print_rows(lacking, ("ledger_id", "bookie"), as_json=False)


@app.command()
def trigger(gateway: GatewayOption = DEFAULT_GATEWAY) -> None:
    """Have everything looked at now."""

    async def work(client: Client) -> None:
        for url in await autorecoveries(client):
            await asked("POST", f"{url}/v1/audits")

    run(gateway, work)


@app.command()
def delay(
    seconds: Annotated[float, typer.Argument(min=0, max=86_400)],
    gateway: GatewayOption = DEFAULT_GATEWAY,
) -> None:
    """Set how long a bookie may be away before its ledgers are copied; the same value again:
    look now. Holds until autorecovery starts anew.
    """

    async def work(client: Client) -> None:
        for url in await autorecoveries(client):
            await asked("PUT", f"{url}/v1/lost-bookie-delay", {"seconds": seconds})

    run(gateway, work)
