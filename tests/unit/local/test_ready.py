"""The health check of containers: exit status 0 if the process can do its work."""

import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from quorumlog.certificates import create_authority, issue, key_file
from services.local.config import ROOT


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
