"""Checks of the headers `Host` and `Origin`, and of a body's framing.

A browser on a machine that can reach the cluster may run an attacker's page, whose host name may
resolve to the address of a service (DNS rebinding). The browser then treats the service as part of
the page's site, and `Host` contains the page's host. Without a preflight, a browser also sends some
state-changing requests to other sites: a POST without a typed body, and the handshake of a
WebSocket. Their header `Origin` is the page's origin. Programs other than browsers send no `Origin`.
"""

from collections.abc import Container, Iterable
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from aiohttp import HttpVersion10, HttpVersion11, hdrs, web

from quorumlog.errors import BadRequest, CodingUnknown, Forbidden, ForeignHost

_LOOPBACK: Final = "localhost"
_CHUNKED: Final = "chunked"
_SEEN_MAX: Final = 1000
"""Maximum number of accepted hosts to remember, since loopback has 2^24 addresses (judgement)."""
_VERSIONS: Final = (HttpVersion11, HttpVersion10)
_SAFE: Final = frozenset((hdrs.METH_GET, hdrs.METH_HEAD, hdrs.METH_OPTIONS))


class Hosts:
    """The hosts that a process accepts: loopback names, IP addresses, the advertised host, and
    configured hosts. A `Host` with an IP address is safe, since DNS rebinding requires a name.
    """

    def __init__(self, url: str = "", allowed: Iterable[str] = ()) -> None:
        """`url`: the advertised URL; `allowed`: further hosts, or `*` for all."""
        parts = urlsplit(url)
        self._origin = f"{parts.scheme}://{parts.netloc}".lower()
        names = {_plain(name) for name in allowed}
        self._allows_all = "*" in names
        self._names = {_LOOPBACK, *names, *filter(None, [parts.hostname])}
        self._seen: set[str] = set()

    def check(self, request: web.BaseRequest) -> None:
        """Refuse a request if its host is not accepted. Raises: ForeignHost, BadRequest."""
        if request.version not in _VERSIONS:
            # aiohttp's parser accepts HTTP/0.9, which has no headers, and HTTP/2.0, which it can't
            # speak.
            raise BadRequest(
                "the request's version is neither HTTP/1.1 nor HTTP/1.0: send one of them"
            )
        _check_framing(request)
        if not request.raw_path.startswith("/") and "://" in request.raw_path:
            # The host of an absolute URI replaces `Host`, and occurs in answers (RFC 9112, 3.2.2).
            self._check(request.url.host_port_subcomponent or "")
        host = request.headers.get(hdrs.HOST)
        # `Host` may be missing only in HTTP/1.0, which no browser sends.
        if host is not None:
            self._check(host)

    def _check(self, host: str) -> None:
        if host in self._seen:
            return
        if not self._allows(_name_of(host)):
            raise ForeignHost(
                f"host {host[:100]!r} is not accepted: use a loopback name, an IP"
                " address or the host of ADVERTISED_URL, or add the host to ALLOWED_HOSTS"
            )
        if len(self._seen) < _SEEN_MAX:
            self._seen.add(host)

    def knows(self, host: str | None) -> bool:
        """Whether `check` has accepted this `Host` before, so that no further check is needed."""
        return host in self._seen

    def check_origin(self, request: web.BaseRequest, allowed: Container[str] = ()) -> None:
        """Refuse a state-changing request from a disallowed origin. Raises: Forbidden."""
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None or (request.method in _SAFE and hdrs.UPGRADE not in request.headers):
            return
        own = (f"{request.scheme}://{request.headers.get(hdrs.HOST)}", self._origin)
        if origin not in own and "*" not in allowed and origin not in allowed:
            raise Forbidden(
                f"the web page's origin {origin[:100]!r} is not allowed: add it to CORS_ORIGINS"
            )

    def _allows(self, name: str) -> bool:
        if self._allows_all or name in self._names or name.endswith("." + _LOOPBACK):
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return True


def _check_framing(request: web.BaseRequest) -> None:
    """Refuse a body whose end is ambiguous for other servers, and close the connection."""
    headers = request.headers
    coding = ",".join(headers.getall(hdrs.TRANSFER_ENCODING, (_CHUNKED,)))
    if coding.strip().lower() != _CHUNKED:
        request.protocol.close()
        raise CodingUnknown(
            f"Transfer-Encoding {coding[:100]!r} is not supported: use chunked, with any compression in Content-Encoding"
        )
    length = headers.get(hdrs.CONTENT_LENGTH, "0")
    if length != "0" and length[:1] in ("0", ""):
        request.protocol.close()
        raise BadRequest("Content-Length must be a decimal number without leading zeros")


def _name_of(host: str) -> str:
    """The name or the address in a `Host`, without the port; "" if `Host` is malformed."""
    if host.startswith("["):
        address, bracket, port = host[1:].partition("]")
        return address if bracket and ":" in address and (not port or port[0] == ":") else ""
    return _plain(host.partition(":")[0])


def _plain(name: str) -> str:
    return name.strip().lower().removesuffix(".")
