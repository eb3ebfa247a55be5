"""JSON values that cost as much work or memory as a text of their size can."""

from collections.abc import Callable
from typing import Final


def filled(size: int, one: bytes) -> bytes:
    """A list with as many copies of `one` as fit."""
    return b"[%b]" % b",".join([one] * ((size - 2) // (len(one) + 1)))


def numbered(size: int, of: bytes = b"0") -> bytes:
    """An object with almost as many members as fit."""
    return b"{%b}" % b",".join(b'"%d":%b' % (n, of) for n in range(size // (10 + len(of))))


VALUES: Final[dict[str, Callable[[int], bytes]]] = {
    "zeros": lambda size: filled(size, b"0"),
    "empty objects": lambda size: filled(size, b"{}"),
    "objects": lambda size: filled(size, b'{"a":{}}'),
    "wrong objects": lambda size: filled(size, b'{"a":1}'),
    "empty strings": lambda size: filled(size, b'""'),
    "decimals": lambda size: filled(size, b"1.50"),
    "large numbers": lambda size: filled(size, b"1e300"),
    "members": numbered,
    "headers": lambda size: numbered(size, b'"x"'),
    "one string": lambda size: b'"%b"' % (b"x" * (size - 2)),
    "one string of quotes": lambda size: b'"%b"' % (b'\\"' * (size // 2 - 1)),
    "one key": lambda size: b'{"%b":1}' % (b"/" * (size - 6)),
    "spaces": lambda size: b" " * (size - 2) + b"{}",
    "depth": lambda size: b"[" * (size // 2) + b"]" * (size // 2),
    "text of many commas": lambda size: b'"%b"' % (b"," * (size - 2)),
}
"""By what they have much of: each makes a value of about a size in bytes."""
