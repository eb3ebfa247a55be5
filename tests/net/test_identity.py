"""A cluster's secret opens what it should, and is shown by nothing."""

from pathlib import Path

import pytest
from aiohttp.test_utils import make_mocked_request

from quorumlog.errors import Unauthenticated
from quorumlog.net.identity import ClusterSecret, SecretUnusable

TOKEN = "0123456789abcdef" * 4


def test_the_secret_is_known_whatever_the_case_of_its_scheme() -> None:
    secret = ClusterSecret(TOKEN)

    for scheme in ("Bearer", "bearer"):
        found = secret.identify(
            make_mocked_request("GET", "/", {"Authorization": f"{scheme} {TOKEN}"})
        )
        assert found.role is None


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer ", f"Basic {TOKEN}", f"Bearer {TOKEN}x", TOKEN, "Bearer é"]
)
def test_nothing_but_the_secret_is_accepted(given: str) -> None:
    headers = {"Authorization": given} if given else {}

    with pytest.raises(Unauthenticated) as refused:
        ClusterSecret(TOKEN).identify(make_mocked_request("GET", "/", headers))

    assert refused.value.headers["WWW-Authenticate"].startswith("Bearer")
    assert TOKEN not in str(refused.value.__dict__)


def test_a_file_of_a_secret_may_end_with_a_newline(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(TOKEN + "\n")

    secret = ClusterSecret.read(file)

    assert secret.credentials.headers == {"Authorization": f"Bearer {TOKEN}"}
    assert TOKEN not in repr(secret) + repr(secret.credentials)


@pytest.mark.parametrize("text", ["", "short", f"two {TOKEN}", f"{TOKEN}\n{TOKEN}", TOKEN + "é"])
def test_an_unusable_secret_is_refused_without_being_shown(tmp_path: Path, text: str) -> None:
    file = tmp_path / "secret"
    file.write_text(text)

    with pytest.raises(SecretUnusable) as refused:
        ClusterSecret.read(file)

    assert str(file) in str(refused.value)
    assert not text or text not in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SecretUnusable, match="secret: No such file"):
        ClusterSecret.read(tmp_path / "secret")
