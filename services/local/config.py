"""The settings of the one-machine cluster (README, "Settings")."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

ROOT = Path(__file__).resolve().parents[2]
"""The folder that contains `services` and `shared`."""


class LocalSettings(BaseModel):
    """Each field is a make variable or an environment variable of the same name in capitals."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: Path = Field(
        default=Path(".quorumlog"),
        description="folder of all data; `DATA/log` has the services' log files, `DATA/run` the process ids",
    )
    port: int = Field(
        default=8080, ge=1, le=65535, description="port of the first gateway; the others follow"
    )
    bookies: int = Field(
        default=4, ge=1, le=64, description="number of bookies; with 4, E=3 survives a death"
    )
    gateways: int = Field(default=2, ge=1, le=64, description="number of gateways")
    metadata_services: int = Field(
        default=1, ge=1, le=16, description="number of processes of the metadata service"
    )
    autorecoveries: int = Field(
        default=1, ge=1, le=64, description="number of processes of autorecovery"
    )
    zones: tuple[str, ...] = Field(
        default=(), description="such as `a,b,c`: assigned to the bookies in turn"
    )
    durability: Literal["fsync", "deferred"] = Field(
        default="fsync",
        description="`deferred`: bookies acknowledge before the sync; entries survive the power loss of"
        " fewer than Qa bookies",
    )
    auto_fix_cookies: bool = Field(
        default=False, description="1: a wiped bookie rejoins as a new incarnation"
    )
    rebuild_metadata: bool = Field(
        default=False,
        description="1: rows that the database lacks are made again from what the bookies hold, in an empty database"
        " too (the folder `postgres` is gone)",
    )
    tls: bool = Field(
        default=False,
        description="1: the services know each other by certificates (mutual TLS), made below `DATA/certificates`",
    )
    lost_bookie_delay_s: float = Field(
        default=60,
        ge=0,
        description="delay before the entries of a lost bookie are copied to other bookies",
    )
    restart: bool = Field(default=False, description="1: a process that dies is started again")
    postgres_dsn: str = Field(
        default="", description="an existing Postgres instead of an embedded one"
    )
    redis_url: str = Field(default="", description="an existing Redis instead of an embedded one")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="the least that the services log"
    )
    drain_s: float = Field(
        default=20.0,
        gt=0,
        description="time for requests in flight of each service that is stopped",
    )

    @field_validator("zones", mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

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

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """The settings in an environment. Ends the process with a line for each invalid one."""
        values = {
            name: environ[name.upper()] for name in cls.model_fields if environ.get(name.upper())
        }
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            faults = (
                f"{'.'.join(map(str, e['loc'])).upper()} = {e['input']!r}: {e['msg']}"
                if e["loc"]
                else e["msg"]
                for e in error.errors()
            )
            raise SystemExit("\n".join(faults)) from None


def inherited_environment() -> dict[str, str]:
    """This process's environment, for the services: they read further settings from it."""
    return dict(os.environ)
