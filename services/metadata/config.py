"""The metadata service's settings; nothing else reads the environment."""

from pydantic import Field

from quorumlog.net.service import ServiceSettings


class Config(ServiceSettings):
    """What the metadata service can be told."""

    postgres_dsn: str = Field(min_length=1, description="the database that holds every decision")
    redis_url: str = Field(min_length=1, description="where liveness is kept; it may vanish")
    redis_prefix: str = Field(
        "quorumlog",
        pattern=r"^[A-Za-z0-9_-]{1,64}$",
        description="begins each of our keys; clusters that share a Redis need different ones",
    )
    connections_max: int = Field(
        10, ge=1, le=200, description="to Postgres; more than its cores do not make it faster"
    )
    database_deadline_s: float = Field(
        1.8, gt=0, le=60, description="longest work on Postgres; then metadata-unavailable, in 2 s"
    )
    redis_deadline_s: float = Field(
        0.5, gt=0, le=60, description="longest wait for Redis, whose answer is advice only"
    )
    change_heartbeat_s: float = Field(
        5.0, gt=0, le=60, description="between signs of life on a quiet stream of changes"
    )
    expiry_every_s: float = Field(
        5.0, gt=0, le=1000, description="between looks for transactions that nobody ended"
    )
    body_bytes_max: int = Field(16 << 20, ge=1 << 16, le=1 << 30, description="largest body")
