"""A short storm: nothing acknowledged is lost, nothing is there twice."""

import pytest

from loadtest.cluster import running
from loadtest.stores import Stores
from tests.chaos.storm import Storm

KILLS = 20
SEED = 1


@pytest.mark.timeout(900)  # each death has its own deadline; a slow machine only takes longer
async def test_nothing_acknowledged_is_lost_in_twenty_kills(stores: Stores) -> None:
    async with running(stores, bookies=4, gateways=2) as cluster:
        storm = Storm(cluster, SEED)

        report = await storm.run(lambda report: report.kills >= KILLS)

    assert report.violations == []
    assert report.acknowledged > 0
