"""What a person can ask of a stopped bookie's directory."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadtest.stores import scratch
from services.bookie.tools import app
from tests.bookie.support import (
    add,
    batches_of,
    fence,
    ids_of,
    last_segment,
    opened,
    read,
    run_of,
    started,
)


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
    result = CliRunner().invoke(app, ["rebuild-index", str(directory), "--json"])

    assert json.loads(result.stdout) == {"ledgers": 1}
    store = started(directory)
    assert store.replayed.copied_records == 0
    assert ids_of(await read(store, 7, 0, 99)) == list(range(60))
    await store.stop()


def test_a_bookie_that_runs_is_not_touched(directory: Path) -> None:
    store = opened(directory)

    for command in ("verify", "dump", "rebuild-index"):
        result = CliRunner().invoke(app, [command, str(directory)])
        assert result.exit_code == 2
        assert "stop the bookie first" in result.output

    store.close()
