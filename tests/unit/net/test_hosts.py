"""Which hosts and origins a process takes for its own."""

from contextlib import nullcontext

import pytest
from aiohttp import HttpVersion
from aiohttp.test_utils import make_mocked_request

from quorumlog.errors import BadRequest, Forbidden, ForeignHost
from quorumlog.net.hosts import Hosts
from quorumlog.net.service import ServiceSettings


def is_known(hosts: Hosts, host: str) -> bool:
    request = make_mocked_request("GET", "/", headers={"Host": host})
    try:
        hosts.check(request)
    except ForeignHost:
        return False
    return True


def test_the_advertised_host_and_the_settings_names_are_known() -> None:
    settings = ServiceSettings.read(
        {
            "PORT": "8080",
            "ADVERTISED_URL": "http://Gateway-1:8080",
            "ALLOWED_HOSTS": "log.example, lb",
        }
    )

    for host in ("gateway-1", "GATEWAY-1:8080", "gateway-1.:9", "log.example:443", "lb"):
        assert is_known(settings.hosts, host), host
    for host in ("gateway-2", "a.log.example", "example", "1.2.3", "0x7f.1", "[lb]", "*", "a b"):
        assert not is_known(settings.hosts, host), host


def test_a_star_lets_every_host_in() -> None:
    assert is_known(Hosts(allowed=["*"]), "evil.example")


def test_a_host_beyond_those_that_are_remembered_is_known_or_refused_all_the_same() -> None:
    hosts = Hosts()

    for port in range(1, 1200):
        assert is_known(hosts, f"127.0.0.1:{port}")
    for _ in range(2):
        assert is_known(hosts, "127.0.0.1:1")
        assert is_known(hosts, "127.0.0.1:1199")
        assert not is_known(hosts, "evil.example")


@pytest.mark.parametrize("version", [(0, 9), (2, 0), (1, 0), (1, 1)])
def test_versions_of_http_that_are_not_1_are_refused(version: tuple[int, int]) -> None:
    request = make_mocked_request("GET", "/", version=HttpVersion(*version))

    with pytest.raises(BadRequest) if version[0] != 1 else nullcontext():
        Hosts().check(request)


@pytest.mark.parametrize(
    ("origin", "is_own"),
    [
        ("http://127.0.0.1:8080", True),
        ("https://127.0.0.1:8080", False),
        ("http://127.0.0.1", False),
        ("https://log.example", True),
        ("http://log.example", False),
        ("null", False),
        ("", False),
    ],
)
def test_an_origin_is_own_by_scheme_host_and_port(origin: str, *, is_own: bool) -> None:
    """A proxy may speak TLS for the advertised URL."""
    hosts = Hosts("https://log.example")
    request = make_mocked_request("POST", "/", headers={"Host": "127.0.0.1:8080", "Origin": origin})

    if is_own:
        hosts.check_origin(request)
    else:
        with pytest.raises(Forbidden):
            hosts.check_origin(request)


@pytest.mark.parametrize(
    ("host", "is_one"),
    [
        ("[::1]", True),
        ("[::1]:8080", True),
        ("[::1", False),
        ("[::1]8080", False),
        ("[localhost]", False),
        ("one.localhost", True),
        ("localhost.evil.example", False),
        ("evillocalhost", False),
    ],
)
def test_a_host_is_read_as_a_browser_writes_it(host: str, *, is_one: bool) -> None:
    assert is_known(Hosts(), host) is is_one


PAGE = "https://page.example"


@pytest.mark.parametrize(
    ("method", "more", "allowed", "is_let_in"),
    [
        ("GET", {}, (), True),
        ("POST", {}, (), False),
        ("GET", {"Upgrade": "websocket"}, (), False),
        ("POST", {}, (PAGE,), True),
        ("POST", {}, ("*",), True),
        ("POST", {}, ("https://other.example",), False),
    ],
)
def test_a_page_changes_nothing_and_opens_no_socket_unless_it_is_allowed(
    method: str, more: dict[str, str], allowed: tuple[str, ...], *, is_let_in: bool
) -> None:
    given = {"Host": "127.0.0.1:8080", "Origin": PAGE, **more}
    request = make_mocked_request(method, "/", headers=given)

    with nullcontext() if is_let_in else pytest.raises(Forbidden):
        Hosts().check_origin(request, allowed)
