"""`make fuzz`: bytes into everything that parses them, then requests into every service."""

import argparse
import asyncio
import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from loadtest.program import Seconds
from services.local.process import Become, in_child
from tests.outside.fuzz.http import Heard, ask_all
from tests.outside.fuzz.samples import SAMPLES
from tests.outside.fuzz.targets import TARGETS
from tests.support.spread import CORES

ROOT: Final = Path(__file__).resolve().parents[3]
FOUND: Final = Path(__file__).with_name("found")
"""Inputs that once showed a defect, a folder for each target; the tests replay them."""

_RUNS: Final = re.compile(r"stat::number_of_executed_units:\s*(\d+)")


def feed(name: str, seconds: int, seed: int, build: Path) -> tuple[str, int, str]:
    """Fuzz one target; its name, how many runs, and what is wrong (or "")."""
    corpus = build / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, sample in enumerate(SAMPLES[name]):
        (corpus / f"sample-{number}").write_bytes(sample)
    known = [str(path) for path in (FOUND / name,) if path.is_dir()]
    argv = [
        sys.executable, "-m", "tests.outside.fuzz.feed", name, str(corpus), *known,
        f"-max_total_time={seconds}", f"-seed={seed}", "-max_len=4096", "-timeout=20",
        "-rss_limit_mb=2048", "-print_final_stats=1", f"-artifact_prefix={build}/{name}-",
    ]  # fmt: skip
    done = subprocess.run(
        argv,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'shared'}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        preexec_fn=in_child(Become.SELF, signal.SIGKILL),
    )
    output = done.stdout.decode(errors="replace")
    (build / f"{name}.txt").write_text(output)
    runs = _RUNS.search(output)
    return name, int(runs[1]) if runs else 0, output[-3000:] if done.returncode else ""


def feed_all(total_s: float, seed: int, build: Path, names: list[str]) -> tuple[int, int]:
    """Fuzz these targets, as many at a time as there are cores; runs and crashes."""
    if importlib.util.find_spec("atheris") is None:
        print("no atheris here: bytes are not fuzzed (it is in the extra `fuzz`)")
        return 0, 0
    rounds = -(-len(names) // CORES)
    each_s = max(1, int(total_s / rounds))
    runs = crashes = 0
    # The main thread forks all children, with which the kernel ends them: they wait in others.
    with ThreadPoolExecutor(CORES) as pool:
        for name, count, wrong in pool.map(lambda name: feed(name, each_s, seed, build), names):
            runs += count
            print(f"  {name}: {count} runs{', CRASHED' if wrong else ''}", flush=True)
            if wrong:
                crashes += 1
                print(wrong)
    return runs, crashes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.outside.fuzz")
    parser.add_argument("--time", type=Seconds, default=120.0, help="half for bytes, half for HTTP")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--targets", nargs="*", choices=sorted(TARGETS), default=list(TARGETS))
    parser.add_argument("--only", choices=("bytes", "http"))
    asked = parser.parse_args()
    build = ROOT / "build" / "fuzz"
    build.mkdir(parents=True, exist_ok=True)
    share = 1.0 if asked.only else 0.5
    runs = crashes = 0
    if asked.only != "http":
        runs, crashes = feed_all(asked.time * share, asked.seed, build, asked.targets)
    heard: list[Heard] = []
    if asked.only != "bytes":
        heard = asyncio.run(ask_all(asked.time * share, asked.seed, build))
    for service in heard:
        print(f"  {service.service}: {service.requests} requests")
        if not service.is_right:
            print(service.output[-20_000:])
    wrong = Counter(service.is_right for service in heard)[False]
    requests = sum(service.requests for service in heard)
    # Of what did not run nothing is claimed: no atheris, or a service that nobody could ask.
    is_missing = (asked.only != "http" and not runs) or (asked.only != "bytes" and not requests)
    print(f"fuzz: {runs} runs, {requests} requests, {crashes} crashes, {wrong} violations")
    return 1 if crashes or wrong or is_missing else 0


if __name__ == "__main__":
    sys.exit(main())
