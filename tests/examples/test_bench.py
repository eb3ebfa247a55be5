"""The benchmark beside the Durable Streams server runs, and each reader of both servers gets what was appended."""

from pathlib import Path
from typing import Final

import pytest

from loadtest import npm
from loadtest.durable_streams.__main__ import run, table
from loadtest.durable_streams.systems import HERE
from loadtest.durable_streams.works import WORKS, Scale

pytestmark = pytest.mark.asyncio(loop_scope="package")

_SCALE: Final = Scale(seconds=0.1, read_bytes=256 << 10, readers=3, records=4, rate=50.0)


async def test_each_measurement_of_both_servers_gives_figures(tmp_path: Path) -> None:
    systems = {"quorumlog", "their server"}
    try:
        npm.needs("wrk")
        npm.installed(HERE)
    except npm.Absent as missing:
        pytest.skip(f"{missing}: the benchmark was not run")

    # Two rounds: what a slow machine left out of one has another chance.
    results = await run(_SCALE, 2, WORKS, tmp_path)

    assert set(results) == {(work.name, system) for work in WORKS for system in systems}
    for (name, _), rounds in results.items():
        assert all(figures["entries/s"] > 0 for figures in rounds), name
    assert len(table(results).splitlines()) == 2 + len(results)
