"""The secret that a cluster makes for itself."""

import os
from pathlib import Path

import pytest

from quorumlog.wire.secret import read_secret
from services.local.credentials import kept_secret


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
