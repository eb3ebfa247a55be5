"""What the bookie's tests share."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from loadtest.stores import scratch
from services.bookie.store import Store
from tests.unit.bookie.support import Gate, started, stop_started


@pytest.fixture
async def root() -> AsyncIterator[Path]:
    """A folder for stores and images of them. The stores are stopped after the test."""
    with scratch("ql-bookie-") as folder:
        yield folder
        await stop_started()


@pytest.fixture
async def store(root: Path) -> Store:
    """A started store in the folder `d`."""
    return started(root / "d")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)
