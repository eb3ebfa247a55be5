"""What tests of this folder share."""

from pathlib import Path

import pytest

from tests.unit.net.mutual_tls import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """An authority of certificates, in a folder of its own."""
    return Authority(tmp_path / "authority")
