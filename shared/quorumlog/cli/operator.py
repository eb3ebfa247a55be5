"""Requests of operators to the services behind the gateways."""

from collections.abc import AsyncIterable, Callable, Sequence
from typing import Annotated, Any, Final
from urllib.parse import quote

import aiohttp
import orjson
import typer
from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn

from quorumlog import errors
from quorumlog.cli.output import bar_of, common_options
from quorumlog.cli.session import parse_urls, run_async
from quorumlog.client import Client
from quorumlog.client.transport import Transport
from quorumlog.wire.problems import from_answer

_LINE_BYTES: Final = 1 << 22
"""Maximum line length of a response: a rebuild's report is one line, with up to 1,000 findings."""
_PHASES: Final = {"survey": "ledgers counted", "ledgers": "ledgers"}

MetadataOption = Annotated[
    str,
    typer.Option(
        envvar="METADATA_URLS",
        help="URLs of metadata services, separated by commas, as in the bookies' settings.",
    ),
]


class NoAutorecovery(errors.NotFound, title="No process of autorecovery is alive", travels=False):
    """No autorecovery process is alive to serve the request."""


class WorkEnded(
    errors.QuorumLogError, code="rebuild-ended", title="The rebuild ended early", travels=False
):
    """Work ended without a result. Completed changes stay, and the work can be repeated."""


async def ask(method: str, url: str, body: dict[str, Any] | None = None) -> Any:
    """Send a request to a service's own endpoint, with retries, and return the JSON of the response,
    or None.

    `url`: one URL, or URLs of equivalent services, separated by commas.
    """
    bases, _, path = url.partition("/v1/")
    options = common_options()
    async with Transport(
        bases.split(","), deadline_s=options.timeout_s, context=options.operator_context
    ) as transport:
        answer = await transport.request(
            method,
            f"/v1/{path}",
            body=None if body is None else orjson.dumps(body),
            headers=options.operator_headers,
            is_repeatable=True,
        )
        return answer.json() if answer.body else None


def ask_metadata(method: str, urls: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Like `ask`, for metadata services. An error ends the process. `urls`: separated by commas.
    Raises: typer.BadParameter.
    """
    bases = ",".join(parse_urls(urls))
    return run_async(lambda: ask(method, f"{bases}{path}", body))


async def follow_work(
    urls: Sequence[str],
    path: str,
    body: dict[str, Any],
    note: Callable[[dict[str, Any]], None] = lambda _line: None,
) -> dict[str, Any]:
    """Run work on all ledgers at the first metadata service that accepts a connection. Returns the
    last line of the response, for which no timeout applies. Progress is shown on standard error,
    and `note` gets each progress line. Raises: ConnectionLost; WorkEnded if the response ends
    early.
    """
    options = common_options()
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=options.timeout_s)
    async with aiohttp.ClientSession(timeout=timeout, read_bufsize=_LINE_BYTES) as session:
        for url in urls:
            try:
                async with session.post(
                    f"{url.rstrip('/')}{path}",
                    json=body,
                    headers={"Accept": "application/x-ndjson", **options.operator_headers},
                    ssl=options.operator_context or True,
                    allow_redirects=False,
                ) as answer:
                    if answer.status != 200:
                        raise from_answer(answer.status, await answer.read(), answer.headers, url)
                    try:
                        return await _last_line(answer.content, note)
                    finally:
                        # Abort the connection: TLS would wait for the service's close.
                        if (held := answer.connection) is not None and held.transport is not None:
                            held.transport.abort()
            except aiohttp.ClientConnectorError as error:
                if url == urls[-1]:
                    raise errors.ConnectionLost(
                        f"{url}: {error}", outcome=errors.NOT_DONE
                    ) from error
            except (aiohttp.ClientError, OSError) as error:
                raise WorkEnded(f"{url} does not respond: {error!r}") from error
    raise AssertionError("parse_urls must return at least one URL")


async def _last_line(
    lines: AsyncIterable[bytes], note: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with bar_of(*columns) as bar:
        task = bar.add_task("asking the bookies", total=None)
        async for text in lines:
            line: dict[str, Any] = orjson.loads(text)
            if line.keys() & {"error", "report", "state"}:
                return line
            note(line)
            done, phase = line.get("done", 0), _PHASES.get(line.get("phase", ""), "")
            said = f"{done:,} {phase}"
            bar.update(task, description=said, completed=done, total=line.get("of"))
    raise WorkEnded("the metadata service's response ended without a result: see the service's log")


async def find_bookie(client: Client, name: str) -> dict[str, Any]:
    """Find a bookie in the gateway's list, by its name with or without @incarnation.

    Raises: NoSuchBookie.
    """
    for bookie in await client.bookies():
        if bare(bookie["id"]) == bare(name):
            return bookie
    raise errors.NoSuchBookie(f"no bookie {name} is registered: see `bookie list`", bookie=name)


async def autorecoveries(client: Client) -> Sequence[str]:
    """The URLs of all autorecovery processes. Raises: NoAutorecovery if none is alive."""
    services = (await client.cluster())["services"]
    urls = [
        service["url"]
        for service in services
        if service["kind"] == "autorecovery" and service["state"] != "gone"
    ]
    if not urls:
        raise NoAutorecovery
    return urls


async def ask_autorecovery(
    client: Client, method: str, path: str, body: dict[str, Any] | None = None
) -> Any:
    """Like `ask`, for one autorecovery process. Others read the change from the metadata."""
    return await ask(method, f"{(await autorecoveries(client))[0]}{path}", body)


async def auditor(client: Client) -> str:
    """The URL of the auditor, or of any autorecovery process while there is no auditor."""
    urls = await autorecoveries(client)
    for url in urls:
        if (await ask("GET", f"{url}/v1/status"))["auditor"]:
            return url
    return urls[0]


async def drain_of(client: Client, name: str) -> dict[str, Any]:
    """The progress of draining a bookie, from autorecovery."""
    found: dict[str, Any] = await ask_autorecovery(client, "GET", f"/v1/drains/{quote(bare(name))}")
    return found


def bare(name: str) -> str:
    """A bookie's name without its incarnation."""
    return name.partition("@")[0]
