"""A short storm of a failover and rebuilds (`make restore` has restores too): nothing acknowledged is lost, truncated or resurrected."""

from tests.cluster.restore.storm import Report, Step, storm

SEED = 1


async def test_nothing_acknowledged_is_lost_whichever_database_comes_back() -> None:
    report = Report()

    async with storm(report, seed=SEED) as running:
        await running.run([Step.FAIL_OVER_AND_REBUILD, Step.REBUILD])

    assert (report.found.details, report.findings) == ([], [])
    assert report.found.ledgers > 0
    assert (report.failovers, report.rebuilds, report.wiped, report.waited) == (1, 2, 2, 1)


def test_the_last_line_counts_what_was_done_and_found() -> None:
    report = Report(restores=1, failovers=2, rebuilds=8, wiped=9, waited=3)
    report.found.ledgers, report.found.lost = 4, 5
    report.found.truncated, report.found.resurrected = 6, 7

    assert report.last_line() == (
        "restore: 1 restores, 2 failovers, 8 rebuilds, 9 wiped bookies, 4 ledgers, 5 lost,"
        " 6 truncated, 7 resurrected, 3 waited for an operator"
    )
