"""Leases by the database's clock, with a token that grows with each new holder.

Leases avoid duplicate work (two auditors, say). No decision rests on one.
"""

from typing import Final

from quorumlog.wire.repair_bodies import Lease, LeaseGive, LeaseTake
from services.metadata.database import Connection, RowStore, transactional

_LEFT: Final = "greatest(0, extract(epoch FROM expires_at - clock_timestamp()))::float8 AS left_s"


class LeaseStore(RowStore):
    """The leases' rows."""

    @transactional
    async def take(self, connection: Connection, name: str, request: LeaseTake) -> Lease:
        """Take a free lease, or renew one's own; returns the present holder."""
        await connection.execute(
            "INSERT INTO leases AS l (name, holder, token, expires_at)"
            " VALUES ($1, $2, 1, clock_timestamp() + make_interval(secs => $3))"
            " ON CONFLICT (name) DO UPDATE SET holder = excluded.holder,"
            " token = l.token + (l.holder <> excluded.holder)::int,"
            " expires_at = clock_timestamp() + make_interval(secs => $3)"
            " WHERE l.holder = excluded.holder OR l.expires_at <= clock_timestamp()",
            name,
            request.holder,
            request.ttl_s,
        )
        record = await connection.fetchrow(
            f"SELECT holder, token, {_LEFT} FROM leases WHERE name = $1", name
        )
        assert record is not None
        return Lease(
            name=name,
            holder=record["holder"],
            token=record["token"],
            expires_in_s=record["left_s"],
        )

    @transactional
    async def give(self, connection: Connection, name: str, request: LeaseGive) -> None:
        """Release a lease, if this holder still has it."""
        await connection.execute(
            "UPDATE leases SET expires_at = clock_timestamp()"
            " WHERE name = $1 AND holder = $2 AND token = $3",
            name,
            request.holder,
            request.token,
        )
