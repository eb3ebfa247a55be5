"""The benchmark beside the Durable Streams server runs, and each reader of both servers gets what was appended."""

import orjson
import pytest

from loadtest import npm
from loadtest.bench.__main__ import main
from loadtest.bench.durable_streams import SERVER, SYSTEMS, WORKS

OPTIONS = "--time 0.1 --rounds 2 --read-mib 1 --readers 3 --records 4 --rate 50 --json"


def test_each_measurement_of_both_servers_gives_figures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    try:
        npm.needs("wrk")
        npm.installed(SERVER)
    except npm.Absent as missing:
        pytest.skip(f"{missing}: the benchmark was not run")

    # Two rounds, one of which must come to its end: a slow machine may leave work out of the other.
    assert main(["--only", "durable-streams", *OPTIONS.split()]) == 0

    measured = orjson.loads(capsys.readouterr().out)["measurements"]
    assert set(measured) == {f"{system}: {work}" for work in WORKS for system in SYSTEMS}
    for name, rounds in measured.items():
        assert any(figures and figures["entries/s"] > 0 for figures in rounds), name
        assert all("all but client us" in figures for figures in rounds if figures), name
