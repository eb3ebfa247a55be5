"""The settings of a local cluster (docs/reference/settings.md, "The local cluster")."""

import os
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator

from quorumlog.net.settings import Settings, kind_of

ROOT = Path(__file__).resolve().parents[2]
"""The folder that contains `services` and `shared`."""


class LocalSettings(Settings):
    """The settings. Each field can be set by an environment or make variable of the same name."""

    data: Path = Path(".quorumlog")
    """folder for all data, with log files in `DATA/log` and process ids in `DATA/run`"""
    port: int = Field(default=8080, ge=1, le=65535)
    """port of the first gateway; further gateways have the following ports"""
    listen: str = "127.0.0.1"
    """address of the gateways' public listeners; an address other than loopback requires `REQUIRE_TOKENS=1` or `ALLOW_ANONYMOUS=1`"""
    bookies: int = Field(default=4, ge=1, le=64)
    """number of bookies; with 4, ledgers with E=3 can be created even after one bookie has died"""
    gateways: int = Field(default=2, ge=1, le=64)
    """number of gateways"""
    metadata_services: int = Field(default=1, ge=1, le=16)
    """number of metadata processes"""
    autorecoveries: int = Field(default=1, ge=1, le=64)
    """number of autorecovery processes"""
    zones: tuple[str, ...] = ()
    """zones, such as `a,b,c`, that are assigned to the bookies in turn"""
    durability: Literal["fsync", "deferred"] = "fsync"
    """`deferred`: acknowledge before the sync; entries are lost only if Qa bookies lose power"""
    auto_fix_cookies: bool = False
    """1: a wiped bookie rejoins as a new incarnation"""
    rebuild_metadata: bool = Field(
        default=False,
        description="1: metadata that the database lacks is rebuilt from the copies on bookies,"
        " even if the database is empty (the folder `postgres` is gone)",
    )
    tls: bool = False
    """1: services use mutual TLS, with certificates that are created in `DATA/certificates`"""
    lost_bookie_delay_s: float = Field(default=60, ge=0)
    """how long a bookie may be absent before its entries are copied to other bookies"""
    restart: bool = False
    """1: a process that dies is restarted"""
    postgres_dsn: SecretStr | None = None
    """an existing Postgres instead of an embedded one"""
    redis_url: SecretStr | None = None
    """an existing Redis instead of an embedded one"""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """the lowest level that the services log"""
    drain_s: float = Field(default=20.0, gt=0)
    """how long a stopping service may take to finish requests in flight"""

    @model_validator(mode="after")
    def _ports_exist(self) -> Self:
        if self.port + self.gateways - 1 > 65535:
            raise ValueError(f"PORT must be at most {65536 - self.gateways} (got {self.port})")
        return self

    @property
    def secret_file(self) -> Path:
        """The file with the cluster's secret, by which services and operators authenticate."""
        return self.data.resolve() / "cluster-secret"

    @property
    def certificates(self) -> Path:
        """The folder of the certificates, if `tls` is set."""
        return self.data.resolve() / "certificates"


def inherited_environment() -> dict[str, str]:
    """Returns this process's environment, from which the services read further settings, without
    secrets. Each service gets only the secrets that it needs.
    """
    own = {
        name.upper()
        for name, field in LocalSettings.model_fields.items()
        if kind_of(field) == "secret"
    }
    own |= {f"{name}_FILE" for name in own}
    return {name: value for name, value in os.environ.items() if name not in own}
