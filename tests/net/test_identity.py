"""A cluster's secret opens what it should, and is shown by nothing."""

from pathlib import Path

import pytest
from aiohttp.test_utils import make_mocked_request

from quorumlog.errors import Unauthenticated
from quorumlog.net.identity import ClusterSecret
from quorumlog.wire.secret import SecretUnusable, read_secret

TOKEN = "0123456789abcdef" * 4


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "secret"


@pytest.fixture
def secret(file: Path) -> ClusterSecret:
    file.write_text(TOKEN + "\n")
    return ClusterSecret(read_secret(file))


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_the_secret_is_known_whatever_the_case_of_its_scheme(
    secret: ClusterSecret, scheme: str
) -> None:
    given = {"Authorization": f"{scheme} {TOKEN}"}

    assert secret.identify(make_mocked_request("GET", "/", given)).role is None


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer ", f"Basic {TOKEN}", f"Bearer {TOKEN}x", TOKEN, "Bearer é"]
)
def test_nothing_but_the_secret_is_accepted(secret: ClusterSecret, given: str) -> None:
    headers = {"Authorization": given} if given else {}

    with pytest.raises(Unauthenticated) as refused:
        secret.identify(make_mocked_request("GET", "/", headers))

    assert refused.value.headers["WWW-Authenticate"].startswith("Bearer")
    assert TOKEN not in str(refused.value.__dict__)


def test_nothing_prints_the_secret(secret: ClusterSecret) -> None:
    assert secret.credentials.headers == {"Authorization": f"Bearer {TOKEN}"}
    assert TOKEN not in repr(secret) + repr(secret.credentials)


@pytest.mark.parametrize("text", ["", "short", f"two {TOKEN}", f"{TOKEN}\n{TOKEN}", TOKEN + "é"])
def test_an_unusable_secret_is_refused_without_being_shown(file: Path, text: str) -> None:
    file.write_text(text)

    with pytest.raises(SecretUnusable) as refused:
        read_secret(file)

    assert str(file) in str(refused.value)
    assert not text or text not in str(refused.value)


def test_a_missing_file_is_named(file: Path) -> None:
    with pytest.raises(SecretUnusable, match="secret: No such file"):
        read_secret(file)
