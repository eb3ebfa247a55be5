"""Many readers at one tail of a real gateway, each with an eye on every byte."""

import pytest

from loadtest.bench.tail import Scale, run
from loadtest.cluster import Cluster

pytestmark = pytest.mark.asyncio(loop_scope="package")


@pytest.mark.parametrize("is_log", [False, True], ids=["ledger", "log"])
async def test_every_reader_sees_every_record(cluster: Cluster, is_log: bool) -> None:
    scale = Scale(readers=40, writers=5, records=20, rate=50.0, is_log=is_log)

    figures = await run(scale, cluster)

    assert figures["wrong readers"] == 0
    # Of the records that arrive together one counts, for each reader.
    assert figures["latencies"] >= scale.readers
