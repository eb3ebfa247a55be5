"""The settings of the one-machine cluster (docs/guides/settings.md, "The local cluster")."""

import os
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator

from quorumlog.net.settings import Settings, kind_of

ROOT = Path(__file__).resolve().parents[2]
"""The folder that contains `services` and `shared`."""


class LocalSettings(Settings):
    """Each field is a make variable or an environment variable of the same name in capitals."""

    data: Path = Path(".quorumlog")
    """folder of all data; `DATA/log` has the services' log files, `DATA/run` the process ids"""
    port: int = Field(default=8080, ge=1, le=65535)
    """port of the first gateway; the others follow"""
    listen: str = "127.0.0.1"
    """address at which the gateways' public API listens; others than loopback need `REQUIRE_TOKENS=1` or `ALLOW_ANONYMOUS=1`"""
    bookies: int = Field(default=4, ge=1, le=64)
    """number of bookies; with 4, E=3 survives a death"""
    gateways: int = Field(default=2, ge=1, le=64)
    """number of gateways"""
    metadata_services: int = Field(default=1, ge=1, le=16)
    """number of processes of the metadata service"""
    autorecoveries: int = Field(default=1, ge=1, le=64)
    """number of processes of autorecovery"""
    zones: tuple[str, ...] = ()
    """such as `a,b,c`: assigned to the bookies in turn"""
    durability: Literal["fsync", "deferred"] = "fsync"
    """`deferred`: bookies acknowledge before the sync; entries survive the power loss of fewer than Qa bookies"""
    auto_fix_cookies: bool = False
    """1: a wiped bookie rejoins as a new incarnation"""
    rebuild_metadata: bool = Field(
        default=False,
        description="1: rows that the database lacks are made again from what the bookies hold, in an empty database"
        " too (the folder `postgres` is gone)",
    )
    tls: bool = False
    """1: the services know each other by certificates (mutual TLS), made below `DATA/certificates`"""
    lost_bookie_delay_s: float = Field(default=60, ge=0)
    """delay before the entries of a lost bookie are copied to other bookies"""
    restart: bool = False
    """1: a process that dies is started again"""
    postgres_dsn: SecretStr | None = None
    """an existing Postgres instead of an embedded one"""
    redis_url: SecretStr | None = None
    """an existing Redis instead of an embedded one"""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """the least that the services log"""
    drain_s: float = Field(default=20.0, gt=0)
    """time for requests in flight of each service that is stopped"""

    @model_validator(mode="after")
    def _ports_exist(self) -> Self:
        if self.port + self.gateways - 1 > 65535:
            raise ValueError(f"{self.gateways} gateways from port {self.port} on end above 65535")
        return self

    @property
    def secret_file(self) -> Path:
        """What the services show to each other, and an operator to them."""
        return self.data.resolve() / "cluster-secret"

    @property
    def certificates(self) -> Path:
        """The folder of the certificates with TLS."""
        return self.data.resolve() / "certificates"


def inherited_environment() -> dict[str, str]:
    """This process's environment, for the services: they read further settings from it, but not the secrets of
    this one, which each gets as far as it needs them.
    """
    own = {
        name.upper()
        for name, field in LocalSettings.model_fields.items()
        if kind_of(field) == "secret"
    }
    own |= {f"{name}_FILE" for name in own}
    return {name: value for name, value in os.environ.items() if name not in own}
