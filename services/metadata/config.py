"""The metadata service's settings; nothing else reads the environment."""

from pydantic import Field

from quorumlog.net.service import ServiceSettings


class Config(ServiceSettings):
    """The settings of the metadata service."""

    postgres_dsn: str = Field(
        min_length=1,
        description="the database of all rows; a standby behind a comma: `db-1:5432,db-2:5432`",
    )
    redis_url: str = Field(min_length=1, description="Redis for liveness; its data may vanish")
    redis_prefix: str = Field(
        "quorumlog",
        pattern=r"^[A-Za-z0-9_-]{1,64}$",
        description="prefix of each key; clusters that share a Redis need different ones",
    )
    connections_max: int = Field(
        10, ge=1, le=200, description="connections to Postgres; more than its cores add no speed"
    )
    database_deadline_s: float = Field(
        1.8,
        gt=0,
        le=60,
        description="time limit of work on Postgres, so that clients get metadata-unavailable within 2 s",
    )
    redis_deadline_s: float = Field(
        0.5,
        gt=0,
        le=60,
        description="time limit of a query to Redis, whose answers are advice only",
    )
    change_heartbeat_s: float = Field(
        5.0, gt=0, le=60, description="interval of heartbeats on a quiet stream of changes"
    )
    expiry_every_s: float = Field(
        5.0, gt=0, le=1000, description="interval of aborting expired transactions"
    )
    audit_days: int = Field(
        90, ge=1, le=3650, description="how long the audit log keeps what was done, in days"
    )
    audit_rows_max: int = Field(
        100_000,
        ge=1000,
        le=1_000_000,
        description="the last so many rows of the audit log are kept, about 500 bytes each",
    )
    allowed_bookies: tuple[str, ...] = Field(
        (),
        description="the bookies that may register, as names or patterns (`store-*`); empty: all, or with"
        " certificates, each that a certificate names",
    )
    body_bytes_max: int = Field(
        16 << 20, ge=1 << 16, le=1 << 30, description="size limit of a request body"
    )
