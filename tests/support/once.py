"""Names of clients' requests, which the gateway's edge derives from keys."""

from hashlib import blake2b
from uuid import UUID

from quorumlog.protocol.once import Once


def once(key: str, asked: str = "") -> Once:
    """The name of a request with this key and content."""
    token, content = (blake2b(text.encode(), digest_size=16) for text in (key, asked))
    return Once(str(UUID(bytes=token.digest())), content.hexdigest())
