"""A short form of `make chaos-spark`."""

import pytest

from loadtest.stores import StoreServers

pytest.importorskip("pyspark", reason="PySpark is not installed: make setup-spark")

from loadtest.spark_chaos import Counts, storm
from tests.spark.slow import SLOW


@SLOW
async def test_a_driver_and_a_gateway_are_killed_and_each_row_is_there_once(
    servers: StoreServers,
) -> None:
    counts = Counts()
    # By this seed two of four tasks die, one on its way and one after its last row; after each one
    # Python begins anew.
    await storm(servers.fresh(), counts, rows=20_000, partitions=4, restarts=0, time_s=0, seed=19)

    assert counts.is_right, counts.page
    assert counts.rows == 20_000
    assert counts.gateway_kills == counts.answers_lost == counts.kills_after_commit == 1
