"""Which worker gets which test, as a plugin of pytest: what takes seconds to start, starts once.

Any worker may run any test: ports are leased (ADR 2), and each worker has servers and clusters of its own.
The tests of a path in `TOGETHER` go to one worker. The mark `xdist_group` does not do that: of the node ids of
pytest 9.2 pytest-xdist 3.8 loses the group without a word, and each worker starts everything.
"""

from typing import Any, Final

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

TOGETHER: Final = (
    "tests/unit/client/", "tests/cluster/e2e/", "tests/cluster/examples/", "tests/console/", "tests/unit/gateway/test_browser.py", "tests/spark/",
    "tests/test_architecture.py",
)  # fmt: skip
"""Where tests share a cluster, a browser, Spark's session or the syntax trees of all modules."""

APART: Final = ("tests/cluster/e2e/test_run.py", "tests/spark/test_chaos.py")
"""Files that share nothing, and are long."""

FIRST: Final = ("tests/spark/", "tests/unit/transactions/")
"""Where single tests take a minute and would be the last by name: one worker alone would end the run."""

SEARCHES: Final = ("tests/model/", "tests/mutation/")
"""Where tests keep a core busy, while most others wait for processes and timers for much of their time."""


class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
    """The largest group first, then test by test."""

    def _split_scope(self, nodeid: str) -> str:
        """What goes to one worker together with this test."""
        if nodeid.startswith(APART):
            return nodeid
        return next((path for path in TOGETHER if nodeid.startswith(path)), nodeid)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with what takes longest, and spread the searches evenly among the tests that mostly wait.

    In one process without workers, the order within the folders stays: what they share would start again.
    """
    place = dict.fromkeys(items, 0.0)
    if hasattr(config, "workerinput"):
        for is_search in (False, True):
            kind = [item for item in items if item.nodeid.startswith(SEARCHES) is is_search]
            place.update((item, index / len(kind)) for index, item in enumerate(kind))
    items.sort(key=lambda item: (not item.nodeid.startswith(FIRST), place[item]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """How `pytest -n` gives tests to its workers."""
    return Scheduling(config, log)
