"""The gateway's settings."""

from pydantic import Field

from quorumlog.net.service import ServiceSettings
from services.gateway.edge.limits import Limits


class GatewaySettings(ServiceSettings, Limits):
    """What a gateway can be told; each field is the environment variable of the same name."""

    metadata_urls: tuple[str, ...] = Field(
        min_length=1, description="Metadata services; one that does not answer is passed over."
    )
    cors_origins: tuple[str, ...] = Field(
        default=(), description="Origins whose pages may call; `*` for all. Off by default."
    )
