"""Which role may call which route: every cell of the tables of docs/reference/security.md, asked of the services' own applications over mutual TLS."""

import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from pydantic import SecretStr

from loadtest.ports import free_ports
from quorumlog.certificates import create_authority, issue, key_file
from quorumlog.errors import Forbidden, NotAcceptable
from quorumlog.net import parameters
from quorumlog.net.identity import CALLER, Identity, Role, check_name, check_url
from quorumlog.net.listen import listening
from quorumlog.net.operations import Operation, Route, Routes
from quorumlog.net.parameters import Given
from quorumlog.net.service import Listening, ServiceSettings
from quorumlog.net.tls import Tls, TlsFiles
from services.autorecovery.app import build as build_autorecovery
from services.autorecovery.config import Config as AutorecoveryConfig
from services.bookie.app import build as build_bookie
from services.bookie.config import Config as BookieConfig
from services.gateway.app import create_apps
from services.gateway.config import GatewaySettings
from services.metadata.app import build as build_metadata
from services.metadata.config import Config as MetadataConfig
from tests.support.roles import PAGE, TABLES, with_tables

pytestmark = pytest.mark.asyncio(loop_scope="module")

NOWHERE: Final = "127.0.0.1:1"
HOSTS: Final = ("127.0.0.1", "store.example", "*.wild.example")
SHARED: Final = {"/health/live", "/health/ready", "/metrics", "/docs", "/openapi.json"}
REACHED: Final = "this is behind the check"


class Authority:
    """A cluster's certificates."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, create_authority(folder, "tests")

    def certificate(self, role: str, name: str) -> Path:
        return issue(self._folder, role, name, HOSTS, replaces=True)

    def settings(self, role: str) -> dict[str, Any]:
        file = self.certificate(role, f"{role}-1")
        given = {"tls_cert_file": file, "tls_key_file": key_file(file), "tls_ca_file": self._file}
        return {"port": free_ports(1)[0], **given}

    def session(self, role: str, name: str = "") -> aiohttp.ClientSession:
        file = self.certificate(role, name or f"{role}-1")
        shown = Tls(TlsFiles(file, key_file(file), self._file))
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=shown.client))


@dataclass(frozen=True)
class Services:
    """The internal applications of one service of each kind, and where they listen. Nothing is behind them."""

    apps: dict[str, web.Application]
    urls: dict[str, str]
    authority: Authority


async def parts_of(kind: str, authority: Authority, folder: Path) -> Listening:
    """The internal application of a service, and where it listens."""
    given, urls = authority.settings(kind), (f"https://{NOWHERE}",)
    settings: ServiceSettings
    match kind:
        case "gateway":
            settings = GatewaySettings(metadata_urls=urls, **given)
            return (await create_apps(settings))[0]
        case "bookie":
            settings = BookieConfig(
                bookie_name="bookie-1", data_dir=folder, metadata_urls=urls, **given
            )
            app = build_bookie(settings)
        case "metadata":
            settings = MetadataConfig(
                postgres_dsn=SecretStr(f"postgresql://{NOWHERE}/none"),
                redis_url=SecretStr(f"redis://{NOWHERE}"),
                database_deadline_s=0.1,
                allowed_bookies=("bookie-*",),
                **given,
            )
            app = build_metadata(settings)
        case _:
            settings = AutorecoveryConfig(metadata_urls=urls, **given)
            app = build_autorecovery(settings)
    return Listening(app, settings.host, settings.port, settings.listen_limits(), tls=settings.tls)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    folder = tmp_path_factory.mktemp("roles")
    found = Services({}, {}, Authority(folder / "certificates"))
    async with contextlib.AsyncExitStack() as stack:
        for kind in TABLES:
            part = await parts_of(kind, found.authority, folder / kind)
            assert part.tls is not None
            await stack.enter_async_context(
                listening(
                    part.app,
                    host=part.host,
                    port=part.port,
                    bound=part.bound,
                    context=part.tls.server,
                )
            )
            found.apps[kind] = part.app
            found.urls[kind] = f"https://127.0.0.1:{part.port}"
        yield found


@pytest.fixture
def _reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allowed ends behind the check: nothing of it is done."""

    def reached(*_given: object, **_options: object) -> None:
        raise NotAcceptable(REACHED)

    monkeypatch.setattr(parameters, "read", reached)


def routes_of(app: web.Application) -> Iterator[tuple[str, str]]:
    for route in app.router.routes():
        assert route.resource is not None
        if route.resource.canonical not in SHARED:
            yield route.method, route.resource.canonical


async def problem_of(answer: aiohttp.ClientResponse) -> tuple[int, str, str]:
    reported = await answer.json(content_type=None)
    return answer.status, reported["code"], reported["detail"]


@pytest.mark.usefixtures("_reached")
async def test_each_role_may_call_what_its_row_says_and_nothing_else(services: Services) -> None:
    differing, cells = [], 0

    for role in Role:
        async with services.authority.session(role) as session:
            for kind, table in TABLES.items():
                for method, path in routes_of(services.apps[kind]):
                    url = services.urls[kind] + path.replace("{", "").replace("}", "")
                    url = url.replace("ledger_id", "1").replace("/id/", "/1/")
                    async with session.request(method, url) as answer:
                        status, code, detail = await problem_of(answer)
                    cells += 1
                    is_allowed = (status, detail) == (406, REACHED)
                    is_refused = (status, code) == (403, "forbidden")
                    assert is_allowed != is_refused, (role, method, url, status, detail)
                    if is_allowed != (role in table[f"{method} {path}"]):
                        differing.append((role, method, path))

    assert differing == []
    assert cells == len(Role) * sum(map(len, TABLES.values()))


async def test_each_role_may_read_metrics_and_strangers_may_not(services: Services) -> None:
    for role in Role:
        async with (
            services.authority.session(role) as session,
            session.get(f"{services.urls['bookie']}/metrics") as answer,
        ):
            assert answer.status == 200
    async with aiohttp.ClientSession() as stranger:
        for url in services.urls.values():
            with pytest.raises((aiohttp.ClientError, OSError)):
                await stranger.get(f"{url}/health/live", ssl=False)


async def test_a_service_serves_the_declared_routes_alone(services: Services) -> None:
    for kind, table in TABLES.items():
        found = [f"{method} {path}" for method, path in routes_of(services.apps[kind])]

        assert sorted(found) == sorted(table), kind


async def _new(_request: web.Request, _given: Given) -> web.Response:
    """New."""
    return web.Response()


async def test_a_route_without_a_declaration_of_its_roles_is_an_error_at_the_start() -> None:
    with pytest.raises(ValueError, match=r"GET /v1/new: `roles` must name"):
        Routes().add("GET /v1/new", roles=frozenset())
    with pytest.raises(TypeError, match="roles"):
        Routes().add("GET /v1/new")(_new)  # type: ignore[call-arg]


async def test_no_role_may_call_an_operation_that_declares_none() -> None:
    route = Route(Operation("GET /v1/new", "new", "New", "New"), _new)

    for role in Role:
        request = make_mocked_request("GET", "/v1/new")
        request[CALLER] = Identity(role, "somebody")
        with pytest.raises(
            Forbidden, match=f"the {role} somebody is not allowed to call this operation"
        ):
            await route.handle(request)


async def test_the_page_has_the_tables_of_the_services() -> None:
    page = PAGE.read_text(encoding="utf-8")

    assert with_tables(page) == page, "run `make docs`"
    assert all(f"`{route}`" in page for table in TABLES.values() for route in table)


def requests_of(name: str, url: str) -> Iterator[tuple[str, str, Any]]:
    """What a bookie of that name says of itself to the metadata service."""
    attempt = str(uuid.uuid4())
    cookie = {"incarnation": 1, "cluster_id": "c", "instance": "i", "url": url}
    bookie = f"/v1/bookies/{name}"
    yield "PUT", f"{bookie}/cookie", {"cookie": cookie, "attempt": attempt}
    yield "PUT", f"{bookie}/heartbeat", {"incarnation": 1, "url": url}
    yield "PUT", f"/v1/services/bookie/{name}/heartbeat", {"url": url}


def requests_about(name: str) -> Iterator[tuple[str, str, Any]]:
    attempt = str(uuid.uuid4())
    yield "PUT", f"/v1/bookies/{name}/log-end", {"process": "p", "log_end": 1}
    yield "POST", "/v1/witnesses/copies", {"witnesses": [f"{attempt}.00000000"], "holder": name}
    asked = [{"ledger_id": 1, "attempts": [attempt]}]
    yield "POST", "/v1/ledger-proofs", {"ledgers": asked, "holder": name}
    item = {"ledger_id": 1, "member": f"{name}@1", "ranges": [[0, 0]]}
    yield "POST", "/v1/repairs", {"items": [item]}


async def test_a_bookie_speaks_for_itself_and_at_its_own_hosts_only(services: Services) -> None:
    mine, base = "https://store.example:3181", services.urls["metadata"]
    refused = [
        *requests_of("bookie-2", mine),
        *requests_about("bookie-2"),
        *requests_of("bookie-1", "https://elsewhere.example:3181"),
        *requests_of("bookie-1", "https://a.b.wild.example"),
        *requests_of("bookie-1", "https://.wild.example"),
        # In the clear anybody on the way could answer.
        *requests_of("bookie-1", "http://store.example:3181"),
        ("PUT", "/v1/services/gateway/bookie-1/heartbeat", {"url": mine}),
    ]
    taken = [
        *requests_of("bookie-1", mine),
        *requests_of("bookie-1", "https://one.wild.example"),
        *requests_about("bookie-1"),
    ]

    async with services.authority.session("bookie", "bookie-1") as session:
        for method, path, body in refused:
            async with session.request(method, base + path, json=body) as answer:
                assert (await problem_of(answer))[:2] == (403, "caller-refused"), path
        for method, path, body in taken:
            async with session.request(method, base + path, json=body) as answer:
                # The database is away; a heartbeat is taken all the same.
                assert answer.status in {200, 503}, (path, await answer.text())


async def test_an_operator_writes_any_cookie_without_a_url(services: Services) -> None:
    """The role's row allows it; the database is away."""
    asked = {"operator": "https://elsewhere.example", "bookie": ""}

    for role, url in asked.items():
        [(method, path, body), *_] = requests_of("bookie-1", url)
        async with (
            services.authority.session(role, "bookie-1" if role == "bookie" else "anna") as session,
            session.request(method, services.urls["metadata"] + path, json=body) as answer,
        ):
            assert answer.status == 503, await answer.text()


async def test_nothing_is_proven_of_a_caller_without_a_certificate() -> None:
    """The cluster's secret stands for every name and every URL."""
    request = make_mocked_request("PUT", "/")

    check_url(request, "http://anywhere.example")
    check_name(request, "bookie-1")


async def test_only_bookies_of_the_list_join(services: Services) -> None:
    mine = "https://store.example:3181"
    async with services.authority.session("bookie", "store-1") as session:
        [(method, path, body), *_] = requests_of("store-1", mine)
        async with session.request(method, services.urls["metadata"] + path, json=body) as answer:
            status, code, detail = await problem_of(answer)

    assert (status, code) == (403, "caller-refused")
    assert "ALLOWED_BOOKIES" in detail
