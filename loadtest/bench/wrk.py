"""Appends with wrk, a load generator in C from Debian's packages."""

import shutil
from pathlib import Path
from typing import Final

import orjson

from loadtest.bench.measure import KIB, Absent, Failed, Figures, Meter, by_program

_SCRIPT: Final = Path(__file__).with_name("wrk.lua")


async def appends(meter: Meter, url: str, connections: int, seconds: float) -> Figures:
    """Append one entry per request. Raises: Absent, Failed."""
    wrk = shutil.which("wrk")
    if wrk is None:
        raise Absent("wrk is not installed (apt-get install wrk)")
    # wrk accepts only whole seconds, at least one.
    duration = f"-d{max(1, round(seconds))}s"
    # An answer that takes seconds on a busy disk counts as a latency, not as an error.
    argv = [
        wrk, "-t1", f"-c{connections}", duration, "--timeout", "30s", "-s", str(_SCRIPT), url, "--", str(KIB),
    ]  # fmt: skip
    reported = orjson.loads((await by_program(meter, argv)).splitlines()[-1])
    if reported["errors"]:
        raise Failed(f"wrk met {reported['errors']} errors")
    meter.seconds = reported["us"] / 1e6
    times = {f"p{each:g} ms": reported["latency_us"][f"{each:g}"] / 1e3 for each in (50, 99, 99.9)}
    return meter.figures(reported["requests"], KIB) | times
