"""Finds the addresses of clients behind proxies that the operator trusts.

A proxy names the client in `X-Forwarded-For`, in `Forwarded` (RFC 7239), or in a header at the
start of the connection (HAProxy's PROXY protocol, versions 1 and 2). Any client can send such
headers, so only the headers of trusted proxies count. In a list of addresses, the last address that
is not a trusted proxy's is the client's. The client may have made up all earlier addresses.
"""

import asyncio
import re
import socket
from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Final, Literal

from aiohttp import hdrs
from multidict import CIMultiDict, CIMultiDictProxy

_FOR: Final = re.compile(r'(?:^|[;,\s])for\s*=\s*("(?:[^"\\]|\\.)*"|[^;,\s]+)', re.IGNORECASE)
_V2: Final = b"\r\n\r\n\x00\r\nQUIT\n"
_V1_BYTES_MAX: Final = 107
_NO_HEADER: Final = "the PROXY header is missing or malformed: check the proxy, or PROXIES_SEND"
_FAMILIES: Final = {0x11: (socket.AF_INET, 4), 0x21: (socket.AF_INET6, 16)}
"""Socket family and address size by the PROXY protocol's codes for TCP over IPv4 and IPv6."""


ProxiesSend = Literal["x-forwarded-for", "forwarded", "proxy-protocol"]
"""The way in which trusted proxies name the client."""


class Proxies:
    """The trusted proxies of a listener."""

    def __init__(self, trusted: Sequence[IPv4Network | IPv6Network], send: ProxiesSend) -> None:
        self._trusted, self._send = trusted, send

    def trusts(self, address: str) -> bool:
        """Whether `address` belongs to a trusted proxy."""
        try:
            found = ip_address(address)
        except ValueError:
            return False
        mapped = found.ipv4_mapped if found.version == 6 else None
        return any((mapped or found) in network for network in self._trusted)

    def begins(self, address: str) -> bool:
        """Whether connections from `address` begin with the header of the PROXY protocol."""
        return self._send == "proxy-protocol" and self.trusts(address)

    def client_of(self, headers: CIMultiDict[str] | CIMultiDictProxy[str], address: str) -> str:
        """The address of the client behind a request that arrived from `address`."""
        if self._send == "proxy-protocol" or not self.trusts(address):
            return address
        if self._send == "forwarded":
            said = ",".join(headers.getall(hdrs.FORWARDED, ()))
            hops = [hop.strip('"') for hop in _FOR.findall(said)]
        else:
            hops = ",".join(headers.getall(hdrs.X_FORWARDED_FOR, ())).split(",")
        for hop in reversed(hops):
            named = _address_of(hop.strip())
            if named is None:
                break  # unknown or hidden: the proxy that reports this stands for the client
            address = named
            if not self.trusts(address):
                break
        return address


def _address_of(hop: str) -> str | None:
    """The IP address in a text such as `192.0.2.1`, `192.0.2.1:80` or `[2001:db8::1]:80`."""
    if hop.startswith("["):
        hop = hop[1:].partition("]")[0]
    elif hop.count(":") == 1:
        hop = hop.partition(":")[0]
    try:
        return str(ip_address(hop))
    except ValueError:
        return None


async def read_header(proxied: socket.socket) -> str | None:
    """Read the PROXY protocol's header at the start of a connection, without any byte beyond it.

    Returns the client's address; None if the proxy itself connects. Raises: OSError, ValueError.
    """
    head = await _exactly(proxied, 16 - 1)  # the shortest header of version 1 has 15 bytes
    if not head.startswith(_V2):
        return await _version_1(proxied, head)
    head += await _exactly(proxied, 1)
    rest = await _exactly(proxied, int.from_bytes(head[14:16]))
    family, size = _FAMILIES.get(head[13], (None, 0))
    if head[12] == 0x20 or family is None:
        return None
    if head[12] != 0x21 or len(rest) < 2 * size:
        raise ValueError(_NO_HEADER)
    return socket.inet_ntop(family, rest[:size])


async def _version_1(proxied: socket.socket, line: bytes) -> str | None:
    while not line.endswith(b"\r\n") and len(line) < _V1_BYTES_MAX:
        line += await _exactly(proxied, 1)
    match line.decode("ascii").split():
        case ["PROXY", "UNKNOWN", *_]:
            return None
        case ["PROXY", "TCP4" | "TCP6", client, _, _, _] if line.endswith(b"\r\n"):
            return str(ip_address(client))
        case _:
            raise ValueError(_NO_HEADER)


async def _exactly(proxied: socket.socket, count: int) -> bytes:
    loop, found = asyncio.get_running_loop(), b""
    while len(found) < count:
        more = await loop.sock_recv(proxied, count - len(found))
        if not more:
            raise ConnectionResetError("the connection ended within the PROXY protocol's header")
        found += more
    return found
