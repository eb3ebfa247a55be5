"""The tests, collected once in this process, and run in forked children of it."""

import fnmatch
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from _pytest.runner import runtestprotocol
from coverage import Coverage
from hypothesis import Phase, settings

from loadtest.stores import StoreServers, run_sql, store_servers
from tests.mutation.mutate.child import Notify

LEFT_OUT: Final = (
    "tests/mutation/mutants/*",
    "tests/mutation/mutate/test_*",
    "*::test_without_its_guard_a_scenario_goes_wrong*",
    "*::test_every_crash_mutant_is_found*",
    "*::test_no_seed_*",
    "*::test_*_under_every_hash_seed*",
    "*::test_scenarios_go_the_same_in_any_process*",
)
"""Tests of the tests; seeds, of which `detectors.py` has a share; and those that run the code in other
processes, which the mutant is not in.
"""


class Suite:
    """A plugin of pytest that collects, and then lets `work` run tests instead of running all.

    Parents and children share nothing but what was imported: a child sets its fixtures up by itself, save
    for the servers (Postgres, Redis), which take seconds to start.
    """

    def __init__(self, root: Path, work: Callable[["Suite"], None], *, has_servers: bool) -> None:
        self.root = root
        self.items: dict[str, pytest.Item] = {}
        self._work = work
        self._has_servers = has_servers
        self._servers: StoreServers | None = None
        self.error: BaseException | None = None

    def run(self, paths: Sequence[str]) -> None:
        """Collect the tests of files and folders, then do the work."""
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(self.root / "build" / "mutate")
        arguments = [
            "-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:faulthandler",
            "-s", "-W", "ignore::pytest.PytestAssertRewriteWarning", "--rootdir", str(self.root),
        ]  # fmt: skip
        status = pytest.main([*arguments, *paths], plugins=[self])
        if self.error is not None:
            raise self.error
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            raise SystemExit(f"the tests can't be collected: pytest ends with {status!r}")

    # --- hooks of pytest -----------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """A mutant that is found is found: the smallest example of it is nobody's concern."""
        settings.register_profile(
            "mutate",
            settings.get_profile("quorumlog"),
            phases=(Phase.explicit, Phase.generate),
        )
        settings.load_profile("mutate")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Do the work in place of pytest's loop."""
        self.items = {
            item.nodeid: item
            for item in session.items
            if not any(fnmatch.fnmatchcase(item.nodeid, pattern) for pattern in LEFT_OUT)
        }
        with ExitStack() as stack:
            if self._has_servers:
                self._servers = stack.enter_context(store_servers())
            try:
                self._work(self)
            except BaseException as error:  # noqa: BLE001 - pytest would swallow what it knows
                self.error = error
        return True

    # --- in a child ----------------------------------------------------------------------------

    def be_ready(self) -> None:
        """In a child: use the parent's servers, whose databases are named from one on again."""
        servers, conftest = self._servers, sys.modules.get("tests.conftest")
        if servers is None or conftest is None:
            return

        @contextmanager
        def shared() -> Iterator[StoreServers]:
            yield servers

        conftest.__dict__["store_servers"] = shared

    def clean_up(self) -> None:
        """After a child: it has dropped no database."""
        if self._servers is None:
            return
        from redis import Redis  # only where there are servers: it takes a while

        postgres, redis = self._servers._postgres, self._servers._redis
        tests = "SELECT datname FROM pg_database WHERE datname LIKE 'test%'"
        for name in run_sql(postgres, tests).split():
            run_sql(postgres, f"DROP DATABASE {name} WITH (FORCE)")
        with Redis.from_url(redis.url(0)) as client:
            client.flushall()

    def trial(self, nodeid: str, then: str | None) -> tuple[bool, str]:
        """Run one test: whether it passes, and what it says else. `then`: the next one's fixtures stay."""
        item = self.items[nodeid]
        reports = runtestprotocol(item, log=False, nextitem=self.items[then] if then else None)
        for report in reports:
            if report.failed:
                return False, str(report.longrepr).strip().splitlines()[-1][:200]
        return True, ""

    def recorded(self, nodeids: Sequence[str], include: Sequence[str], notify: Notify) -> None:
        """Run tests, and tell for each of them how long it took and which lines it ran."""
        cover = Coverage(data_file=None, config_file=False, include=list(include))
        for nodeid, then in itertools.zip_longest(nodeids, nodeids[1:]):
            cover.erase()
            began = time.perf_counter()
            cover.start()
            try:
                is_right, _ = self.trial(nodeid, then)
            finally:
                cover.stop()
            took = time.perf_counter() - began
            data = cover.get_data()
            lines: dict[str, Any] = {
                str(Path(name).relative_to(self.root)): sorted(data.lines(name) or ())
                for name in sorted(data.measured_files())
            }
            notify({"test": nodeid, "passes": is_right, "seconds": took, "lines": lines})
