"""The common parts of all services: settings, logs, health, metrics, and an orderly shutdown.

A service's `config.py` reads the environment into a frozen subclass of ServiceSettings. Its
`app.py` builds an application; `add_shared_routes` adds the routes that all services have. Its
`__main__.py` passes the settings and the application to `run_service`.
"""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, Self

import orjson
import uvloop
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Info, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector
from pydantic import Field, SecretStr, field_validator, model_validator

from quorumlog import __version__, header
from quorumlog.errors import QuorumLogError, ShuttingDown
from quorumlog.net import audit, identity, memory, responses, trace
from quorumlog.net.bodies import RECEIVING, Receiving
from quorumlog.net.connections import HEAD_LINE_BYTES, ListenLimits
from quorumlog.net.hosts import Hosts
from quorumlog.net.listen import PortUnusable, in_words, listening, reporting
from quorumlog.net.memory import keep_freed, trim_forever
from quorumlog.net.openapi import describe, openapi_page
from quorumlog.net.operations import Operation
from quorumlog.net.settings import Settings
from quorumlog.net.timers import Tasks, restarted
from quorumlog.net.tls import CertificateEnds, PeerCertificate, Tls, TlsFiles, TlsUnusable
from quorumlog.net.trace import log_as_json
from quorumlog.wire.secret import checked_secrets, is_loopback, is_on_this_machine

log = logging.getLogger(__name__)

METRICS: Final = web.AppKey("metrics", CollectorRegistry)
"""The registry for a service's own metrics."""

DRAINING: Final = web.AppKey("draining", asyncio.Event)
"""Set once the process has been asked to end, so that it accepts no new work."""

HOSTS: Final = web.AppKey("hosts", Hosts)
"""The host names that a request to the process may use."""

VERSIONS: Final = web.AppKey("versions", dict[str, str])
"""The versions, by name, of the process's release and of the formats that it reads and writes."""

AUTHENTICATOR: Final = web.AppKey("authenticator", identity.Authenticator)
"""Identifies the callers of an internal listener; absent if any client may call."""

_OPEN: Final = frozenset(("/health/live", "/health/ready"))
"""Routes that need no credentials, because monitoring has none."""

Ready = Callable[[], Awaitable[None]]
"""A function that raises an Unavailable error, with the reason, if the service can't work."""


class _Drain(NamedTuple):
    """Functions for a drain: `settle` finishes work in flight; `waits_for` lists unfinished work."""

    settle: Callable[[], Awaitable[None]]
    waits_for: Callable[[], Sequence[str]]


_DRAIN: Final = web.AppKey("drain", _Drain)
_CERTIFICATES: Final = (
    "TLS_CERT_FILE, TLS_KEY_FILE and TLS_CA_FILE to certificates (docs/guides/certificates.md)"
)
_IN_THE_CLEAR: Final = (
    "the cluster's secret would cross the network in the clear, and could be read and used there:"
    f" set {_CERTIFICATES}, or ALLOW_PLAIN=1 if the network is private"
)
_GC_ALLOCATIONS: Final = 10_000
"""Number of allocations between two garbage collections. Python's default of 700 is too low,
because one batch of 100 entries creates several hundred objects."""


@dataclass(frozen=True, slots=True)
class Listening:
    """An application, and the address at which it listens."""

    app: web.Application
    host: str
    port: int
    limits: ListenLimits
    bound: socket.socket | None = None
    """A socket that is already bound to this host and port."""
    tls: Tls | None = None


Factory = Callable[[Any], web.Application | Awaitable[Sequence[Listening]]]
"""A function that builds a service's application, which listens at HOST and PORT, from the
settings. It may return several applications, which start in this order and end in reverse order."""


class ServiceSettings(Settings):
    """The settings that all services have; each field is the environment variable of the same name
    in capitals. Only a service's `config.py` reads the environment.
    """

    host: str = "127.0.0.1"
    """the address at which to listen; 0.0.0.0 in containers"""
    port: int = Field(ge=1, le=65535)
    """the port at which to listen; other processes are configured with it"""
    advertised_url: str = ""
    """the URL at which other processes reach this process; if empty, made from `HOST` and `PORT`"""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """the lowest level that is logged"""
    drain_s: float = Field(default=20.0, gt=0)
    """how long a shutdown waits for requests in flight"""
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description="further host names that requests may use, such as a proxy's; loopback names, IP"
        " addresses and the advertised host are always allowed; `*` allows all names, and so DNS"
        " rebinding",
    )
    cluster_secret: SecretStr | None = Field(
        default=None,
        description="the secret with which the cluster's services authenticate; with two lines,"
        " services send the secret in the first line and accept both",
    )
    tls_cert_file: Path | None = Field(
        default=None,
        description="certificate that identifies this process to the other services of its cluster"
        " (docs/guides/certificates.md); read again when it changes",
    )
    tls_key_file: Path | None = None
    """the key of the certificate"""
    tls_key_password: SecretStr | None = None
    """the password of the key, if it has one"""
    tls_ca_file: Path | None = None
    """the authorities that must have issued the certificates of the cluster's other services"""
    allow_anonymous: bool = False
    """1: other machines may reach the listeners without credentials"""
    allow_plain: bool = Field(
        default=False,
        description="1: the cluster's secret may cross a network in the clear: a private one only,"
        " such as one of containers on a single machine",
    )

    @field_validator("cluster_secret")
    @classmethod
    def _is_a_secret(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None:
            checked_secrets(secret.get_secret_value())
        return secret

    @model_validator(mode="after")
    def _asks_callers_beyond_loopback(self) -> Self:
        name, host = self._internal_host()
        if self.tls is not None or is_loopback(host):
            return self
        if self.cluster_secret is not None:
            # `allow_anonymous` is not enough: operators set it for a gateway's public listener.
            if not self.allow_plain:
                raise ValueError(f"{name}={host}: {_IN_THE_CLEAR}")
        elif not self.allow_anonymous:
            raise ValueError(
                f"{name}={host} lets other machines reach a listener for this cluster's services only:"
                f" set {_CERTIFICATES}, CLUSTER_SECRET_FILE and ALLOW_PLAIN=1 on a private network,"
                " or ALLOW_ANONYMOUS=1 where only this cluster can reach them"
            )
        return self

    @model_validator(mode="after")
    def _shows_credentials_over_tls(self) -> Self:
        urls: tuple[str, ...] = getattr(self, "metadata_urls", ())  # the metadata service has none
        for url in urls:
            if url.startswith("https://") or is_on_this_machine(url):
                continue
            if self.tls is not None:
                raise ValueError(f"METADATA_URLS={url}: must be https, since TLS_CERT_FILE is set")
            if self.cluster_secret is not None and not self.allow_plain:
                raise ValueError(f"METADATA_URLS={url}: {_IN_THE_CLEAR}")
        return self

    @model_validator(mode="after")
    def _advertises_what_it_speaks(self) -> Self:
        name, url = self._internal_advertised()
        if url and url.startswith("https://") != (self.tls is not None):
            raise ValueError(
                f"{name}={url} must begin with {'https' if self.tls else 'http'}://, "
                f"because TLS_CERT_FILE is {'set' if self.tls else 'not set'}"
            )
        return self

    def _internal_host(self) -> tuple[str, str]:
        """The name and the value of the setting that has the internal listener's host."""
        return "HOST", self.host

    def _internal_advertised(self) -> tuple[str, str]:
        """The name and the value of the setting that has the internal listener's advertised URL."""
        return "ADVERTISED_URL", self.advertised_url

    @property
    def url(self) -> str:
        """The URL at which other processes reach this process, without a trailing slash."""
        return url_of(self.advertised_url, self.host, self.port, is_tls=self.tls is not None)

    @cached_property
    def authenticator(self) -> identity.Authenticator | None:
        """Identifies the internal listener's callers, by certificate with TLS, else by secret."""
        return self.secret if self.tls is None else PeerCertificate(self.tls)

    @property
    def credentials(self) -> identity.Credentials:
        """The credentials that this process presents to other services."""
        if self.tls is not None:
            return self.tls.credentials
        return identity.ANONYMOUS if self.secret is None else self.secret.credentials

    @cached_property
    def tls(self) -> Tls | None:
        """The certificate of the internal listener, or None. Raises: TlsUnusable."""
        files = (self.tls_cert_file, self.tls_key_file, self.tls_ca_file)
        if files == (None, None, None):
            return None
        certificate, key, authority = files
        if certificate is None or key is None or authority is None:
            raise TlsUnusable(
                "TLS_CERT_FILE, TLS_KEY_FILE and TLS_CA_FILE go together: set all or none"
            )
        return Tls(TlsFiles(certificate, key, authority, self.tls_key_password))

    def certificates(self) -> dict[str, Tls]:
        """The certificates of the process by listener name."""
        return {} if self.tls is None else {"internal": self.tls}

    @cached_property
    def secret(self) -> identity.ClusterSecret | None:
        """The cluster's secret, or None if there is none."""
        if self.cluster_secret is None:
            return None
        return identity.ClusterSecret(
            self.cluster_secret.get_secret_value(), self.file_of("cluster_secret")
        )

    def listen_limits(self) -> ListenLimits:
        """The limits of the listening socket. A head line may be twice as long as a client's, since
        a gateway adds the names that a list may contain (`wire/bodies.py`, SHOWN: up to 6.7 KB).
        """
        return ListenLimits(drain_timeout_s=self.drain_s, head_line_bytes_max=2 * HEAD_LINE_BYTES)

    @property
    def hosts(self) -> Hosts:
        """The host names that requests to this process may use."""
        return Hosts(self.url, self.allowed_hosts)


def url_of(advertised: str, host: str, port: int, *, is_tls: bool) -> str:
    """The URL at which other processes reach a listener, without a trailing slash."""
    if advertised:
        return advertised.rstrip("/")
    everywhere = host in ("0.0.0.0", "::")  # noqa: S104
    scheme = "https" if is_tls else "http"
    return f"{scheme}://{socket.gethostname() if everywhere else host}:{port}"


def add_shared_routes(
    app: web.Application,
    operations: Iterable[Operation],
    *,
    title: str,
    description: str = "",
    has_tokens: bool = False,
    ready: Ready,
    drain: Callable[[], Awaitable[None]] | None = None,
    waits_for: Callable[[], Sequence[str]] = tuple,
    hosts: Hosts | None = None,
    authenticator: identity.Authenticator | None = None,
    registry: CollectorRegistry | None = None,
    formats: Mapping[str, str] = MappingProxyType({}),
    documentation: Handler | None = None,
    tags: Sequence[str] = (),
) -> None:
    """Add the routes that all services have to an application: health, metrics, OpenAPI. `title`,
    `description` and `has_tokens` are for the OpenAPI document, which is built at the first request
    for it (in 0.1 s). `drain` settles the work in flight. `drain` runs after `DRAINING` is set,
    while the service still answers; `waits_for` lists the unfinished work. `authenticator`
    identifies the callers of an internal listener. `registry`: the metrics of the process's other
    application, if any. `formats`: the versions of the formats that the process exchanges and
    stores. `documentation` replaces the page of the OpenAPI document, and `tags` orders its
    resources.
    """
    versions = app[VERSIONS] = {"version": __version__, **formats}
    operations = tuple(operations)
    registry = app[METRICS] = registry or _new_registry(versions)
    if authenticator is not None:
        app[AUTHENTICATOR] = authenticator
    app[audit.AUDITED] = {(one.method, one.path): one.name for one in operations if one.is_audited}
    app[DRAINING] = asyncio.Event()
    app[HOSTS] = hosts or Hosts()
    app[RECEIVING] = Receiving()
    if drain is not None:
        app[_DRAIN] = _Drain(drain, waits_for)

    async def health_live(_request: web.Request) -> web.Response:
        return _json({"status": "live", **versions})

    async def health_ready(_request: web.Request) -> web.Response:
        if app[DRAINING].is_set():
            why = in_words(waits_for())
            raise ShuttingDown(f"this process is shutting down{why and f', and waits for {why}'}")
        await ready()
        return _json({"status": "ready", **versions})

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    @cache
    def openapi() -> Mapping[str, Any]:
        return describe(
            operations,
            title=title,
            version=__version__,
            description=description,
            has_tokens=has_tokens,
            tags=tags,
        )

    async def openapi_json(_request: web.Request) -> web.Response:
        return _json(openapi())

    async def page(_request: web.Request) -> web.Response:
        return responses.html_response(openapi_page(openapi()))

    app.router.add_get("/health/live", health_live)
    app.router.add_get("/health/ready", health_ready)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/openapi.json", openapi_json)
    app.router.add_get("/docs", documentation or page)


def _new_registry(versions: dict[str, str]) -> CollectorRegistry:
    registry = CollectorRegistry()
    Info("quorumlog_build", "the release and its formats", registry=registry).info(versions)
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def check_caller(request: web.Request) -> None:
    """Refuse an unknown caller at an internal listener. Raises: Unauthenticated, Forbidden."""
    authenticator = request.app.get(AUTHENTICATOR)
    if authenticator is None:
        return
    # Compare the matched route, because a path can be written in many ways.
    resource = request.match_info.route.resource
    if resource is None or resource.canonical not in _OPEN:
        request[identity.CALLER] = authenticator.identify(request)


@web.middleware
async def answers_problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give each request its id, and turn errors into problem documents.

    All services use this middleware, except the gateway, which has its own.
    """
    instance = responses.request_id(request.headers.get(header.REQUEST_ID))
    request[responses.REQUEST_ID] = instance
    trace.begin(instance, request.headers.get(trace.HEADER))
    resource = request.match_info.route.resource
    audited = None if resource is None else audit.begin(request, resource.canonical)
    response: web.StreamResponse | None = None
    try:
        response = await _answered(request, handler, instance, audited)
    finally:
        if audited is not None:
            audited.end(response)
    if not response.prepared:
        response.headers[header.REQUEST_ID] = instance
    return response


async def _answered(
    request: web.Request, handler: Handler, instance: str, audited: audit.Audited | None
) -> web.StreamResponse:
    try:
        hosts = request.app[HOSTS]
        hosts.check(request)
        hosts.check_origin(request)
        check_caller(request)
        if audited is not None:
            audit.called_by(audited, request)
        return await handler(request)
    except QuorumLogError as error:
        return responses.problem_response(error, instance)
    except web.HTTPException as error:
        return responses.problem_response(
            responses.error_of_http(error, request.method, request.path), instance
        )
    except asyncio.CancelledError:
        raise
    except ConnectionError as error:
        raise responses.forgotten(error) from None
    except Exception:
        log.exception("unhandled-error", extra={"request_id": instance, "path": request.path})
        return responses.problem_response(QuorumLogError(), instance)


def run_service(name: str, factory: Factory, settings: ServiceSettings) -> None:
    """Run a service until SIGTERM or SIGINT; then drain, stop listening, clean up, and return.

    Raises: SystemExit with a status other than 0 if the service can't start.
    """
    log_as_json(name, settings.log_level)
    for doubt in settings.doubts:
        log.warning("setting-doubtful", extra={"why": doubt})
    keep_freed()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = runner.run(_serve(name, factory, settings))
    if status:
        raise SystemExit(status)


async def _serve(name: str, factory: Factory, settings: ServiceSettings) -> int:
    asked_to_end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        # Set the handlers explicitly, because children inherit an ignored SIGINT.
        loop.add_signal_handler(number, asked_to_end.set)
    try:
        async with contextlib.AsyncExitStack() as stack:
            parts = _sharing_descriptors(await _made(factory, settings))
            for part in parts:
                listener = await stack.enter_async_context(
                    listening(
                        part.app,
                        host=part.host,
                        port=part.port,
                        limits=part.limits,
                        bound=part.bound,
                        context=None if part.tls is None else part.tls.server,
                    )
                )
                if part.tls is not None:
                    part.tls.watch(listener)
            _tune_collector()
            versions = parts[0].app[VERSIONS]
            log.info("started", extra={"url": settings.url} | versions)
            tasks = Tasks()
            tasks.start(trim_forever())
            _follow_certificates(settings.certificates(), parts[0].app, tasks)
            if settings.secret is not None:
                tasks.start(restarted(settings.secret.follow))
            await asked_to_end.wait()
            await tasks.close()
            log.info("draining")
            for part in parts:
                await _drain(part.app, settings.drain_s)
    except PortUnusable as error:
        sys.stderr.write(f"{name}: {error}\n")
        return 1
    log.info("ended")
    return 0


def _follow_certificates(
    certificates: Mapping[str, Tls], app: web.Application, tasks: Tasks
) -> None:
    """Reload certificates when they change, and add a metric of their expiry."""
    if not certificates:
        return
    app[METRICS].register(CertificateEnds(certificates))
    for tls in certificates.values():
        log.info("certificate-loaded", extra=tls.described())
        tasks.start(restarted(tls.follow))


async def _made(factory: Factory, settings: ServiceSettings) -> Sequence[Listening]:
    made = factory(settings)
    if isinstance(made, web.Application):
        limits = settings.listen_limits()
        return (Listening(made, settings.host, settings.port, limits, tls=settings.tls),)
    return await made


def _sharing_descriptors(parts: Sequence[Listening]) -> Sequence[Listening]:
    """Lower the limits of connections proportionally if file descriptors are scarce."""
    wanted = sum(part.limits.connections_max for part in parts)
    allowed = memory.connections_within(memory.raise_limit(), wanted)
    return [
        replace(
            part,
            limits=replace(
                part.limits, connections_max=part.limits.connections_max * allowed // wanted
            ),
        )
        for part in parts
    ]


def _tune_collector() -> None:
    """Make the cycle collector skip the modules, which live as long as the process. Make it run
    less often, because reference counting frees the objects of requests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_ALLOCATIONS, 20, 20)


async def _drain(app: web.Application, deadline_s: float) -> None:
    if DRAINING in app:
        app[DRAINING].set()
    if _DRAIN not in app:
        return
    settle, waits_for = app[_DRAIN]
    try:
        async with reporting(waits_for), asyncio.timeout(deadline_s):
            await settle()
    except TimeoutError:
        why = in_words(waits_for())
        log.warning("drain-cut-short", extra={"deadline_s": deadline_s, "why": why})
    except Exception:
        log.exception("drain-failed")


def _json(value: object) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")
