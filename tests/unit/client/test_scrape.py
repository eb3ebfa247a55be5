"""The scrape config reaches every process of a local cluster."""

import pytest

from loadtest.cluster import Cluster
from tests.support.scrape import scraped

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_the_scrape_config_gets_the_metrics_of_every_service(cluster: Cluster) -> None:
    found = await scraped("prometheus.yml", cluster.data)

    assert {*found} == {name for name in cluster.names if name not in ("postgres", "redis")}
    assert all("process_cpu_seconds_total" in text for text in found.values())
