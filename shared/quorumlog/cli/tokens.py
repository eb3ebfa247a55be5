"""`quorumlog token …`: access tokens of gateways that require them."""

import base64
from typing import Annotated, Any
from uuid import uuid4

import typer

from quorumlog.cli.operator import ask
from quorumlog.cli.printing import print_answer, print_json, print_rows
from quorumlog.cli.session import common_options, parse_urls, run, run_async
from quorumlog.wire.secret import draw_token

_DAY_S = 24 * 3600

app = typer.Typer(no_args_is_help=True, help="Access tokens: make, list, revoke.")


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="For people: who has it, or what for.")],
    grants: Annotated[
        list[str],
        typer.Argument(
            help="read, append, manage or admin, then a colon, and what for: logs/NAME, ledgers/NAMESPACE (each with"
            " * for any rest), cluster, or * for everything."
        ),
    ],
    days: Annotated[
        int | None, typer.Option(min=1, max=3650, help="How long it is valid; else until revoked.")
    ] = None,
    requests_per_s: Annotated[
        int | None, typer.Option(min=1, help="Requests per second, at each gateway.")
    ] = None,
    bytes_per_s: Annotated[
        int | None,
        typer.Option(min=1, help="Bytes of bodies and answers per second, at each gateway."),
    ] = None,
    connections: Annotated[
        int | None,
        typer.Option(min=1, help="Connections with requests under way, at each gateway."),
    ] = None,
    open_ledgers: Annotated[
        int | None, typer.Option(min=1, help="Open ledgers, at each gateway.")
    ] = None,
    metadata_urls: Annotated[
        str | None,
        typer.Option(
            "--metadata",
            help="URLs of metadata services: make the token there, for the first one of a cluster.",
        ),
    ] = None,
) -> None:
    """Make a token and print it: nobody can print it again."""
    expires_in_s = None if days is None else days * _DAY_S
    asked = {
        "requests_per_s": requests_per_s,
        "bytes_per_s": bytes_per_s,
        "connections": connections,
        "open_ledgers": open_ledgers,
    }
    quotas = {quota: most for quota, most in asked.items() if most is not None}
    if metadata_urls is None:
        made = run(
            lambda client: client.create_token(
                name, grants, expires_in_s=expires_in_s, quotas=quotas
            )
        )
    else:
        urls = parse_urls(metadata_urls)
        made = run_async(lambda: _create_at(urls, name, grants, expires_in_s, quotas))
    print_answer(made, made["token"])


async def _create_at(
    urls: list[str],
    name: str,
    grants: list[str],
    expires_in_s: int | None,
    quotas: dict[str, int],
) -> dict[str, Any]:
    """The same at the metadata service, which gets no secret."""
    drawn = draw_token()
    body = {
        "token": {
            "id": drawn.id,
            "hash": base64.b64encode(drawn.hash).decode(),
            "name": name,
            "grants": grants,
            "quotas": quotas,
        },
        "expires_in_s": expires_in_s,
        "attempt": str(uuid4()),
    }
    bases = ",".join(url.rstrip("/") for url in urls)
    row: dict[str, Any] = await ask("POST", f"{bases}/v1/tokens", body)
    return {**{key: value for key, value in row.items() if key != "hash"}, "token": drawn.secret}


@app.command("list")
def list_tokens() -> None:
    """Print all tokens, without their secrets."""
    found = run(lambda client: client.tokens())
    if common_options().as_json:
        for token in found:
            print_json(token)
        return
    rows = [
        {**token, "grants": " ".join(token["grants"]), "expires_at": token["expires_at"] or "never"}
        for token in found
    ]
    print_rows(rows, ("id", "name", "grants", "created_at", "expires_at"))


@app.command()
def revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="As `token list` prints it.")],
) -> None:
    """End a token: within seconds all gateways refuse it and cut its connections."""
    run(lambda client: client.revoke_token(token_id))
    print_answer({"id": token_id, "revoked": True})
