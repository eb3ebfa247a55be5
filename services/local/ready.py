"""Health check of containers. `python -m services.local.ready URL` exits with 0 if URL is ready.

For an https URL, the check presents the process's own certificate, which its listener accepts. The
check runs every few seconds, so it uses http.client, which imports twice as fast as urllib.
"""

import os
import ssl
import sys
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Final
from urllib.parse import urlsplit

_TIMEOUT_S: Final = 4.0


def why_not_ready(url: str) -> str:
    """Returns the reason why the process at a URL is not ready; empty if it is ready."""
    try:
        connection = _connection(url)
        connection.request("GET", "/health/ready")
        answer = connection.getresponse()
        return "" if answer.status == 200 else f"{answer.status}: {answer.read().decode()}"
    except (OSError, HTTPException) as error:
        return f"{url}: {error}"


def _connection(url: str) -> HTTPConnection:
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme == "http":
        return HTTPConnection(host, parts.port, timeout=_TIMEOUT_S)
    context = ssl.create_default_context(cafile=os.environ["TLS_CA_FILE"])
    context.load_cert_chain(os.environ["TLS_CERT_FILE"], os.environ["TLS_KEY_FILE"])
    return HTTPSConnection(host, parts.port, timeout=_TIMEOUT_S, context=context)


if __name__ == "__main__":
    sys.exit(why_not_ready(sys.argv[1]) or 0)
