"""The gateway's settings."""

from functools import cached_property
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, model_validator

from quorumlog.net.connections import ListenLimits
from quorumlog.net.proxies import Proxies, ProxiesSend
from quorumlog.net.service import ServiceSettings, url_of
from quorumlog.net.timers import CLOCK_SETTING
from quorumlog.net.tls import Tls, TlsFiles, TlsUnusable
from quorumlog.protocol.clock import CLOCK_DIFFERENCE_S
from quorumlog.wire.secret import is_loopback
from services.gateway.edge.access.jwts import JwtRules, Jwts, KeysUnusable
from services.gateway.edge.http.limits import Limits
from services.gateway.logs.ownership import CONSUMER_EXPIRY_S, ORPHAN_AGE_S


class GatewaySettings(ServiceSettings, Limits):
    """The settings of a gateway; each field is the environment variable of the same name."""

    metadata_urls: tuple[str, ...] = Field(min_length=1)
    """URLs of the metadata services. A service that does not respond is skipped."""
    internal_host: str = "127.0.0.1"
    """Host of the internal listener, for other processes of the cluster; 0.0.0.0 in containers."""
    internal_port: int = Field(default=0, ge=0, le=65535)
    """Port of the internal listener. With 0, the system chooses the port."""
    internal_advertised_url: str = ""
    """URL of the internal listener for other processes. Default: `INTERNAL_HOST` and the port."""
    require_tokens: bool = False
    """With 1, each request needs an access token with a grant for the operation."""
    jwt_keys_file: Path | None = Field(
        default=None,
        description="File with the public keys (a JWKS) of an issuer whose JWTs are accepted as"
        " tokens (docs/guides/tokens.md). Reloaded when the file changes.",
    )
    jwt_issuer: str = ""
    """The `iss` claim that JWTs must have."""
    jwt_audience: str = ""
    """The audience that the `aud` claim of JWTs must contain."""
    jwt_grants_claim: str = Field(default="scope", min_length=1)
    """The claim of JWTs that lists the grants."""
    jwt_leeway_s: int = Field(default=10, ge=0, le=300)
    """Maximum difference between the issuer's clock and this machine's clock."""
    public_tls_cert_file: Path | None = None
    """Certificate of the public listener. Reloaded when the file changes."""
    public_tls_key_file: Path | None = None
    """Private key of the public listener's certificate."""
    public_tls_key_password: SecretStr | None = None
    """Password of `PUBLIC_TLS_KEY_FILE`, if the key is encrypted."""
    hsts_s: int = Field(default=0, ge=0)
    """`max-age` of `Strict-Transport-Security`, which makes browsers require TLS. 0: not sent."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call the API from a browser; `*` allows all. Off by default."""
    trusted_proxies: tuple[IPv4Network | IPv6Network, ...] = ()
    """Networks of trusted proxies (`10.0.0.0/8`), which report a request's client address."""
    proxies_send: ProxiesSend = "x-forwarded-for"
    """How trusted proxies report the client's address."""
    webhook_networks: tuple[IPv4Network | IPv6Network, ...] = ()
    """Private networks (`10.0.0.0/8`) to which streams may send webhooks, also by plain HTTP."""
    quorum_timeout_s: float = Field(default=10.0, gt=0)
    """An append that has no ack quorum after this time fails, and its outcome is unknown."""
    silent_bookie_s: float = Field(default=2.0, gt=0)
    """A bookie that does not respond to an append for this long is replaced."""
    delay_ensemble_change: bool = False
    """With 1, a silent bookie is replaced only if the other bookies do not form an ack quorum."""
    ledger_in_flight_bytes_max: int = Field(default=128 << 20, gt=0)
    """Limit of unacknowledged appends to one ledger. Further appends get 429 overloaded."""
    gateway_in_flight_bytes_max: int = Field(default=512 << 20, gt=0)
    """Limit of unacknowledged appends to all ledgers. Further appends get 429 overloaded."""
    open_ledgers_max: int = Field(default=200_000, ge=1)
    """Limit of open ledgers that this gateway writes. Further creations get 429 overloaded."""
    peer_open_ledgers_max: int = Field(default=25_000, ge=1)
    """Limit of open ledgers per address, once seven eighths of `OPEN_LEDGERS_MAX` are in use."""
    zones_min: int = Field(default=1, ge=1, le=255)
    """The number of zones across which the copies of an entry are spread."""
    enforce_zones: bool = False
    """With 1, a new ledger needs live bookies in `ZONES_MIN` zones. With 0, the gateway only warns."""
    quarantine_failures: int = Field(default=10, ge=0)
    """Failures within `QUARANTINE_WINDOW_S` that quarantine a live bookie. 0: no quarantine."""
    quarantine_window_s: float = Field(default=60.0, gt=0)
    """The time in which failures of a bookie are counted."""
    quarantine_s: float = Field(default=300.0, gt=0)
    """How long a bookie stays in quarantine."""
    clock_difference_s: float = Field(
        default=CLOCK_DIFFERENCE_S,
        gt=0,
        description=f"{CLOCK_SETTING[0].upper()}{CLOCK_SETTING[1:]}.",
    )
    orphan_age_s: float = Field(default=ORPHAN_AGE_S, ge=30)
    """Age at which a log's unreferenced ledger is deleted; must exceed the time of a takeover."""
    consumer_expiry_s: float = Field(default=CONSUMER_EXPIRY_S, ge=0)
    """Consumers that are unused for this long are deleted. With 0, no consumer is deleted."""

    @model_validator(mode="after")
    def _knows_users_beyond_loopback(self) -> Self:
        if not (self.require_tokens or self.allow_anonymous or is_loopback(self.host)):
            raise ValueError(
                f"HOST={self.host} allows every client on the network to read and change all data:"
                " set REQUIRE_TOKENS=1 (docs/guides/tokens.md), or ALLOW_ANONYMOUS=1 if only"
                " trusted clients can reach this host"
            )
        return self

    @model_validator(mode="after")
    def _jwts_are_usable(self) -> Self:
        if self.jwts is not None and not self.require_tokens:
            raise ValueError("JWT_KEYS_FILE needs REQUIRE_TOKENS=1: set REQUIRE_TOKENS too")
        return self

    @cached_property
    def jwts(self) -> Jwts | None:
        """The verifier of JWTs; None if JWTs are not accepted as tokens. Raises: KeysUnusable."""
        file, issuer, audience = self.jwt_keys_file, self.jwt_issuer, self.jwt_audience
        if file is None and not issuer and not audience:
            return None
        if file is None or not issuer or not audience:
            raise KeysUnusable(
                "JWT_KEYS_FILE, JWT_ISSUER and JWT_AUDIENCE must be set together: set all or none"
            )
        return Jwts(JwtRules(file, issuer, audience, self.jwt_grants_claim, self.jwt_leeway_s))

    def _internal_host(self) -> tuple[str, str]:
        return "INTERNAL_HOST", self.internal_host

    def internal_url(self, port: int) -> str:
        """The URL at which other processes reach the internal listener, which listens on `port`."""
        is_tls = self.tls is not None
        return url_of(self.internal_advertised_url, self.internal_host, port, is_tls=is_tls)

    def _internal_advertised(self) -> tuple[str, str]:
        return "INTERNAL_ADVERTISED_URL", self.internal_advertised_url

    @model_validator(mode="after")
    def _public_certificate_is_usable(self) -> Self:
        speaks_tls = self.public_tls is not None or self.advertised_url.startswith("https://")
        if self.hsts_s and not speaks_tls:
            raise ValueError(
                "HSTS_S needs PUBLIC_TLS_CERT_FILE or an https ADVERTISED_URL: set one"
            )
        return self

    @cached_property
    def public_tls(self) -> Tls | None:
        """The certificate and key of the public listener; None without TLS. Raises: TlsUnusable."""
        certificate, key = self.public_tls_cert_file, self.public_tls_key_file
        if certificate is None and key is None:
            return None
        if certificate is None or key is None:
            raise TlsUnusable(
                "PUBLIC_TLS_CERT_FILE and PUBLIC_TLS_KEY_FILE must be set together: set both or none"
            )
        return Tls(TlsFiles(certificate, key, password=self.public_tls_key_password))

    def certificates(self) -> dict[str, Tls]:
        """The certificates of both listeners, by the listener's name."""
        public = {} if self.public_tls is None else {"public": self.public_tls}
        return super().certificates() | public

    @property
    def url(self) -> str:
        """The URL at which clients reach this process, without a trailing slash."""
        is_tls = self.public_tls is not None
        return url_of(self.advertised_url, self.host, self.port, is_tls=is_tls)

    def listen_limits(self) -> ListenLimits:
        """The limits of the public listener's connections."""
        return ListenLimits(
            drain_timeout_s=self.drain_s,
            connections_max=self.connections_max,
            peer_connections_max=self.peer_connections_max,
            stalled_answer_timeout_s=self.stalled_answer_s,
            proxies=Proxies(self.trusted_proxies, self.proxies_send)
            if self.trusted_proxies
            else None,
        )
