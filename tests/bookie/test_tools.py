"""What a person can ask of a stopped bookie's directory."""

import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadtest.stores import scratch
from services.bookie.cookie import decide, read_cookie, write_cookie
from services.bookie.log import LogDamaged
from services.bookie.options import StoreOptions
from services.bookie.scan import STEP_BYTES
from services.bookie.store import Store
from services.bookie.tools import app
from tests.bookie.support import (
    SMALL,
    add,
    batches_of,
    fence,
    ids_of,
    large_run,
    last_segment,
    opened,
    read,
    run_of,
    started,
)
from tests.bookie.test_cookie import FOUND, LOCAL


@pytest.fixture
async def directory() -> AsyncIterator[Path]:
    """A bookie's directory after an orderly stop."""
    with scratch("ql-tools-") as folder:
        store = started(folder / "d")
        for number in range(6):
            await add(store, run_of(7, range(number * 10, number * 10 + 10)))
        await fence(store, 7)
        await store.stop()
        yield folder / "d"


def test_verify_finds_nothing_wrong_where_nothing_is(directory: Path) -> None:
    result = CliRunner().invoke(app, ["verify", str(directory), "--json"])

    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert report["problems"] == []
    assert report["records"] == {"RUN": 6, "FENCE": 1}
    assert report["entries_in_index"] == 60
    assert report["tail"] == "in order"
    assert CliRunner().invoke(app, ["verify", str(directory)]).exit_code == 0


def test_verify_names_what_is_damaged(directory: Path) -> None:
    path = last_segment(directory)
    data = bytearray(path.read_bytes())
    data[batches_of(path)[2].end - 3] ^= 8
    path.write_bytes(data)

    result = CliRunner().invoke(app, ["verify", str(directory), "--json"])

    assert result.exit_code == 1
    problems = " ".join(json.loads(result.stdout)["problems"])
    assert "ledger 7, entries 20..29" in problems
    assert "a record's CRC is wrong" in problems


def test_dump_lists_the_records_without_payloads(directory: Path) -> None:
    result = CliRunner().invoke(app, ["dump", str(directory), "--json"])

    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["kind"] for line in lines] == ["RUN"] * 6 + ["FENCE"]
    assert (lines[2]["ledger"], lines[2]["first"], lines[2]["last"]) == (7, 20, 29)


async def test_a_rebuilt_index_says_the_same(directory: Path) -> None:
    segments = list((directory / "log").glob("*.log"))

    result = CliRunner().invoke(app, ["rebuild-index", str(directory), "--json"])

    assert json.loads(result.stdout) == {
        "segments": len(segments),
        "ledgers": 1,
        "entries": 60,
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


def test_a_segment_read_moves_the_bar(directory: Path) -> None:
    read_count = 0

    def note() -> None:
        nonlocal read_count
        read_count += 1

    shutil.rmtree(directory / "index")
    segments = list((directory / "log").glob("*.log"))

    Store(directory, "b1@1", StoreOptions(), on_segment=note).close()

    assert read_count == len(segments)


def test_a_bookie_that_runs_is_not_touched(directory: Path) -> None:
    store = opened(directory)

    for command in ("verify", "dump", "rebuild-index"):
        result = CliRunner().invoke(app, [command, str(directory)])
        assert result.exit_code == 2
        assert "stop the bookie first" in result.output

    store.close()


async def test_what_can_be_read_of_a_damaged_log_is_salvaged_and_starts_as_another_incarnation(
    directory: Path,
) -> None:
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
    row = store.row(7)
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


async def test_a_salvage_that_was_cut_off_begins_again(directory: Path) -> None:
    (directory / "log").rename(directory / "log.damaged")
    (directory / "log.salvaged").mkdir()

    result = CliRunner().invoke(app, ["salvage", str(directory), "--yes", "--json"])

    assert json.loads(result.stdout)["records"] == 7
    store = started(directory)
    assert ids_of(await read(store, 7, 0, 99)) == list(range(60))
    await store.stop()
