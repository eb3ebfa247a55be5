"""The metadata service's settings. No other module reads the environment."""

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

    postgres_dsn: SecretStr
    """the Postgres database of all metadata; standbys follow after commas: `db-1:5432,db-2:5432`"""
    postgres_password: SecretStr | None = None
    """the password for Postgres, if `POSTGRES_DSN` has no password"""
    redis_url: SecretStr
    """the Redis server for liveness, which may lose its data"""
    redis_password: SecretStr | None = None
    """the password for Redis, if `REDIS_URL` has no password"""
    redis_prefix: str = Field(default="quorumlog", pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """prefix of all keys in Redis, which must be unique for each cluster on a Redis server"""
    connections_max: int = Field(default=10, ge=1, le=200)
    """maximum number of connections to Postgres; connections beyond its cores add no speed"""
    database_deadline_s: float = Field(default=1.8, gt=0, le=60)
    """time limit of work on Postgres, so that clients get metadata-unavailable within 2 s"""
    redis_deadline_s: float = Field(default=0.5, gt=0, le=60)
    """time limit of a query to Redis, whose data is only a hint"""
    change_heartbeat_s: float = Field(default=5.0, gt=0, le=60)
    """interval of heartbeats on a quiet stream of changes"""
    expiry_every_s: float = Field(default=5.0, gt=0, le=1000)
    """interval at which expired transactions are aborted"""
    clock_difference_s: float = Field(CLOCK_DIFFERENCE_S, gt=0, description=CLOCK_SETTING)
    key_file: Path | None = Field(
        default=None,
        description="file of mode 0600 with the keys, one per line (`openssl rand -base64 32`), that"
        " encrypt ledgers' MAC and access keys in the database: the first encrypts, all decrypt",
    )
    audit_days: int = Field(default=90, ge=1, le=3650)
    """how long rows of the audit log are kept, in days"""
    audit_rows_max: int = Field(default=100_000, ge=1000, le=1_000_000)
    """maximum number of rows in the audit log, about 500 bytes each; the oldest rows are deleted"""
    allowed_bookies: tuple[str, ...] = Field(
        (),
        description="the bookies that may register, as names or patterns (`store-*`); empty: all, or"
        " with certificates, every bookie that a certificate names",
    )
    contract_through: int = Field(
        0,
        ge=0,
        le=9999,
        description="number of the last contracting migration to run; raise it when no older metadata"
        " process is left (docs/guides/upgrades.md)",
    )
    body_bytes_max: int = Field(default=16 << 20, ge=1 << 16, le=1 << 30)
    """size limit of a request body"""

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
