"""What the bookie's tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.stores import scratch
from tests.unit.bookie.support import Gate


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder for stores and images of them."""
    with scratch("ql-bookie-") as folder:
        yield folder


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)
