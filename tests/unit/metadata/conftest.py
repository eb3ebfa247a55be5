"""A service for each test, on databases of its own."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from loadtest.stores import Stores, scratch
from tests.unit.metadata.support import Service, await_bookies, serving


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No bookie of a test counts as silent for being slow; a test that wants that says so."""
    await_bookies(monkeypatch)


@pytest.fixture
async def service(stores: Stores) -> AsyncIterator[Service]:
    async with serving(stores) as running:
        yield running


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder for bookies, dumps and copies."""
    with scratch("ql-metadata-") as path:
        yield path
