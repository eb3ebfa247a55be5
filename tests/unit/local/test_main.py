"""The one-machine cluster: its start, its errors, and when its processes are ready."""

import fcntl
import os
import socket
import ssl
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Final

import pytest

from loadtest.ports import free_ports
from quorumlog.certificates import create_authority, issue, key_file
from services.local.config import ROOT

PATH: Final = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
"""In which `python` is this Python, as in the image."""


def run(data: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.local"],
        env={**os.environ, "DATA": str(data), **settings},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_taken_port_is_an_error_that_names_it(tmp_path: Path) -> None:
    first, second = free_ports(2)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", second))
        holder.listen()

        done = run(tmp_path, PORT=str(first))

    assert done.returncode == 1
    assert done.stdout.startswith(f"quorumlog can't run: port {second} is in use")


def test_two_clusters_never_share_a_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lock = os.open(tmp_path / "run" / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)

    done = run(tmp_path, PORT=str(free_ports(2)[0]))
    os.close(lock)

    assert done.returncode == 1
    assert "another cluster uses" in done.stdout


def test_a_start_says_what_it_starts_where_and_what_is_wrong(tmp_path: Path) -> None:
    """A misspelt setting, an address to listen at, and bookies without room, which are not waited for."""
    port, exabyte = free_ports(1)[0], 1 << 60
    process = subprocess.Popen(
        [sys.executable, "-m", "services.local", "--bookies", "3", "--gateways", "1"],
        env={**os.environ, "DATA": str(tmp_path), "PORT": str(port), "LISTEN": "127.0.0.3"}
        | {"PROT": "1", "READ_ONLY_BELOW_BYTES": str(exabyte)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        lines = list(iter(process.stdout.readline, "Ctrl-C ends all of it\n"))
        with urllib.request.urlopen(f"http://127.0.0.3:{port}/v1/logs", timeout=60) as answer:
            assert answer.status == 200
    finally:
        process.terminate()
        process.communicate(timeout=120)

    bookies = ("bookie-1", "bookie-2", "bookie-3")
    started = ("postgres", "redis", "metadata-1", *bookies, "gateway-1", "autorecovery-1")
    starts = [line for line in lines if line.startswith("starting ")]
    misspelt, room, ready, *_ = (line for line in lines if line not in starts)
    assert misspelt == "PROT is not a setting: did you mean PORT?\n"
    assert starts == [f"starting {name}\n" for name in started]
    assert room.startswith(f"3 of 3 bookies accept no entries: {tmp_path} has ")
    assert f"READ_ONLY_BELOW_BYTES={exabyte}" in room
    assert ready.startswith("quorumlog is ready after ")
    assert f"API reference: http://127.0.0.3:{port}/docs\n" in lines


def test_a_wrong_setting_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, BOOKIES="many")

    assert done.returncode == 2
    assert done.stderr == "BOOKIES = 'many': must be a whole number from 1 to 64\n"


def test_gateways_that_others_could_reach_need_a_decision_about_tokens(tmp_path: Path) -> None:
    port = str(free_ports(1)[0])

    done = run(tmp_path, LISTEN="0.0.0.0", PORT=port, BOOKIES="1", GATEWAYS="1")

    assert done.returncode == 1
    assert "REQUIRE_TOKENS=1" in done.stdout
    assert "ALLOW_ANONYMOUS=1" in done.stdout


def test_the_image_s_serve_listens_on_all_addresses_and_ends_in_order(tmp_path: Path) -> None:
    """The container's entry point, on this machine."""
    process = subprocess.Popen(
        [ROOT / "deploy" / "entrypoint", "serve", "--bookies", "3", "--gateways", "1"],
        env={
            **os.environ,
            "PATH": PATH,
            "DATA": str(tmp_path / "data"),
            "PORT": str(port := free_ports(1)[0]),
        },
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        lines = list(iter(process.stdout.readline, "Ctrl-C ends all of it\n"))
        with urllib.request.urlopen(f"http://127.0.0.2:{port}/v1/logs", timeout=60) as answer:
            assert answer.status == 200
    finally:
        process.terminate()
        said, _ = process.communicate(timeout=120)

    assert process.returncode == 0, [*lines, said]
    assert "ended; the data stays in" in said


def test_the_image_runs_modules_and_commands() -> None:
    def entered(*words: str) -> str:
        return subprocess.run(
            [ROOT / "deploy" / "entrypoint", *words],
            env={**os.environ, "PATH": PATH},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert entered("--version").startswith("quorumlog ")
    assert "quorumlog log append" in entered("log", "append", "--help")
    assert "usage: quorumlog serve" in entered("services.local", "--help")


@pytest.mark.parametrize("settings", [{"PORT": "65535", "GATEWAYS": "2"}, {"PORT": "0"}])
def test_impossible_ports_are_a_wrong_setting(tmp_path: Path, settings: dict[str, str]) -> None:
    done = run(tmp_path, **settings)

    assert done.returncode == 2
    assert "65535" in done.stderr or "PORT" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_can_not_be_made_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "data").touch()

    done = run(tmp_path / "data", PORT=str(free_ports(2)[0]))

    assert done.returncode == 1
    assert done.stdout.startswith("quorumlog can't run: ")
    assert str(tmp_path / "data") in done.stdout
    assert "Traceback" not in done.stderr


@contextmanager
def answers(status: int, context: ssl.SSLContext | None = None) -> Iterator[int]:
    """A process that answers with a status; its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health/ready" else 404)
            self.end_headers()
            self.wfile.write(b"no bookies")

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def asked(url: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.local.ready", url],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_process_that_can_work_is_ready_and_another_one_says_why_not() -> None:
    with answers(200) as port:
        assert asked(f"http://localhost:{port}").returncode == 0
    with answers(503) as port:
        refused = asked(f"http://localhost:{port}")
    assert (refused.returncode, refused.stderr.strip()) == (1, "503: no bookies")
    assert asked(f"http://localhost:{port}").returncode == 1


def test_a_process_shows_its_own_certificate_to_its_listener(tmp_path: Path) -> None:
    create_authority(tmp_path, "demo")
    certificate = issue(tmp_path, "bookie", "bookie-1", ["localhost"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key_file(certificate))
    context.load_verify_locations(tmp_path / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED

    with answers(200, context) as port:
        done = asked(
            f"https://localhost:{port}",
            TLS_CERT_FILE=str(certificate),
            TLS_KEY_FILE=str(key_file(certificate)),
            TLS_CA_FILE=str(tmp_path / "ca.pem"),
        )

    assert (done.returncode, done.stderr) == (0, "")
