"""Requests that are carried out once, however often they arrive (rule 6a).

A caller names a request by `Idempotency-Key` and repeats it under the same key. The space of keys is the caller's, for
each operation and for what it is on: nobody gets the answer to somebody else's request.
"""

from hashlib import blake2b
from typing import Any, Final
from uuid import UUID

import orjson
from aiohttp import web
from pydantic import BaseModel

from quorumlog import header
from quorumlog.net.parameters import Given, Parameter, matching
from quorumlog.protocol.once import Once
from services.gateway.edge.access import caller_of

_KEY: Final = "[!-~]{1,255}"
IDEMPOTENCY_KEY: Final[Parameter[str | None]] = Parameter(
    header.IDEMPOTENCY_KEY,
    "header",
    lambda text, pointer: matching(text, pointer, _KEY),
    {"type": "string", "pattern": f"^{_KEY}$"},
    "Identifies the request, so that retries with the same key carry it out once. Each caller has keys of its own. The"
    " same key with another body gets 422.",
    None,
)


def once_of(request: web.Request, given: Given, *asked: Any) -> Once | None:
    """The name of a request that has a key; None for one without. `asked`: everything that it asks for besides its
    method and path.
    """
    key = given[IDEMPOTENCY_KEY]
    if key is None:
        return None
    named = orjson.dumps([caller_of(request).identity, request.method, request.path, key])
    token = UUID(bytes=blake2b(named, digest_size=16).digest())
    # Keyed: a body may have a password, which nobody must guess by the digest that the database keeps.
    secret = blake2b(key.encode()).digest()
    content = blake2b(_json(asked), digest_size=16, key=secret).hexdigest()
    return Once(str(token), content)


def _json(asked: Any) -> bytes:
    return orjson.dumps(asked, default=_fields, option=orjson.OPT_SORT_KEYS)


def _fields(asked: Any) -> Any:
    assert isinstance(asked, BaseModel)
    return asked.model_dump(mode="json", exclude_unset=True)
