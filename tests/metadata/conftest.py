"""A service for each test, on databases of its own."""

from collections.abc import AsyncIterator

import pytest

from loadtest.stores import Stores
from tests.metadata.support import Service, serving


@pytest.fixture
async def service(stores: Stores) -> AsyncIterator[Service]:
    async with serving(stores) as running:
        yield running
