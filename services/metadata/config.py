"""The metadata service's settings; nothing else reads the environment."""

from functools import cached_property
from pathlib import Path

from pydantic import Field, SecretStr, field_validator

from quorumlog.net.service import ServiceSettings
from quorumlog.net.settings import checked_url
from quorumlog.net.timers import CLOCK_SETTING
from quorumlog.protocol.clock import CLOCK_DIFFERENCE_S
from services.metadata.sealing import KeyRing, read_key_file


class Config(ServiceSettings):
    """The settings of the metadata service."""

    postgres_dsn: SecretStr = Field(
        description="the database of all rows; a standby behind a comma: `db-1:5432,db-2:5432`"
    )
    postgres_password: SecretStr | None = Field(
        None, description="the password, where `POSTGRES_DSN` has none"
    )
    redis_url: SecretStr = Field(description="Redis for liveness; its data may vanish")
    redis_password: SecretStr | None = Field(
        None, description="the password, where `REDIS_URL` has none"
    )
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
    clock_difference_s: float = Field(CLOCK_DIFFERENCE_S, gt=0, description=CLOCK_SETTING)
    key_file: Path | None = Field(
        default=None,
        description="keys with which the MAC and access keys of ledgers are encrypted in the database, one a line (`openssl"
        " rand -base64 32`), mode 0600: the first one encrypts, all decrypt",
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
    contract_through: int = Field(
        0,
        ge=0,
        le=9999,
        description="contracting migrations up to this number run, since no older metadata process is left"
        " (docs/guides/upgrades.md)",
    )
    body_bytes_max: int = Field(
        16 << 20, ge=1 << 16, le=1 << 30, description="size limit of a request body"
    )

    @field_validator("postgres_dsn")
    @classmethod
    def _is_of_postgres(cls, dsn: SecretStr) -> SecretStr:
        return checked_url(dsn, ("postgresql", "postgres"))

    @field_validator("redis_url")
    @classmethod
    def _is_of_redis(cls, url: SecretStr) -> SecretStr:
        return checked_url(url, ("redis", "rediss", "unix"))

    @field_validator("key_file")
    @classmethod
    def _holds_keys(cls, file: Path | None) -> Path | None:
        if file is not None:
            read_key_file(file)
        return file

    @cached_property
    def key_ring(self) -> KeyRing:
        """The keys of the key file."""
        return KeyRing() if self.key_file is None else read_key_file(self.key_file)
