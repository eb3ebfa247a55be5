"""Many readers at one tail of a real gateway, each with an eye on every byte."""

import pytest

from loadtest.bench_tail import Plan, run
from loadtest.cluster import Cluster

pytestmark = pytest.mark.asyncio(loop_scope="package")


@pytest.mark.parametrize("is_log", [False, True], ids=["ledger", "log"])
async def test_every_reader_sees_every_record(cluster: Cluster, is_log: bool) -> None:
    plan = Plan(readers=40, writers=5, records=20, rate=50.0, is_log=is_log)

    followed = await run(plan, cluster)

    assert not followed.wrong, followed
    assert "bench-tail: 40 readers, 100 records each, 0 wrong" in str(followed)
