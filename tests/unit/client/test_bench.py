"""Each measurement of `make bench`, for an instant: it runs and gives figures; how large they are is its own matter."""

import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Final, cast
from xml.etree import ElementTree as ET

import aiohttp
import orjson
import psutil
import pytest
import pytest_asyncio
from rich.console import Console

from loadtest.bench.__main__ import BENCHMARKS, in_order, main, measure
from loadtest.bench.compare import WORKS, Disk
from loadtest.bench.goals import GOALS, Goal, outcome
from loadtest.bench.measure import Absent, Failed
from loadtest.bench.ours import Ours
from loadtest.bench.plan import Columns, Plan, Work
from loadtest.bench.report import Report, facts
from loadtest.bookkeeper import peer as bookkeeper
from loadtest.bookkeeper.peer import BookKeeper
from loadtest.cluster import Cluster
from loadtest.jetstream import JetStream
from loadtest.program import Teller
from loadtest.waiting import until_sync
from quorumlog.client import Client
from services.local.config import ROOT
from services.local.process import Become, in_child

SECONDS: Final = 0.05
LARGE: Final = (
    "10000 open ledgers",
    "10000 open logs",
    "recovery of 100000",
    "a bookie is killed",
    "the largest load",
)
"""Measurements that take long however short they are: their code runs with smaller numbers."""
NAMES: Final = {work.name for work in WORKS}
COLUMNS: Final = (Columns("medians of the rounds", ("entries/s",)),)
PLAN: Final = Plan(WORKS, {}, COLUMNS, rounds=2, goals=GOALS)


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


def test_a_run_writes_json_and_svg(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--only", "DISK", "--time", "0.02", "--rounds", "2", "--json", "--out", str(tmp_path)]

    assert main(asked) == 0

    (document,) = tmp_path.glob("*.json")
    (svg,) = tmp_path.glob("*.svg")
    reported = orjson.loads(document.read_bytes())
    assert orjson.loads(capsys.readouterr().out) == reported
    assert [len(rounds) for rounds in reported["measurements"].values()] == [2, 2]
    assert reported["facts"].keys() >= {
        "CPU",
        "cores",
        "kernel",
        "Python",
        "disk",
        "date",
        "commit",
    }
    ET.parse(svg)


def test_ctrl_c_ends_a_run_with_what_was_measured() -> None:
    argv = [sys.executable, "-m", "loadtest.bench", "--only", "disk", "--time", "0.05"]
    with subprocess.Popen(
        [*argv, "--rounds", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A CI may ignore SIGINT, which children would inherit.
        preexec_fn=in_child(Become.SELF, signal.SIGKILL),  # noqa: PLW1509
    ) as process:
        assert process.stdout is not None
        while "round 2" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, error = process.communicate()

    assert process.returncode == 130
    assert "medians of the rounds" in out
    assert not error


def test_sigterm_ends_a_run_that_ignores_sigint_and_all_its_processes(tmp_path: Path) -> None:
    asked = ["--only", "JetStream: publish, 1", "--time", "0.05", "--rounds", "100000"]
    argv = [sys.executable, "-m", "loadtest.bench", *asked, "--json"]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            stderr=log,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # noqa: PLW1509
        ) as process,
    ):
        until_sync(lambda: b"round 2" in (tmp_path / "log").read_bytes(), "two rounds are done")
        children = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        out, _ = process.communicate()

    assert process.returncode == 128 + signal.SIGTERM
    assert len(orjson.loads(out)["measurements"]["JetStream: publish, 1"]) >= 2
    assert len(children) == 3
    assert not any(child.is_running() for child in children)


@pytest.mark.asyncio(loop_scope="package")
async def test_a_hung_client_is_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncExitStack() as stack:
        try:
            system = await stack.enter_async_context(BookKeeper.running(tmp_path, SECONDS))
        except Absent as absent:
            pytest.skip(str(absent))
        with pytest.raises(Failed, match="NumberFormatException"):
            await system.read("ranges", cast("int", "x"))
        hung = psutil.Process(system.client_pid)
        hung.suspend()
        with monkeypatch.context() as patched:
            patched.setattr(bookkeeper, "_ANSWER_S", 1.0)
            with pytest.raises(Failed, match="gave no answer to `bookies`"):
                await system.read("batched", 1000)
        assert not hung.is_running()

        assert (await system.read("batched", 1000))["entries/s"] > 0
        assert system.client_pid != hung.pid


def test_a_round_with_a_failed_measurement_counts_for_no_goal_or_table(tmp_path: Path) -> None:
    goal = Goal("ours", "entries/s", ">=", 3, ("theirs",))
    rounds: dict[str, list[dict[str, float]]] = {
        "ours": [{"entries/s": each} for each in (60.0, 100.0, 20.0)],
        "theirs": [{"entries/s": 10.0}, {}, {"entries/s": 20.0}],
    }
    found = outcome(goal, rounds)
    assert found is not None
    assert (found.ours, found.theirs, found.value) == (40, 15, 3.5)

    report = Report("compare", facts(tmp_path), PLAN)
    failing, other = [work for work in WORKS if work.system == "JetStream"][:2]
    report.fail(failing, "it hung")
    report.add(other, {"entries/s": 7.0})
    console = Console(record=True, width=200)
    report.show(console, is_json=False)
    report.write(tmp_path)

    assert report.line(failing) == f"{failing.name}, round 1: it hung"
    text = console.export_text()
    assert f"left out of a round: {failing.name}, round 1: it hung" in text
    # Each goal has its row, whether it was measured or not.
    assert text.count("not measured") == len(GOALS)


def test_a_table_has_the_figures_that_were_measured_as_columns_or_as_rows() -> None:
    works = [Work("few", "costs", Disk.write), Work("many", "costs", Disk.write)]
    tables = (
        Columns("as columns", ("ms", "never measured")),
        Columns("as rows", is_turned=True),
        Columns("of one system", ("ms",), "many"),
    )
    report = Report("many", {}, Plan(works, {}, tables))
    for work, ms in zip(works, (7.0, 8.0), strict=True):
        report.add(work, {"ms": ms})
    console = Console(record=True, width=100)

    report.show(console, is_json=False)

    rows = [line.split() for line in console.export_text().splitlines() if line.strip()][1:]
    assert rows == [
        ["as", "columns", "ms"],
        ["few:", "costs", "7"],
        ["many:", "costs", "8"],
        ["as", "rows", "few:", "costs", "many:", "costs"],
        ["ms", "7", "8"],
        ["of", "one", "system", "ms"],
        ["many:", "costs", "8"],
    ]


@pytest.mark.asyncio
async def test_only_a_peer_may_fail(tmp_path: Path) -> None:
    async def fail(_system: object) -> dict[str, float]:
        raise ConnectionResetError("gone")

    @asynccontextmanager
    async def running(_folder: Path, _seconds: float) -> AsyncIterator[object]:
        yield object()

    async def measured(system: str) -> Report:
        works, peers = [Work(system, "work", fail)], ("JetStream",)
        plan = Plan(works, {system: running}, COLUMNS, rounds=2, may_fail=peers)
        report = Report("compare", {}, plan)
        await measure(report, tmp_path, Teller(Console(quiet=True)))
        return report

    report = await measured("JetStream")
    assert [line.partition(": Conn")[0] for line in report.failed] == [
        "JetStream: work, round 1",
        "JetStream: work, round 2",
    ]
    with pytest.raises(ConnectionResetError):
        await measured("quorumlog")


def test_a_word_that_names_no_measurement_is_refused() -> None:
    with pytest.raises(SystemExit, match="no measurement matches nonsense"):
        main(["--only", "nonsense"])


def test_the_list_has_each_benchmark_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(BENCHMARKS)
    assert all(len(line.split()) > 3 for line in lines)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_benchmark_takes_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "spark":
        pytest.importorskip("pyspark", reason="PySpark is not installed: make setup-spark")

    assert main(["--only", name, "--list"]) == 0

    assert all(": " in line for line in capsys.readouterr().out.splitlines())
    with pytest.raises(SystemExit) as ended:
        main(["--only", name, "--help"])
    assert ended.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_the_makefile_knows_which_benchmarks_need_no_peer() -> None:
    text = (ROOT / "Makefile").read_text()
    alone = re.search(r"^BENCH_ALONE := (.*)$", text, re.MULTILINE)
    assert alone is not None
    assert sorted(["compare", *alone[1].split()]) == sorted(BENCHMARKS)


def test_a_measurement_that_is_made_once_is_of_the_last_round_and_turns_keep_its_place() -> None:
    works = [Work(system, what, Disk.write) for what in "ab" for system in ("x", "y")]
    once = Work("x", "once", Disk.write, is_once=True)
    plan = Plan([*works, once], {}, COLUMNS, rounds=2, takes_turns=True)

    assert [work.name for work in in_order(plan, 0)] == ["x: a", "y: a", "x: b", "y: b"]
    assert [work.name for work in in_order(plan, 1)] == [
        "y: a", "x: a", "y: b", "x: b", "x: once",
    ]  # fmt: skip


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
    report = Report("compare", facts(tmp_path), PLAN)
    figures = {name for goal in GOALS for name in (goal.figure, goal.beside_figure)} | {"entries/s"}
    for name in NAMES:
        report.results[name] = [dict.fromkeys(figures, 7.0)]

    report.write(tmp_path)

    (document,) = tmp_path.glob("*.json")
    assert len(orjson.loads(document.read_bytes())["goals"]) == len(GOALS)
