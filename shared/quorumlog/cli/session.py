"""The common parts of all commands: their options, a client, and notices.

`with_common_options` adds --gateway, --json, --timeout, --quiet and further options to every
command; functions that send requests or print read their values from `common_options`. Notices on
standard error report retries.
"""

import asyncio
import contextlib
import inspect
import logging
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import aiohttp
import typer

from quorumlog.cli.output import (
    COMMON_OPTIONS,
    GATEWAY,
    TIMEOUT_S,
    CommonOptions,
    StandardOutput,
    common_options,
    finished,
    print_error,
    print_rows,
    print_value,
)
from quorumlog.client import Batching, Client, Paged
from quorumlog.wire.secret import (
    LOCAL_GATEWAYS,
    CertificateUnusable,
    SecretUnusable,
    operator_context,
    operator_headers,
)

T = TypeVar("T")

BATCHING: Final = Batching(count_max=5000, linger_ms=2, queued_bytes_max=8 << 20)
_SHORT_WAIT_S: Final = 2.0
"""A notice names a gateway that has not responded for this long (normal: milliseconds)."""


_JsonOption = Annotated[bool, typer.Option("--json", help="Print results and errors as JSON.")]
_QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print only errors on standard error.")
]
_OF_GATEWAYS: Final = ("gateway", "token", "token_file", "compression")
"""The common options that commands for the metadata service do not have."""


def _unseen(context: typer.Context, token: str | None) -> str | None:
    """Accept a token from the environment only, because all users can see arguments."""
    source = context.get_parameter_source("token")
    if source is not None and source.name == "COMMANDLINE":
        raise typer.BadParameter("all users can see --token: use QUORUMLOG_TOKEN or --token-file")
    return token


def online_options(
    *,
    gateway: Annotated[
        str | None,
        typer.Option(
            envvar="QUORUMLOG_GATEWAY",
            help="URLs of gateways, separated by commas. Default: the gateways of the cluster that `make run` runs here,"
            f" otherwise {GATEWAY}.",
        ),
    ] = None,
    as_json: _JsonOption = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            envvar="QUORUMLOG_TIMEOUT",
            help="Seconds for each request, including its retries.",
        ),
    ] = TIMEOUT_S,
    quiet: _QuietOption = False,
    secret_file: Annotated[
        Path | None,
        typer.Option(
            envvar="CLUSTER_SECRET_FILE",
            help="File with the cluster's secret, for commands that use the services behind the gateways.",
        ),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(envvar="QUORUMLOG_TOKEN", hidden=True, callback=_unseen),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            envvar="QUORUMLOG_TOKEN_FILE",
            dir_okay=False,
            exists=True,
            readable=True,
            help="File with an access token, for gateways that require one; or set QUORUMLOG_TOKEN.",
        ),
    ] = None,
    compression: Annotated[
        Literal["gzip", "zstd"] | None,
        typer.Option(
            envvar="QUORUMLOG_COMPRESSION",
            help="Compress requests and responses, for a slow network.",
        ),
    ] = None,
    cert_file: Annotated[
        Path | None,
        typer.Option(
            envvar="TLS_CERT_FILE",
            help="File of an operator's certificate, for commands that use the services behind the gateways.",
        ),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(envvar="TLS_KEY_FILE", help="File with the private key of --cert-file."),
    ] = None,
    ca_file: Annotated[
        Path | None,
        typer.Option(
            envvar="TLS_CA_FILE",
            help="File of the certificate authority that these services' certificates must come from.",
        ),
    ] = None,
) -> CommonOptions:
    """The common options of commands that send requests to servers. Raises: typer.BadParameter."""
    servers = _local_gateways() if gateway is None else gateway
    try:
        return CommonOptions(
            gateway=servers,
            as_json=as_json or common_options().as_json,
            timeout_s=timeout or TIMEOUT_S,
            is_quiet=quiet,
            operator_headers=operator_headers(secret_file, servers.split(",")),
            token=_token_of(token, token_file),
            compression=compression,
            operator_context=operator_context(cert_file, key_file, ca_file, servers.split(",")),
        )
    except SecretUnusable as error:
        raise typer.BadParameter(f"--secret-file: {error}") from None
    except CertificateUnusable as error:
        raise typer.BadParameter(f"--cert-file: {error}") from None


def offline_options(*, as_json: _JsonOption = False, quiet: _QuietOption = False) -> CommonOptions:
    """The common options of commands that send no requests: they only control the output."""
    return CommonOptions(as_json=as_json or common_options().as_json, is_quiet=quiet)


def with_common_options(
    app: typer.Typer, options: Callable[..., CommonOptions] = online_options
) -> typer.Typer:
    """Add the common options (the parameters of `options`) to each command of a tree."""
    for command in app.registered_commands:
        assert command.callback is not None
        command.callback = _with_options(command.callback, options)
    for group in app.registered_groups:
        assert group.typer_instance is not None
        with_common_options(group.typer_instance, options)
    return app


def _with_options(
    command: Callable[..., Any], options: Callable[..., CommonOptions]
) -> Callable[..., Any]:
    """Add the common options to one command. If the command has its own --timeout, that option also
    limits requests. A command that uses the metadata service gets no --gateway.
    """
    own = inspect.signature(command).parameters
    absent = _OF_GATEWAYS if "metadata" in own else ()
    declared = [
        parameter
        for name, parameter in inspect.signature(options).parameters.items()
        if name not in absent
    ]

    @wraps(command)
    def called(**given: Any) -> Any:
        common = {each.name: given[each.name] for each in declared}
        if servers := given.get("metadata") or given.get("metadata_urls"):
            common["gateway"] = servers
        restored = COMMON_OPTIONS.set(options(**common))
        try:
            return finished(lambda: command(**{name: given[name] for name in own}))
        finally:
            COMMON_OPTIONS.reset(restored)

    parameters = [*own.values(), *(each for each in declared if each.name not in own)]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called


def _local_gateways() -> str:
    """The gateways of the cluster that `make run` started here, or the default gateway."""
    try:
        return ",".join(LOCAL_GATEWAYS.read_text("ascii").split()) or GATEWAY
    except (OSError, UnicodeDecodeError):
        return GATEWAY


def _token_of(token: str | None, file: Path | None) -> str | Callable[[], str] | None:
    """The access token from a file, or else from the environment. Raises: typer.BadParameter."""
    if file is None:
        return token
    try:
        last = file.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not ASCII"
        raise typer.BadParameter(f"{file}: {why}") from None
    if not last:
        raise typer.BadParameter(f"{file}: is empty")

    def present() -> str:
        """Return the file's current token. The file may get a new JWT while a command runs."""
        nonlocal last
        with contextlib.suppress(OSError, UnicodeDecodeError):
            last = file.read_text("ascii").strip() or last
        return last

    return present


def run(work: Callable[[Client], Awaitable[T]]) -> T:
    """Run `work` with a client, and return its result."""
    options = common_options()
    urls = parse_urls(options.gateway)

    async def in_session() -> T:
        try:
            client = Client(
                *urls,
                token=options.token,
                deadline_s=options.timeout_s,
                batching=BATCHING,
                compression=options.compression,
            )
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        async with _silence_noticed(urls), client:
            return await work(client)

    return run_async(in_session)


def run_async(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `work` in an event loop, and return its result."""
    with _retries_noticed():
        return asyncio.run(work())


def print_all(items: Callable[[Client], Paged[dict[str, Any]]], columns: tuple[str, ...]) -> None:
    """Print all items of an API list as rows."""

    async def collected(client: Client) -> list[dict[str, Any]]:
        return [item async for item in items(client)]

    print_rows(run(collected), columns)


WatchOption = Annotated[
    float | None,
    typer.Option("--watch", min=0.1, help="Repeat at this interval (seconds) until Ctrl-C."),
]


def show_repeatedly(
    work: Callable[[Client], Awaitable[T]], show: Callable[[T], None], every_s: float | None
) -> None:
    """Print the result of `work`, once or every `every_s` seconds until Ctrl-C."""
    while True:
        found = run(work)
        if every_s is not None and sys.stdout.isatty():
            StandardOutput().clear()
        print_value(found, show)
        if every_s is None:
            return
        time.sleep(every_s)


def parse_urls(urls: str) -> list[str]:
    """Parse one or more URLs, separated by commas. Raises: typer.BadParameter."""
    found = [url.strip() for url in urls.split(",") if url.strip()]
    for url in found:
        if not re.match(r"https?://[^/]", url):
            raise typer.BadParameter(f"{url!r} is not a server URL: use http://host:port")
    if not found:
        raise typer.BadParameter("no server URL is given: use http://host:port")
    return found


@contextlib.contextmanager
def _retries_noticed() -> Iterator[None]:
    """Print the errors that the SDK retries, and long waits. Each text is printed once."""
    log = logging.getLogger("quorumlog.client")
    notices: logging.Handler = logging.NullHandler()
    if common_options().shows_notices:
        log.setLevel(logging.INFO)
        notices = _Notices()
    log.addHandler(notices)  # without a handler, Python would print warnings itself
    try:
        yield
    finally:
        log.removeHandler(notices)


class _Notices(logging.Handler):
    """Prints notices about retries on standard error."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Print a notice unless it was printed before."""
        text = record.getMessage()
        detail, again, _ = text.partition("; retrying for")
        if detail not in self._said:
            self._said.add(detail)
            print_error(f"{text} (--timeout)" if again else text)


@contextlib.asynccontextmanager
async def _silence_noticed(urls: Sequence[str]) -> AsyncIterator[None]:
    """During the block, print a notice for each gateway that connects but does not respond."""
    looking = [
        asyncio.create_task(_notice_silence(url)) for url in urls if common_options().shows_notices
    ]
    try:
        yield
    finally:
        for task in looking:
            task.cancel()
        await asyncio.gather(*looking, return_exceptions=True)


async def _notice_silence(url: str) -> None:
    timeout = aiohttp.ClientTimeout(total=_SHORT_WAIT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{url.rstrip('/')}/health/live", allow_redirects=False),
        ):
            return
    except TimeoutError:
        print_error(
            f"{url} has not responded for {_SHORT_WAIT_S:.0f} s;"
            f" giving up after {common_options().timeout_s:.0f} s (--timeout)"
        )
    except (aiohttp.ClientError, ValueError):
        return  # the command's own request fails in the same way, and reports the error
