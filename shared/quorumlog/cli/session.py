"""What all commands have in common while they run: their options, a client, and notices.

Every command gets --gateway, --json, --timeout, --quiet and --secret-file from `with_common_options`; `common_options` has
their values for the functions that ask servers and print. While a command waits, standard error says what is tried again, and for how long.
"""

import asyncio
import contextlib
import inspect
import logging
import re
import ssl
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import aiohttp
import typer

from quorumlog.cli.ends import finished, print_error, tell_interrupted
from quorumlog.client import Batching, Client
from quorumlog.wire.secret import (
    LOCAL_GATEWAYS,
    CertificateUnusable,
    SecretUnusable,
    operator_context,
    operator_headers,
)

T = TypeVar("T")

BATCHING: Final = Batching(count_max=5000, linger_ms=2, queued_bytes_max=8 << 20)
GATEWAY: Final = "http://127.0.0.1:8080"
TIMEOUT_S: Final = 30.0
"""A log's takeover after the death of a gateway fits in; a person does not wait longer unasked (taste)."""
_MOMENT_S: Final = 2.0
"""A gateway that has not answered by then is named; an answer takes milliseconds."""


Coding = Literal["gzip", "zstd"]


@dataclass(frozen=True, slots=True)
class CommonOptions:
    """The values of the options that every command has."""

    gateway: str = GATEWAY
    as_json: bool = False
    timeout_s: float = TIMEOUT_S
    is_quiet: bool = False
    operator_headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What is shown to the services behind the gateways."""
    token: str | Callable[[], str] | None = field(default=None, repr=False)
    """Of the caller, for gateways that require one."""
    compression: str | None = None
    """Of what is sent to gateways and read from them."""
    operator_context: ssl.SSLContext | None = None
    """With which they are asked over TLS."""

    @property
    def shows_notices(self) -> bool:
        """Whether standard error may have more than errors."""
        return not self.is_quiet and not self.as_json


_COMMON_OPTIONS: Final[ContextVar[CommonOptions]] = ContextVar(
    "options",
    default=CommonOptions(),  # noqa: B039  (frozen)
)


def common_options() -> CommonOptions:
    """The common options of the command that runs."""
    return _COMMON_OPTIONS.get()


_GatewayOption = Annotated[
    str | None,
    typer.Option(
        "--gateway",
        envvar="QUORUMLOG_GATEWAY",
        help="URLs of gateways, separated by commas. Default: those of the cluster that `make run` runs here,"
        f" else {GATEWAY}.",
    ),
]
_JsonOption = Annotated[bool, typer.Option("--json", help="Print results and errors as JSON.")]
_TimeoutOption = Annotated[
    float,
    typer.Option(
        "--timeout",
        min=0.1,
        envvar="QUORUMLOG_TIMEOUT",
        help="How long each request is tried, with its repeats (seconds).",
    ),
]


def _unseen(context: typer.Context, token: str | None) -> str | None:
    """A token of the environment: the arguments of a process are shown to everyone on its machine."""
    source = context.get_parameter_source("token")
    if source is not None and source.name == "COMMANDLINE":
        raise typer.BadParameter("everyone sees arguments: use QUORUMLOG_TOKEN or --token-file")
    return token


_TokenOption = Annotated[
    str | None,
    typer.Option("--token", envvar="QUORUMLOG_TOKEN", hidden=True, callback=_unseen),
]
_TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        envvar="QUORUMLOG_TOKEN_FILE",
        dir_okay=False,
        exists=True,
        readable=True,
        help="File with an access token, for gateways that require one; or set QUORUMLOG_TOKEN.",
    ),
]
_CompressionOption = Annotated[
    Coding | None,
    typer.Option(
        "--compression",
        envvar="QUORUMLOG_COMPRESSION",
        help="Send and read compressed, over a slow network.",
    ),
]
_QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="Nothing on standard error but errors.")
]
_SecretOption = Annotated[
    Path | None,
    typer.Option(
        "--secret-file",
        envvar="CLUSTER_SECRET_FILE",
        help="The cluster's secret, for commands that ask the services behind the gateways.",
    ),
]
_CertificateOption = Annotated[
    Path | None,
    typer.Option(
        "--cert-file",
        envvar="TLS_CERT_FILE",
        help="An operator's certificate, for commands that ask the services behind the gateways.",
    ),
]
_KeyOption = Annotated[
    Path | None, typer.Option("--key-file", envvar="TLS_KEY_FILE", help="The key of --cert-file.")
]
_AuthorityOption = Annotated[
    Path | None,
    typer.Option(
        "--ca-file",
        envvar="TLS_CA_FILE",
        help="The authority of the certificates of these services.",
    ),
]
_DECLARED: Final = (
    ("gateway", _GatewayOption, None),
    ("as_json", _JsonOption, False),
    ("timeout", _TimeoutOption, TIMEOUT_S),
    ("quiet", _QuietOption, False),
    ("secret_file", _SecretOption, None),
    ("token", _TokenOption, None),
    ("token_file", _TokenFileOption, None),
    ("compression", _CompressionOption, None),
    ("cert_file", _CertificateOption, None),
    ("key_file", _KeyOption, None),
    ("ca_file", _AuthorityOption, None),
)
"""Name, declaration and default."""


def with_common_options(app: typer.Typer, *, is_offline: bool = False) -> typer.Typer:
    """Add the options of all commands to each command of a tree; commands that ask no server get only those
    that shape what is printed.
    """
    for command in app.registered_commands:
        assert command.callback is not None
        command.callback = _with_options(command.callback, is_offline=is_offline)
    for group in app.registered_groups:
        assert group.typer_instance is not None
        with_common_options(group.typer_instance, is_offline=is_offline)
    return app


def _with_options(command: Callable[..., Any], *, is_offline: bool) -> Callable[..., Any]:
    """A command with the common options. A command with a --timeout of its own uses that one for requests
    too; a command that asks the metadata service has no --gateway.
    """
    signature = inspect.signature(command)
    asks_metadata = "metadata" in signature.parameters
    absent = {"gateway", "token", "token_file", "compression"} if asks_metadata else set()
    if is_offline:
        absent = {name for name, _, _ in _DECLARED} - {"as_json", "quiet"}
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option)
        for name, option, default in _DECLARED
        if name not in signature.parameters.keys() | absent
    ]

    @wraps(command)
    def called(**given: Any) -> Any:
        if "gateway" in given and given["gateway"] is None:
            given["gateway"] = _local_gateways()
        options = CommonOptions(
            gateway=given.get("gateway", ""),
            as_json=given["as_json"] or common_options().as_json,
            timeout_s=given.get("timeout") or TIMEOUT_S,
            is_quiet=given["quiet"],
            compression=given.get("compression"),
            token=_token_of(given.get("token"), given.get("token_file")),
        )
        if not is_offline:
            options = _with_credentials(options, given)
        restored = _COMMON_OPTIONS.set(options)
        try:
            return command(**{name: given[name] for name in signature.parameters})
        except KeyboardInterrupt:
            raise typer.Exit(tell_interrupted(as_json=options.as_json)) from None
        finally:
            _COMMON_OPTIONS.reset(restored)

    parameters = [*signature.parameters.values(), *added]
    called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called


def begin_command(*, as_json: bool) -> None:
    """Take what stands before the command. `as_json`: as `--json` behind it."""
    _COMMON_OPTIONS.set(CommonOptions(as_json=as_json))


def _local_gateways() -> str:
    """The gateways of the cluster that `make run` runs in this folder, else the address of its first one."""
    try:
        return ",".join(LOCAL_GATEWAYS.read_text("ascii").split()) or GATEWAY
    except (OSError, UnicodeDecodeError):
        return GATEWAY


def _with_credentials(options: CommonOptions, given: Mapping[str, Any]) -> CommonOptions:
    """The options with what an operator shows. Raises: typer.BadParameter."""
    asked = given.get("metadata_urls") or given.get("gateway") or given.get("metadata", "")
    urls = asked.split(",")
    files = given["cert_file"], given["key_file"], given["ca_file"]
    try:
        return replace(
            options,
            operator_headers=operator_headers(given["secret_file"], urls),
            operator_context=operator_context(*files, urls),
        )
    except SecretUnusable as error:
        raise typer.BadParameter(f"--secret-file: {error}") from None
    except CertificateUnusable as error:
        raise typer.BadParameter(f"--cert-file: {error}") from None


def _token_of(token: str | None, file: Path | None) -> str | Callable[[], str] | None:
    """The token of a file, else that of the environment. Raises: typer.BadParameter."""
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
        """The token of the file: a JWT that ends soon is replaced there while a command runs."""
        nonlocal last
        with contextlib.suppress(OSError, UnicodeDecodeError):
            last = file.read_text("ascii").strip() or last
        return last

    return present


def run(work: Callable[[Client], Awaitable[T]]) -> T:
    """Do work with a client; an error ends the process with the error's exit status."""
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
    """Run work in an event loop; an error ends the process with the error's exit status."""
    with _retries_noticed():
        return finished(lambda: asyncio.run(work()), as_json=common_options().as_json)


def parse_urls(urls: str) -> list[str]:
    """URLs that are separated by commas. Raises: typer.BadParameter for what is none."""
    found = [url.strip() for url in urls.split(",") if url.strip()]
    for url in found:
        if not re.match(r"https?://[^/]", url):
            raise typer.BadParameter(f"{url!r} is not the URL of a server: write http://host:port")
    if not found:
        raise typer.BadParameter("the URL of a server is empty")
    return found


@contextlib.contextmanager
def _retries_noticed() -> Iterator[None]:
    """Print what the SDK tries again or waits for: each error once."""
    log = logging.getLogger("quorumlog.client")
    notices: logging.Handler = logging.NullHandler()
    if common_options().shows_notices:
        log.setLevel(logging.INFO)
        notices = _Notices()
    log.addHandler(notices)  # else Python prints warnings by itself
    try:
        yield
    finally:
        log.removeHandler(notices)


class _Notices(logging.Handler):
    """Notices of retries on standard error."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Print a notice unless it was printed before."""
        text = record.getMessage()
        detail, again, _ = text.partition("; tried again")
        if detail not in self._said:
            self._said.add(detail)
            print_error(f"{text} (--timeout)" if again else text)


@contextlib.asynccontextmanager
async def _silence_noticed(urls: Sequence[str]) -> AsyncIterator[None]:
    """While the block runs, name the gateways that take a connection and do not answer."""
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
    timeout = aiohttp.ClientTimeout(total=_MOMENT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{url.rstrip('/')}/health/live", allow_redirects=False),
        ):
            return
    except TimeoutError:
        print_error(
            f"{url} has not answered for {_MOMENT_S:.0f} s;"
            f" tried for {common_options().timeout_s:.0f} s (--timeout)"
        )
    except (aiohttp.ClientError, ValueError):
        return  # the request itself fails in the same way, and says so
