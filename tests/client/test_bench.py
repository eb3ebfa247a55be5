"""Each measurement of `make bench`, for an instant: it runs and gives figures; how large they are is its own matter."""

import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

import aiohttp
import orjson
import pytest
import pytest_asyncio

from loadtest.bench.__main__ import main
from loadtest.bench.goals import GOALS, Goal, outcome
from loadtest.bench.measure import Absent
from loadtest.bench.ours import Ours
from loadtest.bench.report import Report, facts
from loadtest.bench.works import WORKS, Work
from loadtest.bookkeeper.peer import BookKeeper
from loadtest.cluster import Cluster
from loadtest.jetstream import JetStream
from quorumlog.client import Client

SECONDS: Final = 0.05
LARGE: Final = ("10000 open ledgers", "recovery of 100000", "a bookie is killed")
"""Measurements that take long however short they are: their code runs with smaller numbers."""
NAMES: Final = {work.name for work in WORKS}


def works_of(system: str) -> list[Work]:
    return [work for work in WORKS if work.system == system and work.what not in LARGE]


async def check(work: Work, system: object) -> None:
    figures = await work.run(system)
    assert figures.get("entries/s", 1) > 0
    assert {"entries/s", "p50 ms", "ms"} & figures.keys()


@pytest_asyncio.fixture(loop_scope="package", scope="module")
async def ours(cluster: Cluster) -> AsyncIterator[Ours]:
    first, second = cluster.gateways
    async with (
        Client(first) as client,
        Client(second) as other,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        yield Ours(cluster, client, other, session, SECONDS)


# By aiohttp, of a batch; a file in its place would take more CPU.
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
@pytest.mark.asyncio(loop_scope="package")
@pytest.mark.parametrize("work", works_of("quorumlog"), ids=lambda work: work.what)
async def test_a_measurement_of_ours_gives_figures(ours: Ours, work: Work) -> None:
    try:
        await check(work, ours)
    except Absent as absent:
        pytest.skip(str(absent))


@pytest.mark.asyncio(loop_scope="package")
@pytest.mark.parametrize("peer", [JetStream, BookKeeper])
async def test_a_peers_measurements_give_figures(
    tmp_path: Path, peer: type[JetStream | BookKeeper]
) -> None:
    async with AsyncExitStack() as stack:
        try:
            system = await stack.enter_async_context(peer.running(tmp_path, SECONDS))
        except Absent as absent:
            pytest.skip(str(absent))
        for work in works_of(peer.__name__):
            with suppress(Absent):  # a load generator; the peer itself is there
                await check(work, system)


def test_a_run_writes_its_figures_as_json_and_svg(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--only", "DISK", "--time", "0.02", "--rounds", "2", "--json", "--out", str(tmp_path)]

    assert main(asked) == 0

    (document,) = tmp_path.glob("*.json")
    (svg,) = tmp_path.glob("*.svg")
    told = orjson.loads(document.read_bytes())
    assert orjson.loads(capsys.readouterr().out) == told
    assert [len(rounds) for rounds in told["measurements"].values()] == [2, 2]
    assert told["facts"].keys() >= {"CPU", "cores", "kernel", "Python", "disk", "date", "commit"}
    ET.parse(svg)


def test_ctrl_c_ends_a_run_with_what_was_measured() -> None:
    argv = [sys.executable, "-m", "loadtest.bench", "--only", "disk", "--time", "0.05"]
    with subprocess.Popen(
        [*argv, "--rounds", "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("round 2"):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, error = process.communicate()

    assert process.returncode == 130
    assert "medians of the rounds" in out
    assert not error


def test_a_word_that_names_no_measurement_is_refused() -> None:
    with pytest.raises(SystemExit, match="no measurement is named by nonsense"):
        main(["--only", "nonsense"])


def test_goals_are_of_measurements_that_there_are() -> None:
    named = {name for goal in GOALS for name in (goal.work, *goal.beside)}
    assert named <= NAMES


def test_a_goal_beside_a_peer_compares_figures_of_the_same_round_with_the_peers_best() -> None:
    goal = Goal("ours", "entries/s", ">=", 3, ("one", "two"))
    rounds = {
        "ours": [{"entries/s": each} for each in (60.0, 100.0, 20.0)],
        "one": [{"entries/s": each} for each in (10.0, 10.0, 10.0)],
        "two": [{"entries/s": each} for each in (20.0, 40.0, 1.0)],
    }

    found = outcome(goal, rounds)

    assert found is not None
    assert (found.ours, found.theirs, found.value) == (60, 20, 2.5)
    assert not found.is_reached


def test_a_goal_of_which_something_is_not_measured_has_no_outcome() -> None:
    assert outcome(Goal("ours", "ms", "<=", 1, ("theirs",)), {"ours": [{"ms": 1.0}]}) is None
    assert outcome(Goal("ours", "ms", "<=", 1), {}) is None


def test_tables_and_chart_take_any_part_of_the_measurements(tmp_path: Path) -> None:
    report = Report(facts(tmp_path), WORKS, 1, 1, is_tls=False)
    figures = {f"{goal.figure}": 0.0 for goal in GOALS} | {"entries/s": 7.0}
    for name in NAMES:
        report.results[name] = [dict.fromkeys(figures, 7.0)]

    report.write(tmp_path)

    (document,) = tmp_path.glob("*.json")
    assert len(orjson.loads(document.read_bytes())["goals"]) == len(GOALS)
