"""What all services share, in a process of its own."""

import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from loadtest.ports import free_ports
from quorumlog import __version__
from quorumlog.certificates import create_authority, issue, key_file
from quorumlog.net.service import ServiceSettings
from services.gateway.config import GatewaySettings
from services.local.config import ROOT
from tests.support.waiting import until_sync

_SERVICE = """
import asyncio, os, pathlib, resource, signal, sys
from aiohttp import web
from quorumlog.net.service import *
from quorumlog.errors import NotEnoughBookies
signal.signal(signal.SIGINT, signal.SIG_IGN)
if files := os.environ.get("FILES"):
    resource.setrlimit(resource.RLIMIT_NOFILE, tuple(map(int, files.split(","))))

def build(settings):
    app = web.Application(middlewares=[answers_problems])
    async def ready():
        if settings.log_level == "DEBUG":
            raise NotEnoughBookies("there are none")
    async def drain():
        print("drained", flush=True)
    async def broken(request):
        return 1 / 0
    async def slow(request):
        await asyncio.to_thread(pathlib.Path(os.environ["GO"]).read_text)
        return web.Response(text="done")
    app.router.add_get("/broken", broken)
    app.router.add_get("/slow", slow)
    operation = Operation("GET /broken", "broken", "Toy", "breaks <always>")
    add_shared_routes(app, [operation], title="toy", ready=ready, drain=drain)
    return app

run_service("toy", build, ServiceSettings.read(os.environ))
"""


@contextmanager
def toy(**settings: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    port = free_ports(1)[0]
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVICE],
        env={**os.environ, "PORT": str(port), **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    url = f"http://127.0.0.1:{port}"

    def lives() -> bool:
        assert process.poll() is None, process.communicate()
        return get(f"{url}/health/live")[0] == 200

    try:
        until_sync(lives, "it lives", passing=(OSError,))
        yield process, url
    finally:
        process.kill()
        process.communicate()


def get(url: str, headers: dict[str, str] | None = None) -> tuple[int, Any, bytes]:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers or {}), timeout=20
        ) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly_though_the_parent_ignored_it(number: signal.Signals) -> None:
    with toy() as (process, _url):
        process.send_signal(number)
        out, err = process.communicate(timeout=60)

    assert process.returncode == 0
    assert out == "drained\n"
    assert [orjson.loads(line)["event"] for line in err.splitlines()] == [
        "started",
        "draining",
        "ended",
    ]


def test_it_tells_of_itself() -> None:
    with toy() as (_process, url):
        answers = {path: get(url + path) for path in ("/health/ready", "/openapi.json", "/docs")}
        metrics = get(f"{url}/metrics")

    assert {status for status, _, _ in answers.values()} == {200}
    assert orjson.loads(answers["/openapi.json"][2])["info"]["title"] == "toy"
    assert b"breaks &lt;always&gt;" in answers["/docs"][2]
    assert metrics[1]["Content-Type"].startswith("text/plain")
    assert b"process_resident_memory_bytes" in metrics[2]
    assert orjson.loads(answers["/health/ready"][2]) == {"status": "ready", "version": __version__}
    assert f'quorumlog_build_info{{version="{__version__}"}} 1.0'.encode() in metrics[2]


def test_not_ready_is_a_problem_that_says_why() -> None:
    with toy(LOG_LEVEL="DEBUG") as (_process, url):
        status, headers, body = get(f"{url}/health/ready", {"X-Request-Id": "mine-1"})

    assert status == 503
    assert headers["Retry-After"]
    assert headers["X-Request-Id"] == "mine-1"
    assert orjson.loads(body)["code"] == "not-enough-bookies"


def test_a_bug_is_a_problem_without_its_traceback() -> None:
    with toy() as (_process, url):
        broken, missing = get(f"{url}/broken"), get(f"{url}/nothing")

    assert (broken[0], orjson.loads(broken[2])["code"]) == (500, "internal-error")
    assert b"ZeroDivision" not in broken[2]
    assert (missing[0], orjson.loads(missing[2])["code"]) == (404, "not-found")


def test_a_taken_port_is_named() -> None:
    port = free_ports(1)[0]
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", port))
        holder.listen()

        done = subprocess.run(
            [sys.executable, "-c", _SERVICE],
            env={**os.environ, "PORT": str(port)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    assert done.returncode == 1
    assert done.stderr == f"toy: port {port} of 127.0.0.1 is in use: choose another port\n"


def test_a_process_that_waits_at_its_end_says_for_which_request(tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    with toy(GO=str(go)) as (process, url):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as client:
            client.sendall(b"GET /slow HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            # Nobody writes to a pipe that nobody reads: the request has come.
            pipe = until_sync(
                lambda: os.open(go, os.O_WRONLY | os.O_NONBLOCK), "/slow reads", passing=(OSError,)
            )
            process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            reported = next(line for line in process.stderr if "drain-waits" in line)
            os.close(pipe)
            answered = client.makefile("rb").read()
        assert process.wait(60) == 0

    assert orjson.loads(reported)["why"] == "the answer to GET /slow"
    assert answered.endswith(b"done")


def test_a_wrong_setting_is_one_sentence_that_names_it() -> None:
    class Settings(ServiceSettings):
        metadata_urls: tuple[str, ...] = ()

    with pytest.raises(SystemExit, match="PORT = '0': must be a whole number from 1 to 65535"):
        Settings.read({"PORT": "0"})
    with pytest.raises(SystemExit, match="PORT is not set"):
        Settings.read({"PORT": ""})
    read = Settings.read({"PORT": "80", "METADATA_URLS": "http://a, http://b"})
    assert read.metadata_urls == ("http://a", "http://b")
    assert read.url == "http://127.0.0.1:80"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "bookie-1"])
def test_a_listener_that_other_machines_reach_needs_credentials(host: str) -> None:
    for_strangers = {"PORT": "80", "HOST": host, "POSTGRES_DSN": "postgresql://user:password@host"}

    with pytest.raises(SystemExit) as refused:
        ServiceSettings.read(for_strangers)

    said = str(refused.value)
    assert said.startswith(f"HOST={host} lets other machines reach")
    assert "set TLS_CERT_FILE" in said
    assert "ALLOW_ANONYMOUS=1" in said
    assert "password" not in said
    assert ServiceSettings.read(for_strangers | {"ALLOW_ANONYMOUS": "1"}).host == host
    for mine in ("127.0.0.1", "127.0.0.2", "::1", "localhost"):
        assert ServiceSettings.read(for_strangers | {"HOST": mine}).authenticator is None


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef" * 2)
    return file


@pytest.mark.parametrize("beside", [{}, {"ALLOW_ANONYMOUS": "1"}])
def test_the_secret_crosses_no_network_unless_allowed(secret: Path, beside: dict[str, str]) -> None:
    shared = {"PORT": "80", "CLUSTER_SECRET_FILE": str(secret), **beside}
    asking = shared | {"METADATA_URLS": "http://metadata"}
    public = asking | {"HOST": "0.0.0.0", "REQUIRE_TOKENS": "1"}

    for read, settings, begin in (
        (
            ServiceSettings.read,
            shared | {"HOST": "10.1.2.3"},
            "HOST=10.1.2.3: the cluster's secret",
        ),
        (GatewaySettings.read, asking, "METADATA_URLS=http://metadata: the cluster's secret"),
        (
            GatewaySettings.read,
            public | {"INTERNAL_HOST": "0.0.0.0"},
            "INTERNAL_HOST=0.0.0.0: the cluster's secret",
        ),
    ):
        with pytest.raises(SystemExit) as refused:
            read(settings)
        assert str(refused.value).startswith(begin)
        assert "set TLS_CERT_FILE, TLS_KEY_FILE and TLS_CA_FILE" in str(refused.value)
        assert "ALLOW_PLAIN=1" in str(refused.value)
        assert read(settings | {"ALLOW_PLAIN": "1"}).allow_plain
    local = asking | {"METADATA_URLS": "http://127.0.0.1:8082, https://metadata"}
    assert not GatewaySettings.read(local).allow_plain


def test_a_service_with_a_certificate_asks_others_over_tls_only(tmp_path: Path) -> None:
    authority = create_authority(tmp_path, "tests")
    file = issue(tmp_path, "gateway", "gateway-1", ["store.example"])
    settings = {
        "PORT": "80",
        "INTERNAL_HOST": "0.0.0.0",
        "TLS_CERT_FILE": str(file),
        "TLS_KEY_FILE": str(key_file(file)),
        "TLS_CA_FILE": str(authority),
    }

    with pytest.raises(SystemExit, match=r"^METADATA_URLS=http://m: must be https"):
        GatewaySettings.read(settings | {"METADATA_URLS": "https://m,http://m"})
    assert GatewaySettings.read(settings | {"METADATA_URLS": "https://m"}).tls is not None


def test_a_gateway_that_other_machines_reach_needs_tokens() -> None:
    public = {"PORT": "80", "HOST": "0.0.0.0", "METADATA_URLS": "http://metadata"}

    with pytest.raises(SystemExit) as refused:
        GatewaySettings.read(public)

    said = str(refused.value)
    assert said.startswith(
        "HOST=0.0.0.0 allows every client on the network to read and change all data"
    )
    assert "set REQUIRE_TOKENS=1" in said
    assert "ALLOW_ANONYMOUS=1" in said
    for meant in ("REQUIRE_TOKENS", "ALLOW_ANONYMOUS"):
        assert GatewaySettings.read({**public, meant: "1"}).host == "0.0.0.0"
    assert not GatewaySettings.read({**public, "HOST": "localhost"}).require_tokens


def test_a_gateway_may_listen_for_clients_and_not_for_services_of_other_machines() -> None:
    public = {
        "PORT": "80",
        "HOST": "0.0.0.0",
        "METADATA_URLS": "http://metadata",
        "REQUIRE_TOKENS": "1",
    }

    assert GatewaySettings.read(public).internal_host == "127.0.0.1"
    with pytest.raises(SystemExit, match=r"^INTERNAL_HOST=0\.0\.0\.0 lets other machines reach"):
        GatewaySettings.read(public | {"INTERNAL_HOST": "0.0.0.0"})


def test_a_secret_that_can_not_be_used_ends_the_start_with_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("hunter2")
    settings = {"PORT": "80", "CLUSTER_SECRET_FILE": str(file)}

    with pytest.raises(
        SystemExit, match=r"CLUSTER_SECRET_FILE = .*: a secret must be one line"
    ) as reported:
        ServiceSettings.read(settings)
    assert "hunter2" not in str(reported.value)
    with pytest.raises(SystemExit, match=r"CLUSTER_SECRET_FILE = .*: No such file"):
        ServiceSettings.read(settings | {"CLUSTER_SECRET_FILE": str(tmp_path / "none")})


def test_the_port_of_the_internal_listener_is_named_where_it_is_taken() -> None:
    public, internal = free_ports(2)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", internal))
        holder.listen()

        done = subprocess.run(
            [sys.executable, "-m", "services.gateway"],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join((str(ROOT / "shared"), str(ROOT))),
                "PORT": str(public),
                "INTERNAL_PORT": str(internal),
                "METADATA_URLS": "http://127.0.0.1:9",
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        f"gateway: port {internal} of 127.0.0.1 is in use"
    )


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    with toy(FILES="128,300") as (process, _url):
        limits = Path(f"/proc/{process.pid}/limits").read_text()

    line = next(line for line in limits.splitlines() if line.startswith("Max open files"))
    assert line.split()[3:5] == ["300", "300"]


def test_clients_are_refused_before_they_take_the_last_descriptors() -> None:
    with toy(FILES="64,100") as (process, url), ExitStack() as stack:
        port = int(url.rpartition(":")[2])

        def status() -> bytes:
            peer = socket.create_connection(("127.0.0.1", port), timeout=60)
            stack.enter_context(peer).sendall(
                b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
            )
            return peer.recv(12)

        reported = [status() for _ in range(200)]
        files = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
        stack.close()
        until_sync(lambda: get(f"{url}/health/live")[0] == 200, "it recovers", passing=(OSError,))
        process.terminate()
        _, err = process.communicate(timeout=60)

    assert reported == sorted(reported), "the first ones are served, all others told"
    assert set(reported) == {b"HTTP/1.1 200", b"HTTP/1.1 429"}
    assert files < 100, "it can open its own files"
    said = [orjson.loads(line) for line in err.splitlines()]
    few = next(line for line in said if line["event"] == "few-descriptors")
    assert (few["descriptors"], few["connections_max"]) == (100, 50)
    assert "connections-refused" in [line["event"] for line in said]
