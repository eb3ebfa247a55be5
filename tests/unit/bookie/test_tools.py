"""What a person can ask of a stopped bookie's directory."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadtest.stores import scratch
from services.bookie.config import StoreOptions
from services.bookie.cookie import decide, read_cookie, write_cookie
from services.bookie.log import LogDamaged
from services.bookie.replay import STEP_BYTES
from services.bookie.store import Store
from services.bookie.tools import app
from tests.unit.bookie.support import (
    SMALL,
    add,
    batches_of,
    fence,
    ids_of,
    image,
    large_run,
    last_segment,
    opened,
    read,
    run_of,
    started,
)
from tests.unit.bookie.test_cookie import FOUND, LOCAL
from tests.unit.bookie.test_log import filled


@pytest.fixture
async def directory(root: Path) -> Path:
    """A bookie's directory after an orderly stop."""
    store = await filled(root / "d", runs=6)
    await fence(store, 7)
    await store.stop()
    return root / "d"


def test_verify_finds_no_problem_in_an_undamaged_log(directory: Path) -> None:
    result = CliRunner().invoke(app, ["verify", str(directory), "--json"])

    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert report["problems"] == []
    assert report["records"] == {"RUN": 6, "FENCE": 1}
    assert report["entries_in_index"] == 60
    assert report["tail"] == "in order"
    assert CliRunner().invoke(app, ["verify", str(directory)]).exit_code == 0


def test_verify_names_damaged_places(directory: Path) -> None:
    path = last_segment(directory)
    data = bytearray(path.read_bytes())
    data[batches_of(path)[2].end - 3] ^= 8
    path.write_bytes(data)

    result = CliRunner().invoke(app, ["verify", str(directory), "--json"])

    assert result.exit_code == 1
    problems = " ".join(json.loads(result.stdout)["problems"])
    assert "ledger 7, entries 20..29" in problems
    assert "a record's CRC is wrong" in problems


async def test_verify_and_dump_continue_behind_damage(directory: Path) -> None:
    for number in range(5):  # each start begins a segment
        store = started(directory)
        await add(store, run_of(8, [number]))
        await store.stop()
    first, second, third, fourth, *_ = sorted((directory / "log").glob("*.log"))
    first.unlink()
    for path in (second, fourth):
        data = bytearray(path.read_bytes())
        data[batches_of(path)[0].offset + 5] ^= 8
        path.write_bytes(data)
    data = bytearray(third.read_bytes())
    data[3] ^= 8
    third.write_bytes(data)

    verify = CliRunner().invoke(app, ["verify", str(directory), "--json"])
    dump = CliRunner().invoke(app, ["dump", str(directory), "--json"])

    assert verify.exit_code == dump.exit_code == 1
    problems = json.loads(verify.stdout)["problems"]
    reported = [json.loads(line) for line in dump.stdout.splitlines()]
    places = [f"{first} is missing", "segment 2, 52 to", "a damaged head", "segment 4, 52"]
    for found in (problems, [line["problem"] for line in reported if "problem" in line]):
        assert all(place in line for place, line in zip(places, found, strict=False)), found
        assert len(found) >= len(places)
    assert [line["first"] for line in reported if line.get("kind") == "RUN"] == [3, 4]


def cut_last_segment(directory: Path) -> None:
    path = last_segment(directory)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


def lose_last_segment(directory: Path) -> None:
    last_segment(directory).unlink()


def damage_below_a_sync_point(directory: Path) -> None:
    path = last_segment(directory)
    batch = batches_of(path)[1]
    # Blank sectors, as of a write that was cut off; what follows proves that it was synced.
    data = bytearray(path.read_bytes())
    data[batch.offset + 200 : batch.end] = bytes(batch.end - batch.offset - 200)
    path.write_bytes(data)


@pytest.mark.parametrize("lose", [cut_last_segment, lose_last_segment, damage_below_a_sync_point])
async def test_verify_reports_every_refused_log(root: Path, lose: Callable[[Path], None]) -> None:
    store = await filled(root / "d", runs=6)
    crashed = image(store, root / "crashed")
    await store.checkpoint()
    under_index = image(store, root / "under-index")
    await store.stop()
    directory = under_index if lose is lose_last_segment else crashed
    assert CliRunner().invoke(app, ["verify", str(directory)]).exit_code == 0
    lose(directory)

    result = CliRunner().invoke(app, ["verify", str(directory)])

    assert result.exit_code == 1, result.output
    with pytest.raises(LogDamaged):
        opened(directory)


async def test_verify_does_not_report_a_torn_tail(root: Path) -> None:
    store = await filled(root / "d", runs=3)
    crashed = image(store, root / "crashed")
    await store.stop()
    path = last_segment(crashed)
    batch = batches_of(path)[-1]
    data = bytearray(path.read_bytes())
    data[batch.offset + 100 : batch.end] = bytes(batch.end - batch.offset - 100)
    path.write_bytes(data)

    result = CliRunner().invoke(app, ["verify", str(crashed), "--json"])

    report = json.loads(result.stdout)
    assert (result.exit_code, report["problems"]) == (0, [])
    assert f"torn at segment 1, offset {batch.offset}" in report["tail"]
    store = opened(crashed)
    assert store.replayed.cut_bytes > 0
    store.close()


@pytest.mark.parametrize("command", ["verify", "dump", "rebuild-index", "salvage"])
def test_a_directory_without_a_log_is_left_alone(root: Path, command: str) -> None:
    result = CliRunner().invoke(app, [command, str(root)])

    assert result.exit_code == 2
    assert "does not contain a bookie's log" in result.output
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("command", ["verify", "rebuild-index", "salvage"])
def test_a_damaged_cookie_is_reported_and_nothing_is_changed(directory: Path, command: str) -> None:
    (directory / "cookie.json").write_text("{")
    before = sorted((directory / "log").iterdir())

    result = CliRunner().invoke(app, [command, str(directory)], input="y\n")

    assert result.exit_code == 1
    assert "cookie.json" in result.output.replace("\n", "")
    assert sorted((directory / "log").iterdir()) == before


def test_dump_lists_the_records_without_payloads(directory: Path) -> None:
    result = CliRunner().invoke(app, ["dump", str(directory), "--json"])

    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["kind"] for line in lines] == ["RUN"] * 6 + ["FENCE"]
    assert (lines[2]["ledger"], lines[2]["first"], lines[2]["last"]) == (7, 20, 29)


async def test_a_rebuilt_index_equals_the_old_one(directory: Path) -> None:
    segments = list((directory / "log").glob("*.log"))

    result = CliRunner().invoke(app, ["rebuild-index", str(directory), "--json"])

    assert json.loads(result.stdout) == {
        "segments": len(segments),
        "ledgers": 1,
        "entries": 60,
        "deleted_ledgers": 0,
    }
    assert not (directory / "index.aside").exists()
    store = started(directory)
    assert store.replayed.copied_records == 0
    assert ids_of(await read(store, 7, 0, 99)) == list(range(60))
    await store.stop()


async def test_a_damaged_log_leaves_the_index_as_it_was(directory: Path) -> None:
    store = started(directory)
    await add(store, run_of(8, [0]))
    await store.stop()
    first = min((directory / "log").glob("*.log"))
    data = bytearray(first.read_bytes())
    data[batches_of(first)[2].end - 3] ^= 8
    first.write_bytes(data)

    result = CliRunner().invoke(app, ["rebuild-index", str(directory)])

    assert result.exit_code == 1
    assert "is damaged at offset" in result.output
    # What lies below the checkpoint is not read at a start: all else is still served.
    store = started(directory)
    assert ids_of(await read(store, 7, 0, 99)) == [*range(20), *range(30, 60)]
    await store.stop()


def test_each_segment_read_advances_the_progress_bar(directory: Path) -> None:
    read_count = 0

    def note() -> None:
        nonlocal read_count
        read_count += 1

    shutil.rmtree(directory / "index")
    segments = list((directory / "log").glob("*.log"))

    Store(directory, "b1@1", StoreOptions(), on_segment=note).close()

    assert read_count == len(segments)


def test_the_tools_refuse_the_directory_of_a_running_bookie(directory: Path) -> None:
    store = opened(directory)

    for command in ("verify", "dump", "rebuild-index"):
        result = CliRunner().invoke(app, [command, str(directory)])
        assert result.exit_code == 2
        assert "stop the bookie first" in result.output

    store.close()


async def test_readable_records_of_a_damaged_log_are_salvaged(directory: Path) -> None:
    write_cookie(directory, LOCAL)
    path = last_segment(directory)
    data = bytearray(path.read_bytes())
    data[batches_of(path)[2].end - 3] ^= 8
    path.write_bytes(data)
    shutil.rmtree(directory / "index")
    with pytest.raises(LogDamaged, match="salvage"):
        opened(directory)

    result = CliRunner().invoke(app, ["salvage", str(directory), "--yes", "--json"])

    report = json.loads(result.stdout)
    assert (report["records"], report["ledgers"], len(report["unreadable"])) == (6, 1, 1)
    store = started(directory, me="b1@3")
    old = await read(store, 7, 0, 99, member="b1@2")
    assert ids_of(old) == [*range(20), *range(30, 60)]
    assert old.absent == ()
    row = store.holdings.row(7)
    assert row is not None
    assert row.is_fenced
    await store.stop()
    local = read_cookie(directory)
    cookie, reason = decide(replace(FOUND, local=local))
    assert (cookie.member, bool(reason)) == ("b1@3", True)
    again = CliRunner().invoke(app, ["salvage", str(directory), "--yes"])
    assert again.exit_code == 1
    assert "log.damaged" in again.output


async def test_a_salvage_keeps_records_that_are_larger_than_one_read() -> None:
    with scratch("ql-tools-") as folder:
        store = started(folder / "d", replace(SMALL, segment_bytes=8 * STEP_BYTES))
        for number in range(6):
            await add(store, large_run(7, number, STEP_BYTES + 100_000))
        await store.stop()

        result = CliRunner().invoke(app, ["salvage", str(folder / "d"), "--yes", "--json"])

        report = json.loads(result.stdout)
        assert (report["records"], report["unreadable"]) == (6, [])


async def test_an_interrupted_salvage_starts_again(directory: Path) -> None:
    (directory / "log").rename(directory / "log.damaged")
    (directory / "log.salvaged").mkdir()

    result = CliRunner().invoke(app, ["salvage", str(directory), "--yes", "--json"])

    assert json.loads(result.stdout)["records"] == 7
    store = started(directory)
    assert ids_of(await read(store, 7, 0, 99)) == list(range(60))
    await store.stop()
