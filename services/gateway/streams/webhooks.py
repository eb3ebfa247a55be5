"""Checks the URLs of webhooks, and signs and sends their wakes (sections 7.1 and 12.8 to 12.10).

A client chooses a webhook's URL, so the gateway must not give the client access to the cluster's
network. A URL is checked when a subscription is created and before each delivery. A host's name is
resolved once for each connection, which goes to one of the checked addresses.
"""

import asyncio
import base64
import hashlib
import hmac
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any, Final

import aiohttp
import orjson
from aiohttp.abc import AbstractResolver, ResolveResult
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from yarl import URL

from quorumlog.errors import WakeTokenInvalid, WebhookUrlRejected
from quorumlog.net.timers import wall_s
from services.gateway.logs.subscriptions import (
    DELIVERIES_MAX,
    SLOW_DELIVERIES_MAX,
    DeliveryFailed,
)

URL_CHARS_MAX: Final = 2048
ANSWER_BYTES_MAX: Final = 64 << 10
"""Maximum length of a webhook's response. `done` in a longer response is ignored. By judgement."""
DELIVERY_S: Final = 10.0
"""The timeout of one delivery. Chosen by judgement."""
RESOLVERS_MAX: Final = 16
"""Threads that resolve names, so that the event loop does not wait. Chosen by judgement."""
SLOW_RESOLVERS_MAX: Final = 4
"""Threads for names whose last lookup was slow. `getaddrinfo` can't be interrupted, so slow names
could otherwise block all threads. Chosen by judgement.
"""
SLOW_HOSTS_MAX: Final = 10_000
"""Maximum names remembered as slow; when full, all are forgotten. Chosen by judgement."""
_SLOW_S: Final = 2.0
"""A lookup that takes longer counts as slow. Chosen by judgement."""
_UID_CHARS: Final = 16
_NAT64: Final = IPv6Network("64:ff9b::/96")

Address = IPv4Address | IPv6Address
Networks = Sequence[IPv4Network | IPv6Network]


def is_allowed(address: Address, networks: Networks, *, is_public: bool) -> bool:
    """Whether a delivery may go to an address. Addresses of `networks` are allowed, and if
    `is_public` also public addresses. An IPv6 address is judged by the IPv4 address that it embeds.
    """
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _NAT64:
            inner = IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_allowed(inner, networks, is_public=is_public)
    if any(address in network for network in networks):
        return True
    is_special = address.is_multicast or address.is_reserved or not address.is_global
    is_site_local = isinstance(address, IPv6Address) and address.is_site_local
    return is_public and not is_special and not is_site_local


def check_url(text: str, networks: Networks) -> URL:
    """Parse a webhook's URL and check its scheme and host. Raises: WebhookUrlRejected."""
    try:
        url = URL(text)
        host, port = url.host, url.port
    except ValueError as error:
        raise WebhookUrlRejected(f"webhook.url must be a valid URL: {error}") from error
    if len(text) > URL_CHARS_MAX or not host or not port or url.user or url.password:
        raise WebhookUrlRejected(
            f"webhook.url must have a host, no user, and at most {URL_CHARS_MAX} characters"
        )
    if url.scheme not in ("http", "https"):
        raise WebhookUrlRejected("webhook.url must use https")
    is_public = url.scheme == "https"
    found = _literal(host)
    if found is None and not is_public and not networks:
        raise WebhookUrlRejected("webhook.url must use https")
    if found is not None and not is_allowed(found, networks, is_public=is_public):
        raise WebhookUrlRejected("webhook.url must use https and a host outside private networks")
    return url


def _literal(host: str) -> Address | None:
    """The address that a host denotes, in any form that resolvers accept; None for a name. Raises:
    WebhookUrlRejected for a number that is not an address.
    """
    name = host.rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return IPv4Address("127.0.0.1")
    try:
        return ip_address(name)
    except ValueError:
        pass
    try:
        return IPv4Address(socket.inet_aton(name))
    except (OSError, UnicodeError) as error:
        if name.rpartition(".")[2].isdigit():  # no name ends in a number (RFC 3696)
            detail = "the host in webhook.url must be a name or an IP address, and not a number"
            raise WebhookUrlRejected(detail) from error
        return None


_Lookup = tuple[str, int, socket.AddressFamily]
"""A host, port and family to resolve."""


class _Resolver(AbstractResolver):
    """Resolves host names, and returns only allowed addresses."""

    def __init__(self, networks: Networks, *, is_public: bool) -> None:
        self._networks, self._is_public = networks, is_public
        self._threads = ThreadPoolExecutor(RESOLVERS_MAX, "webhook-names")
        self._slow_threads = ThreadPoolExecutor(SLOW_RESOLVERS_MAX, "webhook-slow-names")
        self._slow: set[str] = set()
        self._lookups: dict[_Lookup, asyncio.Future[Any]] = {}
        """Running lookups, including lookups for which no delivery waits any longer."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the allowed addresses of a name. Raises: OSError if no address is allowed."""
        wanted = host, port, family
        if wanted not in self._lookups:
            self._lookups[wanted] = self._look_up(wanted)
        found = await asyncio.shield(self._lookups[wanted])
        addresses = dict.fromkeys((str(each[4][0]), each[0], each[2]) for each in found)
        allowed: list[ResolveResult] = [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=kind,
                proto=proto,
                flags=socket.AI_NUMERICHOST,
            )
            for address, kind, proto in addresses
            if is_allowed(ip_address(address), self._networks, is_public=self._is_public)
        ]
        if not allowed:
            raise OSError(None, f"{host} has no address that is allowed for webhooks")
        return allowed

    def _look_up(self, wanted: _Lookup) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        host, began_s = wanted[0], loop.time()
        is_slow = host in self._slow
        threads = self._slow_threads if is_slow else self._threads
        # A delivery's timeout does not end the lookup, whose duration is still recorded.
        future = loop.run_in_executor(threads, socket.getaddrinfo, *wanted, socket.SOCK_STREAM)
        late = loop.call_later(_SLOW_S, self._is_late, host)

        def ended(done: asyncio.Future[Any]) -> None:
            late.cancel()
            del self._lookups[wanted]
            is_quick = loop.time() - began_s < _SLOW_S
            if is_quick and not done.cancelled() and done.exception() is None:
                self._slow.discard(host)

        future.add_done_callback(ended)
        return future

    def _is_late(self, host: str) -> None:
        if len(self._slow) >= SLOW_HOSTS_MAX:
            self._slow.clear()
        self._slow.add(host)

    async def close(self) -> None:
        """Shut down the threads without waiting for running lookups."""
        for threads in (self._threads, self._slow_threads):
            threads.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Keys:
    """The signing key and the wakes' tokens, which all gateways derive from one secret."""

    secret: bytes

    @property
    def _signing(self) -> Ed25519PrivateKey:
        seed = hmac.digest(self.secret, b"quorumlog webhook signatures", hashlib.sha256)
        return Ed25519PrivateKey.from_private_bytes(seed)

    @property
    def jwk(self) -> dict[str, str]:
        """The public key as a JWK, named by its thumbprint (RFC 7638)."""
        x = _base64(self._signing.public_key().public_bytes_raw())
        thumbprint = orjson.dumps({"crv": "Ed25519", "kty": "OKP", "x": x})
        kid = "ds_" + _base64(hashlib.sha256(thumbprint).digest())
        more = {"use": "sig", "alg": "EdDSA", "kid": kid}
        return {"kty": "OKP", "crv": "Ed25519", "x": x, **more}

    def signature(self, body: bytes, at_s: int) -> str:
        """Sign a body. Returns the value of the header `Webhook-Signature`."""
        signed = self._signing.sign(b"%d.%b" % (at_s, body))
        return f"t={at_s},kid={self.jwk['kid']},ed25519={_base64(signed)}"

    def token(self, name: str, uid: str, generation: int) -> str:
        """Make a wake's token. `uid` is the secret that the subscription `name` was created with."""
        head = f"{generation}.{uid[:_UID_CHARS]}"
        return f"{head}.{self._mac(name, head)}"

    def generation_of(self, name: str, token: str) -> tuple[int, str]:
        """A token's generation, and the beginning of its `uid`. Raises: WakeTokenInvalid."""
        head, _, mac = token.rpartition(".")
        if not token.isascii() or not hmac.compare_digest(mac, self._mac(name, head)):
            raise WakeTokenInvalid
        generation, _, uid = head.partition(".")
        return int(generation), uid

    def _mac(self, name: str, head: str) -> str:
        key = hmac.digest(self.secret, b"quorumlog wake tokens", hashlib.sha256)
        return _base64(hmac.digest(key, f"{head}.{name}".encode(), hashlib.sha256))


class Webhooks:
    """Sends signed wakes to webhooks."""

    def __init__(self, networks: Networks) -> None:
        """`networks`: the private networks to which deliveries may go, also by http."""
        self._networks = networks
        self._sessions: dict[str, aiohttp.ClientSession] = {}
        self._resolvers: list[_Resolver] = []

    def check(self, url: str) -> None:
        """Raise WebhookUrlRejected unless the URL is allowed."""
        check_url(url, self._networks)

    async def send(self, url: str, document: Any, keys: Keys) -> bool:
        """Send a wake. Returns whether the response contains `done`. Raises: DeliveryFailed."""
        body = orjson.dumps(document)
        headers = {
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            "User-Agent": "quorumlog-webhook",
            "Webhook-Signature": keys.signature(body, int(wall_s())),
        }
        try:
            checked = check_url(url, self._networks)
            session = self._session(checked.scheme)
            async with session.post(
                checked, data=body, headers=headers, allow_redirects=False
            ) as response:
                if not 200 <= response.status < 300:
                    raise DeliveryFailed(f"the webhook responded with status {response.status}")
                data = await _read(response)
        except WebhookUrlRejected as error:
            raise DeliveryFailed(error.detail) from error
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise DeliveryFailed(repr(error)) from error
        try:
            answer = orjson.loads(data)
        except orjson.JSONDecodeError:
            return False
        return isinstance(answer, dict) and answer.get("done") is True

    def _session(self, scheme: str) -> aiohttp.ClientSession:
        if scheme not in self._sessions:
            resolver = _Resolver(self._networks, is_public=scheme == "https")
            self._resolvers.append(resolver)
            self._sessions[scheme] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=DELIVERIES_MAX + SLOW_DELIVERIES_MAX,
                    resolver=resolver,
                    use_dns_cache=False,
                    force_close=True,
                ),
                timeout=aiohttp.ClientTimeout(total=DELIVERY_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trust_env=False,
            )
        return self._sessions[scheme]

    async def close(self) -> None:
        """Close all connections, and the resolvers, which aiohttp does not close."""
        for session in self._sessions.values():
            await session.close()
        for resolver in self._resolvers:
            await resolver.close()


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """A response's body; empty if it is longer than `ANSWER_BYTES_MAX`."""
    found = bytearray()
    async for part in response.content.iter_any():
        found += part
        if len(found) > ANSWER_BYTES_MAX:
            response.close()
            return b""
    return bytes(found)


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
