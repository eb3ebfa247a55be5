"""A fork has what its source has, so who makes one must be allowed to read that."""

from loadtest.stores import Stores
from services.gateway.logs.values import STREAM_PREFIX
from tests.unit.gateway.tokens.support import guarded

SOURCE, FORK = "/v1/stream/secret", "/v1/stream/mine"
TEXT = {"Content-Type": "text/plain"}
FORKED = {**TEXT, "Stream-Forked-From": SOURCE}


async def test_a_fork_needs_the_right_to_read_its_source(stores: Stores) -> None:
    mine = tuple(f"{scope}:logs/{STREAM_PREFIX}mine" for scope in ("manage", "append", "read"))
    async with guarded(stores) as found:
        made = await found.ask(found.admin, "PUT", SOURCE, headers=TEXT, body=b"s")
        blind, _ = await found.token(*mine)
        reader, _ = await found.token(*mine, f"read:logs/{STREAM_PREFIX}secret")

        refused = await found.ask(blind, "PUT", FORK, headers=dict(FORKED), body=b"")
        unknown = await found.ask(
            blind, "PUT", FORK, headers=FORKED | {"Stream-Forked-From": f"{SOURCE}-2"}, body=b""
        )
        nothing = await found.ask(blind, "GET", FORK)
        forked = await found.ask(reader, "PUT", FORK, headers=dict(FORKED), body=b"")
        read = await found.ask(blind, "GET", FORK)

    assert made.status == 201
    assert (refused.status, refused.json["code"]) == (403, "forbidden")
    assert unknown.status == 403, "whether there is such a stream is not told"
    assert nothing.status == 404
    assert (forked.status, read.body) == (201, b"s")
