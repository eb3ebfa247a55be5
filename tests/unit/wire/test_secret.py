"""The cluster's secret: made once for its user, and shown where it is needed only."""

import os
from pathlib import Path

import pytest

from quorumlog.wire.secret import LOCAL_SECRET, operator_headers, read_secret
from services.local.credentials import kept_secret

TOKEN = "0123456789abcdef" * 4
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder in which a cluster runs."""
    monkeypatch.chdir(tmp_path)
    LOCAL_SECRET.parent.mkdir()
    LOCAL_SECRET.write_text(TOKEN)


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize(
    ("urls", "shown"),
    [
        ("http://127.0.0.1:8080,http://localhost:1", True),
        ("http://[::1]:80", True),
        ("http://127.0.0.1:8080,http://10.0.0.1", False),
        ("http://127.0.0.1.evil.example", False),
        ("http://[broken", False),
    ],
)
def test_a_secret_that_nobody_named_is_shown_to_this_machine_only(urls: str, shown: bool) -> None:
    assert operator_headers(None, urls.split(",")) == (HEADERS if shown else {})


def test_a_named_secret_is_shown_wherever_the_services_are(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(TOKEN + "\n")

    assert operator_headers(file, ["http://10.0.0.1"]) == HEADERS


def test_no_secret_is_shown_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert operator_headers(None, ["http://127.0.0.1:8080"]) == {}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cluster-secret"


def test_a_secret_is_made_once_for_its_user_only(file: Path) -> None:
    before = os.umask(0)
    try:
        made = kept_secret(file)
    finally:
        os.umask(before)

    assert file.stat().st_mode & 0o777 == 0o600
    assert read_secret(file) == made == kept_secret(file)


def test_a_start_that_was_cut_short_leaves_no_half_of_a_secret(file: Path) -> None:
    file.with_name(f".{file.name}.new").write_text("0123")

    assert len(kept_secret(file)) == 64


def test_two_clusters_have_two_secrets(tmp_path: Path) -> None:
    assert kept_secret(tmp_path / "a") != kept_secret(tmp_path / "b")
