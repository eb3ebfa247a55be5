"""Which JWTs count, and what is taken from them; without a gateway around."""

import base64
import hashlib
import hmac
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import RSAAlgorithm

from quorumlog.errors import Overloaded, Unauthenticated
from quorumlog.wire.token_bodies import GRANTS_MAX, IssuedToken, TokenQuotas
from services.gateway.config import GatewaySettings
from services.gateway.edge.access import jwts as jwts_module
from services.gateway.edge.access.jwts import (
    ISSUED_MAX,
    QUOTAS_CLAIM,
    IssuedCallers,
    Jwts,
    KeysUnusable,
    is_jwt,
)
from services.gateway.edge.access.scopes import Kind, Scope
from tests.support.issuer import AUDIENCE, LEEWAY_S, NAME, Issuer, handmade, said_by_default


class FromNow(int):
    """A time in seconds from the moment of the test, which may be long after its collection."""


def told_now(claims: dict[str, Any]) -> dict[str, Any]:
    return {
        name: now() + value if isinstance(value, FromNow) else value
        for name, value in claims.items()
    }


def now() -> int:
    return int(said_by_default()["iat"])


ALGORITHMS = ("ES256", "RS256", "EdDSA")


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Issuer:
    return Issuer(tmp_path_factory.mktemp("issuer") / "keys.json", *ALGORITHMS)


@pytest.fixture(scope="module")
def jwts(issuer: Issuer) -> Jwts:
    return Jwts(issuer.rules)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_jwt_of_each_algorithm_is_taken(issuer: Issuer, jwts: Jwts, algorithm: str) -> None:
    text = issuer.jwt("read:logs/orders-*", "append:logs/orders-1", key_id=algorithm)

    said = jwts.verified(text)

    assert is_jwt(text)
    assert said.subject == "ann"
    assert said.grants == ("read:logs/orders-*", "append:logs/orders-1")
    assert said.ends_at == jwt.decode(text, options={"verify_signature": False})["exp"] + LEEWAY_S
    assert jwts.has(said.key)


@pytest.mark.parametrize(
    ("claims", "why"),
    [
        ({"exp": FromNow(-LEEWAY_S - 1)}, "has expired"),
        ({"exp": None}, "lacks the claim exp"),
        ({"exp": "soon"}, "not a valid JWT"),
        ({"nbf": FromNow(3600)}, "not valid yet"),
        ({"iat": FromNow(3600)}, "not valid yet"),
        ({"aud": "another"}, "another audience"),
        ({"aud": ["another", "and another"]}, "another audience"),
        ({"aud": None}, "lacks the claim aud"),
        ({"iss": "https://evil.example"}, "another issuer"),
        ({"iss": f"{NAME}/"}, "another issuer"),
        ({"iss": None}, "lacks the claim iss"),
        ({"sub": None}, "lacks the claim sub"),
        ({"sub": 7}, "claim sub is invalid"),
        ({"sub": ""}, "claim sub is invalid"),
        ({"sub": "a" * 256}, "claim sub is invalid"),
        ({"sub": "two\nlines"}, "claim sub is invalid"),
        ({"scope": ["read:*"] * (GRANTS_MAX + 1)}, "claim grants is invalid"),
        ({QUOTAS_CLAIM: {"requests_per_s": 0}}, "claim quorumlog_quotas is invalid"),
        ({QUOTAS_CLAIM: {"request_per_s": 1}}, "claim quorumlog_quotas is invalid"),
    ],
    ids=str,
)
def test_a_jwt_with_a_wrong_claim_is_refused(
    issuer: Issuer, jwts: Jwts, claims: dict[str, Any], why: str
) -> None:
    with pytest.raises(Unauthenticated, match=why) as refused:
        jwts.verified(issuer.jwt("admin:*", **told_now(claims)))

    said = refused.value.detail or ""
    assert NAME not in said, "what would be right is told to nobody"
    assert "ann" not in said
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__, "no log shows the JWT by a traceback"


def by_public_key(issuer: Issuer, key: Callable[[Issuer], bytes]) -> str:
    """A JWT that is signed with HS256, and a public key that everyone may know as its secret."""
    unsigned = handmade({"alg": "HS256", "kid": "RS256"}, said_by_default(("admin:*",)))
    text = unsigned.rpartition(".")[0]
    mac = hmac.new(key(issuer), text.encode(), hashlib.sha256).digest()
    return f"{text}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"


def pem(issuer: Issuer) -> bytes:
    public = issuer.keys["RS256"][1].public_key()
    return public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def jwk(issuer: Issuer) -> bytes:
    return json.dumps(issuer.public("RS256")).encode()


ALL = said_by_default(("admin:*",))
FORGED: dict[str, tuple[Callable[[Issuer], str], str]] = {
    "alg none": (lambda _: handmade({"alg": "none", "kid": "ES256"}, ALL), "algorithm of its key"),
    "alg None": (lambda _: handmade({"alg": "nOnE", "kid": "ES256"}, ALL), "algorithm of its key"),
    "no alg": (lambda _: handmade({"kid": "ES256"}, ALL), "algorithm of its key"),
    "HS256 by the key's PEM": (lambda one: by_public_key(one, pem), "algorithm of its key"),
    "HS256 by the key's JWK": (lambda one: by_public_key(one, jwk), "algorithm of its key"),
    "another algorithm of the key": (
        lambda one: jwt.encode(ALL, one.keys["RS256"][1], "RS512", headers={"kid": "RS256"}),  # type: ignore[arg-type]
        "algorithm of its key",
    ),
    "no signature": (
        lambda one: one.jwt("admin:*").rpartition(".")[0] + ".",
        "does not match its key",
    ),
    "claims of another JWT": (
        lambda one: ".".join(
            (
                one.jwt().split(".")[0],
                one.jwt("admin:*").split(".")[1],
                one.jwt().split(".")[2],
            )
        ),
        "does not match its key",
    ),
    "unknown kid": (
        lambda one: one.jwt("admin:*", header={"kid": "another"}),
        r"names an unknown key \(kid\)",
    ),
    "no kid": (lambda _: handmade({"alg": "ES256"}, ALL), r"names an unknown key \(kid\)"),
    "kid that is no text": (
        lambda _: handmade({"alg": "ES256", "kid": ["a"]}, ALL),
        "not a valid JWT",
    ),
    "its own key": (
        lambda one: handmade({"alg": "ES256", "jwk": one.public("ES256")}, ALL, bytes(64)),
        r"names an unknown key \(kid\)",
    ),
    "unknown crit": (
        lambda one: one.jwt("admin:*", header={"crit": ["x"], "x": 1}),
        "not a valid JWT",
    ),
    "two points": (lambda _: "..", "not a valid JWT"),
    "no base64": (lambda _: "a!.b!.c!", "not a valid JWT"),
    "not ASCII": (lambda _: "é.é.\udcff", "not a valid JWT"),
    "deep": (lambda _: base64.urlsafe_b64encode(b"[" * 3000).decode().strip("=") + ".e30.", "JWT"),
    "claims that are no object": (
        lambda one: jwt.PyJWS().encode(
            b"[]",
            one.keys["ES256"][1],  # type: ignore[arg-type]
            "ES256",
            {"kid": "ES256"},
        ),
        "not a valid JWT",
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_jwt_is_refused(issuer: Issuer, jwts: Jwts, name: str) -> None:
    make, why = FORGED[name]

    with pytest.raises(Unauthenticated, match=why):
        jwts.verified(make(issuer))


@pytest.mark.parametrize(
    "claims",
    [
        {"aud": ["another", AUDIENCE]},
        {"exp": FromNow(-1)},
        {"nbf": FromNow(LEEWAY_S // 2), "iat": FromNow(LEEWAY_S // 2)},
        {"iat": None},
    ],
    ids=str,
)
def test_a_jwt_for_several_audiences_or_of_a_clock_beside_ours_is_taken(
    issuer: Issuer, jwts: Jwts, claims: dict[str, Any]
) -> None:
    assert jwts.verified(issuer.jwt("read:*", **told_now(claims))).grants == ("read:*",)


@pytest.mark.parametrize(
    ("claim", "grants"),
    [
        ("openid  read:logs/a profile read:org", ("read:logs/a",)),
        (
            ["openid", "append:cluster", 7, "admin:*", "read:logs/", "read:clusters"],
            ("append:cluster", "admin:*"),
        ),
        ("", ()),
        (None, ()),
        ({"read:*": True}, ()),
        (7, ()),
    ],
)
def test_grants_are_words_or_a_list_and_other_scopes_are_passed_over(
    issuer: Issuer, jwts: Jwts, claim: object, grants: tuple[str, ...]
) -> None:
    assert jwts.verified(issuer.jwt(scope=claim)).grants == grants


def test_quotas_are_those_of_the_claim(issuer: Issuer, jwts: Jwts) -> None:
    said = jwts.verified(issuer.jwt(quorumlog_quotas={"connections": 2, "bytes_per_s": 1000}))

    assert said.quotas == TokenQuotas(connections=2, bytes_per_s=1000)


def test_a_new_key_counts_at_its_first_jwt_and_a_removed_one_never(tmp_path: Path) -> None:
    issuer = Issuer(tmp_path / "keys.json")
    jwts = Jwts(issuer.rules)
    old = issuer.jwt("read:*")
    said = jwts.verified(old)

    issuer.add("new", "EdDSA")
    assert jwts.verified(issuer.jwt("read:*", key_id="new")).subject == "ann"
    assert jwts.has(said.key)
    issuer.drop("ES256")
    jwts.look()

    assert not jwts.has(said.key)
    with pytest.raises(Unauthenticated, match="names an unknown key"):
        jwts.verified(old)


def test_a_key_that_keeps_its_id_and_changes_is_another_key(tmp_path: Path) -> None:
    issuer = Issuer(tmp_path / "keys.json")
    jwts = Jwts(issuer.rules)
    said = jwts.verified(issuer.jwt())

    issuer.add("ES256")
    jwts.look()

    assert not jwts.has(said.key)
    assert jwts.verified(issuer.jwt()).subject == "ann"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"keys": {}}', '{"keys": []}', '{"keys": 1}'])
def test_a_file_that_can_not_be_used_changes_nothing_and_ends_a_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    issuer = Issuer(tmp_path / "keys.json")
    jwts = Jwts(issuer.rules)

    with caplog.at_level(logging.INFO):
        issuer.file.write_text(text)
        jwts.look()
        jwts.look()

    assert [record.message for record in caplog.records] == ["jwt-keys-unusable"]
    assert jwts.verified(issuer.jwt()).subject == "ann"
    with pytest.raises(KeysUnusable, match=r"keys\.json"):
        Jwts(issuer.rules)


def test_a_file_that_is_away_for_a_moment_changes_nothing(tmp_path: Path) -> None:
    issuer = Issuer(tmp_path / "keys.json")
    jwts = Jwts(issuer.rules)

    issuer.file.unlink()
    jwts.look()
    assert jwts.verified(issuer.jwt()).subject == "ann"
    issuer.add("new")
    jwts.look()

    assert jwts.verified(issuer.jwt(key_id="new")).subject == "ann"


def test_keys_that_are_weak_or_for_something_else_are_passed_over(tmp_path: Path) -> None:
    issuer = Issuer(tmp_path / "keys.json")
    weak = rsa.generate_private_key(65537, 1024).public_key()
    others = [
        RSAAlgorithm.to_jwk(weak, as_dict=True) | {"kid": "weak"},
        {"kty": "oct", "k": base64.urlsafe_b64encode(bytes(32)).decode(), "kid": "shared"},
        issuer.public("ES256") | {"kid": "for encryption", "use": "enc"},
        issuer.public("ES256") | {"kid": "another algorithm", "alg": "HS256"},
        issuer.public("ES256") | {"kid": "no algorithm", "alg": "none"},
        {name: value for name, value in issuer.public("ES256").items() if name != "kid"},
        {"kty": "EC", "kid": "broken"},
        {"kty": "EC", "crv": ["P-256"], "x": 1, "y": {}, "kid": "strange"},
        "no key",
    ]

    issuer.publish(*others)
    jwts = Jwts(issuer.rules)

    assert jwts.verified(issuer.jwt()).subject == "ann"
    for other in others[:5]:
        assert isinstance(other, dict)
        with pytest.raises(Unauthenticated, match="names an unknown key"):
            jwts.verified(issuer.jwt(header={"kid": other["kid"]}))
    issuer.file.write_text(json.dumps({"keys": others}))
    with pytest.raises(KeysUnusable, match="has no usable key: add one with a kid"):
        Jwts(issuer.rules)


def test_one_jwt_more_than_are_remembered_makes_room_but_not_of_who_is_connected(
    jwts: Jwts, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = jwts.verified(issuer.jwt("read:logs/a"))
    callers = IssuedCallers(jwts, now)
    ended: list[str] = []

    class Connection:
        def abort(self) -> None:
            ended.append("aborted")

    def of(number: int) -> IssuedToken:
        return said.model_copy(update={"subject": f"number {number}"})

    first = callers.identify_by_ticket(said)
    assert Scope.READ in first.scopes(Kind.LOGS, "a")
    first.connections.add(Connection())  # type: ignore[arg-type]
    for number in range(ISSUED_MAX):
        callers.identify_by_ticket(of(number))

    assert len(callers._known) == 2
    assert callers.identify_by_ticket(said) is first
    monkeypatch.setattr(callers, "_now", lambda: said.ends_at)
    callers.refresh()
    assert ended == ["aborted"]
    assert callers._known == {}


def test_a_ticket_of_a_jwt_with_a_removed_key_is_refused(tmp_path: Path) -> None:
    issuer = Issuer(tmp_path / "keys.json")
    said = Jwts(issuer.rules).verified(issuer.jwt())
    issuer.add("ES256")
    callers = IssuedCallers(Jwts(issuer.rules), now)

    with pytest.raises(Unauthenticated, match="JWT was removed"):
        callers.identify_by_ticket(said)
    issuer.add("new")
    new = Jwts(issuer.rules).verified(issuer.jwt(key_id="new"))
    known = callers.identify_by_ticket(new)
    assert known.issued == new
    issuer.drop("new")
    callers.refresh()

    with pytest.raises(Unauthenticated, match="JWT was removed"):
        callers.identify_by_ticket(new)


async def test_bytes_of_requests_under_way_count_for_a_subject(jwts: Jwts, issuer: Issuer) -> None:
    callers = IssuedCallers(jwts, now)
    said = jwts.verified(issuer.jwt(quorumlog_quotas={"bytes_per_s": 1000}))
    usage = callers.identify_by_ticket(said).usage
    assert usage is not None

    class Tail:
        def more(self) -> int:
            return 5000

    usage.flows.add(Tail())  # type: ignore[arg-type]
    usage.begin(0)
    callers.refresh()

    with pytest.raises(Overloaded, match="1000 bytes per second"):
        usage.begin(0)


async def test_the_use_of_a_subject_counts_for_all_its_jwts_and_the_oldest_is_forgotten(
    jwts: Jwts, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwts_module, "ISSUED_MAX", 3)
    callers = IssuedCallers(jwts, now)
    said = jwts.verified(issuer.jwt(quorumlog_quotas={"connections": 2}))

    def usage(subject: str, *, later_s: int = 0) -> object:
        more = {"subject": subject, "ends_at": said.ends_at + later_s}
        return callers.identify_by_ticket(said.model_copy(update=more)).usage

    first = usage("ann")
    assert first is not None
    assert usage("ann", later_s=1) is first
    others = [usage(f"another {number}") for number in range(3)]
    assert len({id(first), *map(id, others)}) == 4
    assert len(callers._usages) == 3
    assert usage("ann", later_s=2) is not first


def test_an_issuers_settings_go_together_and_require_tokens(tmp_path: Path) -> None:
    issuer = Issuer(tmp_path / "keys.json")
    some = {"PORT": "80", "METADATA_URLS": "http://metadata", "REQUIRE_TOKENS": "1"}
    own = {
        "JWT_KEYS_FILE": str(issuer.file),
        "JWT_ISSUER": NAME,
        "JWT_AUDIENCE": AUDIENCE,
    }

    read = GatewaySettings.read(some | own)
    assert read.jwts is not None
    assert read.jwts.verified(issuer.jwt()).subject == "ann"
    for name in own:
        with pytest.raises(
            SystemExit, match=r"^JWT_KEYS_FILE, JWT_ISSUER and JWT_AUDIENCE must be set together"
        ):
            GatewaySettings.read(some | own | {name: ""})
    with pytest.raises(SystemExit, match="REQUIRE_TOKENS=1"):
        GatewaySettings.read(some | own | {"REQUIRE_TOKENS": "0"})
    issuer.file.write_text("")
    with pytest.raises(SystemExit, match="is not a JWKS"):
        GatewaySettings.read(some | own)
