"""The only retry of tests, as a pytest plugin.

A test that fails with `DeadlineMissed` and nothing else is run once more, and the summary names
it: on a shared machine a deadline may pass although nothing is wrong. A wrong answer is never
forgiven. See docs/internals/testing.md.
"""

from collections.abc import Generator
from typing import Final

import pytest
from _pytest.runner import runtestprotocol

from tests.support.waiting import DeadlineMissed

_MISSED: Final = pytest.StashKey[bool]()
_PROPERTY: Final = "retried-after"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note for each phase whether it failed by a missed deadline only."""
    if call.excinfo is not None:
        earlier = item.stash.get(_MISSED, True)
        item.stash[_MISSED] = earlier and _is_only_missed(call.excinfo.value)
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test, and once more where it only missed a deadline."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    failed = [report for report in reports if report.failed]
    has_only_missed = item.stash.get(_MISSED, False)
    if failed and has_only_missed:
        item.user_properties.append((_PROPERTY, str(failed[0].longrepr).splitlines()[-1]))
        _forget_failed_fixtures(item)
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests that were run twice."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == _PROPERTY and report.when == "call":
                    terminalreporter.write_line(f"run twice: {report.nodeid}: {value}")


def _is_only_missed(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_is_only_missed(part) for part in error.exceptions)
    return isinstance(error, DeadlineMissed)


def _forget_failed_fixtures(item: pytest.Item) -> None:
    """Let the second run make its fixtures anew, those that failed above all."""
    assert isinstance(item, pytest.Function)
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        for definition in definitions:
            if definition.cached_result is not None and definition.cached_result[2] is not None:
                definition.cached_result = None
    item._initrequest()
