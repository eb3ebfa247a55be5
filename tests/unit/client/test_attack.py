"""A short share of `make attack` on the cluster of these tests: strangers, beside a bystander."""

import pytest

from loadtest.cluster import Cluster
from tests.outside.attack import hostile, slow
from tests.outside.attack.arena import Arena, attack
from tests.outside.attack.meters import Meters
from tests.outside.attack.report import Report

pytestmark = pytest.mark.asyncio(loop_scope="package")

SEED = 1
CAMPAIGNS = {
    "numbers": hostile.numbers,
    "requests": hostile.requests,
    "framing": hostile.framing,
    "aborts": slow.aborts,
}
"""Those that are over when the last answer is there: no deadline has to pass."""


async def test_strangers_get_documented_answers_and_a_bystander_does_not_notice(
    cluster: Cluster,
) -> None:
    report = Report(seed=SEED)
    arena = Arena(cluster, Meters(cluster), report, requests=200, seconds=600.0)

    await attack(arena, CAMPAIGNS, before_s=0.5)

    assert not report.findings, report.page()
    assert report.requests > 600
    assert report.bystander["appends"] > 0
    assert report.bystander["followed"] >= report.bystander["appends"]
