"""Requests of operators to the services behind the gateway."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import orjson

from quorumlog.cli.session import common_options
from quorumlog.client import Client
from quorumlog.client.transport import Transport
from quorumlog.errors import NoSuchBookie, NotFound


class NoAutorecovery(
    NotFound, code="no-autorecovery", title="No process of autorecovery is alive", travels=False
):
    """No process of autorecovery is alive, so nobody can be asked."""


async def ask(
    method: str,
    url: str,
    body: dict[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """Send a request to a service's own endpoint and return the JSON of its answer, or None. Every such
    request may be repeated. `url`: of one service, or of several that answer alike, with commas. `headers`: in place of
    the command's credentials.
    """
    bases, _, path = url.partition("/v1/")
    async with Transport(bases.split(","), deadline_s=common_options().timeout_s) as transport:
        answer = await transport.request(
            method,
            f"/v1/{path}",
            body=None if body is None else orjson.dumps(body),
            headers=common_options().operator_headers if headers is None else headers,
            is_repeatable=True,
        )
        return answer.json() if answer.body else None


async def find_bookie(client: Client, name: str) -> dict[str, Any]:
    """The gateway's entry for a bookie, by its name with or without @incarnation.

    Raises: NoSuchBookie.
    """
    for bookie in await client.bookies():
        if bare(bookie["id"]) == bare(name):
            return bookie
    raise NoSuchBookie(f"no bookie {name} is registered", bookie=name)


async def autorecoveries(client: Client) -> Sequence[str]:
    """The URLs of all processes of autorecovery. Raises: NoAutorecovery where there is none."""
    services = (await client.cluster())["services"]
    urls = [service["url"] for service in services if service["kind"] == "autorecovery"]
    if not urls:
        raise NoAutorecovery
    return urls


async def auditor(client: Client) -> str:
    """The URL of the auditor, or of any process of autorecovery while there is no auditor."""
    urls = await autorecoveries(client)
    for url in urls:
        if (await ask("GET", f"{url}/v1/status"))["auditor"]:
            return url
    return urls[0]


async def drain_of(client: Client, name: str) -> dict[str, Any]:
    """How far a bookie is drained."""
    url = (await autorecoveries(client))[0]
    found: dict[str, Any] = await ask("GET", f"{url}/v1/drains/{quote(bare(name))}")
    return found


def bare(name: str) -> str:
    """A bookie's name without its incarnation."""
    return name.partition("@")[0]
