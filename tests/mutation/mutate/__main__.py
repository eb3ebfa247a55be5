"""`python -m tests.mutation.mutate`: take every guard out of the code, one by one; some test must notice."""

import argparse
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import orjson

from loadtest.program import Seconds
from tests.mutation.mutate.hunt import (
    EQUIVALENT,
    FOUND,
    UNFIT,
    UNNOTICED,
    UNREACHED,
    Hunter,
    Verdict,
    root,
)
from tests.mutation.mutate.listed import equivalent, stale
from tests.mutation.mutate.places import Place, Source, files
from tests.mutation.mutate.reach import recorded
from tests.mutation.mutate.suite import Suite
from tests.support.spread import count, interruptible, progress

_DOORS: Final = (
    "tests/unit/net/test_identity.py", "tests/unit/net/test_roles.py", "tests/unit/net/test_tls.py",
    "tests/unit/net/test_tls_files.py", "tests/unit/net/test_hosts.py", "tests/unit/net/test_service.py", "tests/unit/wire/test_secret.py",
    "tests/unit/wire/test_certificate.py", "tests/unit/client/test_certificates.py",
    "tests/unit/gateway/test_public_tls.py",
)  # fmt: skip
_TOKENS: Final = ("tests/unit/gateway/tokens",)

TESTS: Final = {
    "shared/quorumlog/protocol": (
        "tests/unit/protocol", "tests/unit/wire", "tests/model/scenarios", "tests/model/explore", "tests/model/sim",
        "tests/cluster/bp46", "tests/support", "tests/unit/bookie/test_replica.py",
        "tests/model/regressions",
    ),
    "services/bookie": ("tests/unit/bookie", "tests/model/sim", "tests/cluster/bp46", "tests/model/regressions"),
    "services/metadata": ("tests/unit/metadata",),
    # Who is let in, to what, and how much of it (docs/reference/security.md).
    **{
        f"shared/quorumlog/{name}.py": _DOORS
        for name in (
            "net/identity", "net/operations", "net/sessions", "net/tls", "net/hosts",
            "certificates", "wire/secret",
        )
    },
    **{
        f"services/gateway/edge/access/{name}.py": _TOKENS
        for name in ("guard", "scopes", "callers", "quotas", "tickets")
    },
}  # fmt: skip
"""Folders and files whose guards are walked, and the tests that are asked whether they reach them."""

PRODUCT: Final = ["shared/quorumlog", "services"]
"""What is recorded, so that a record serves whatever is walked."""


@dataclass(slots=True)
class Campaign:
    """What is to be hunted, and what was until now."""

    places: list[Place]
    reasons: dict[str, str]
    verdicts: dict[str, Verdict] = field(default_factory=dict)

    def take(self, verdict: Verdict) -> None:
        """One more is done."""
        self.verdicts[verdict.name] = verdict

    def judge_listed(self) -> None:
        """What is listed with a reason is not hunted."""
        for place in self.places:
            if place.name in self.reasons:
                self.take(_verdict(place, EQUIVALENT, self.reasons[place.name]))

    def resume(self, results: Path, *, again: bool) -> None:
        """Take over what an earlier run found out about the same text. `again`: but not what it missed."""
        if not results.exists():
            return
        digests = {place.name: place.digest for place in self.places}
        for row in results.read_bytes().splitlines():
            verdict = Verdict(**orjson.loads(row))
            if digests.get(verdict.name) != verdict.digest or verdict.name in self.reasons:
                continue
            self.take(verdict)
        if again:
            for name, verdict in list(self.verdicts.items()):
                if verdict.verdict in (UNNOTICED, UNREACHED):
                    del self.verdicts[name]

    def todo(self) -> list[Place]:
        """What is left."""
        return [place for place in self.places if place.name not in self.verdicts]

    def counts(self) -> Counter[str]:
        """How many of each verdict."""
        return Counter(verdict.verdict for verdict in self.verdicts.values())


def _verdict(place: Place, verdict: str, by: str) -> Verdict:
    return Verdict(place.name, place.digest, verdict, place.first_line, by)


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation.mutate",
        description="Take each guard (if, early return, lock, awaited call, SQL condition) out of the code;"
        " each mutant runs against only the tests that reach its line, the fastest first.",
        epilog="It ends with 0 where all was noticed, 1 where something was not, 130 at Ctrl-C.",
    )
    parser.add_argument(
        "--paths", nargs="+", metavar="PATH", default=list(TESTS),
        help=f"files or folders; else {', '.join(TESTS)}",
    )  # fmt: skip
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="tests to choose from")
    parser.add_argument("--match", default="", help="only mutants whose name holds this")
    parser.add_argument(
        "--time",
        type=Seconds,
        default=3600.0,
        metavar="BUDGET",
        help="of the run: 90s, 20m, 2h (1h)",
    )
    parser.add_argument(
        "--per-mutant", type=Seconds, default=20.0, metavar="TIME",
        help="of the tests of one mutant, by the times that were recorded (20s)",
    )  # fmt: skip
    parser.add_argument(
        "--resume", action="store_true", help="go on with the results of the last run"
    )
    parser.add_argument(
        "--again", action="store_true", help="the same, and hunt once more what was unnoticed"
    )
    parser.add_argument(
        "--every", type=count, default=1, help="only each so-manieth mutant: a sample"
    )
    parser.add_argument(
        "--build", type=Path, default=root() / "build" / "mutate", metavar="DIR",
        help="where records and results are kept (build/mutate)",
    )  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="record anew which tests reach what")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a report")
    parser.add_argument("--list", action="store_true", help="print the mutants' names, hunt none")
    return parser.parse_args(arguments)


def tests_of(options: argparse.Namespace) -> list[str]:
    """Those that may reach what is walked."""
    if options.tests:
        return list(options.tests)
    groups = [
        tests
        for folder, tests in TESTS.items()
        if any(
            path.startswith(folder) or folder.startswith(path.rstrip("/")) for path in options.paths
        )
    ]
    return list(dict.fromkeys(name for tests in groups for name in tests))


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    sources = [Source.read(path, root()) for path in files(root(), options.paths)]
    everything = [place for source in sources for place in source.places()]
    places = [place for place in everything if options.match in place.name][:: options.every]
    reasons = equivalent()
    campaign = Campaign(places, reasons)
    old = stale(reasons, (each.name for each in sources), (each.name for each in everything))
    if options.list:
        print("\n".join(place.name for place in places))
        return 0
    results = options.build / "results.jsonl"
    if options.resume or options.again:
        campaign.resume(results, again=options.again)
    elif results.exists():
        results.unlink()
    campaign.judge_listed()
    began = time.monotonic()
    with interruptible() as end:
        if campaign.todo():
            _hunt(campaign, options, began)
    for name in old:
        print(f"stale  {name}: it is listed, and the code has no such guard")
    _notify(campaign, options.json, time.monotonic() - began)
    counts = campaign.counts()
    unnoticed = counts[UNNOTICED] + counts[UNREACHED]
    print(
        f"mutate: {len(places)} mutants, {counts[FOUND]} found, {unnoticed} unnoticed,"
        f" {counts[EQUIVALENT]} equivalent, {len(campaign.todo()) + counts[UNFIT]} left{end.word}"
    )
    return end.status(is_right=not unnoticed and not old)


def _hunt(campaign: Campaign, options: argparse.Namespace, began: float) -> None:
    """All that is left, until the time is over."""
    cache = options.build / "reach.json"
    if options.fresh:
        cache.unlink(missing_ok=True)

    def work(suite: Suite) -> None:
        sources = sorted({*files(root(), PRODUCT), *files(root(), options.paths)})
        reach = recorded(suite, cache, sources, _say)
        _say(f"{len(reach.tests)} tests reach the code, after {time.monotonic() - began:.0f} s")
        gc.collect()
        hunter = Hunter(suite, reach, seconds=options.per_mutant)
        gc.freeze()  # what all children share stays where it is
        _each(campaign, hunter.hunt, options.build / "results.jsonl", began + options.time)

    names = tests_of(options)
    has_servers = any("metadata" in name or "tokens" in name for name in names)
    Suite(root(), work, has_servers=has_servers).run(names)


def _each(
    campaign: Campaign, hunt: Callable[[Place], Verdict], results: Path, until: float
) -> None:
    todo = campaign.todo()
    done = len(campaign.places) - len(todo)
    results.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        bar = stack.enter_context(progress("mutants", len(campaign.places)))
        file = stack.enter_context(results.open("ab", buffering=0))
        for place in todo:
            if time.monotonic() > until:
                return
            verdict = hunt(place)
            campaign.take(verdict)
            file.write(orjson.dumps(verdict.line_of_json()) + b"\n")
            done += 1
            bar.update(completed=done)


def _notify(campaign: Campaign, report: Path | None, took: float) -> None:
    """What was not noticed, by file, and the report."""
    for place in campaign.places:
        verdict = campaign.verdicts.get(place.name)
        if verdict is None or verdict.verdict in (FOUND, EQUIVALENT):
            continue
        said = f", {verdict.tests} tests" if verdict.tests else ""
        left = f", {verdict.left} more reach it" if verdict.left else ""
        why = f": {verdict.by}" if verdict.by else ""
        print(f"{verdict.verdict}  {place.first_line}  {place.name}{said}{left}{why}")
    if report is not None:
        rows = [each.line_of_json() for each in campaign.verdicts.values()]
        body = {"counts": campaign.counts(), "seconds": round(took, 1), "mutants": rows}
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_bytes(orjson.dumps(body, option=orjson.OPT_INDENT_2))


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
