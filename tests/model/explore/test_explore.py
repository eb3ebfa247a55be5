"""Small worlds of the real machines, searched to their end."""

from typing import Any

import pytest

from quorumlog.protocol.messages import AddAnswered
from quorumlog.protocol.writer import LedgerWriter
from tests.model.explore.ends import EndExplorer
from tests.model.explore.explorer import Explorer, World
from tests.model.explore.logs import LogExplorer
from tests.model.explore.parts import Broken
from tests.model.explore.rewrites import RewriteExplorer
from tests.model.explore.scope import EndScope, LogScope, RewriteScope, Scope
from tests.model.explore.scopes import ENDS, LOGS_QUICK, QUICK, REWRITES_QUICK

SMALL = Scope("one entry, one recoverer, Qw = 2", shape=(2, 2, 1))


@pytest.mark.parametrize("scope", QUICK, ids=lambda scope: scope.name)
def test_nothing_that_can_happen_breaks_an_invariant(scope: Scope) -> None:
    result = Explorer(scope).run()

    assert result.violation is None, "\n".join(result.story)
    assert result.is_complete


@pytest.mark.parametrize("scope", ENDS, ids=lambda scope: scope.name)
def test_nothing_is_told_of_a_ledger_that_bookies_do_not_keep(scope: EndScope) -> None:
    result = EndExplorer(scope).run()

    assert result.violation is None, "\n".join(result.story)
    assert result.is_complete


@pytest.mark.parametrize("scope", LOGS_QUICK, ids=lambda scope: scope.name)
def test_nothing_that_can_happen_to_a_log_breaks_a_rule(scope: LogScope) -> None:
    result = LogExplorer(scope).run()

    assert result.violation is None, "\n".join(result.story)
    assert result.is_complete


@pytest.mark.parametrize("scope", REWRITES_QUICK, ids=lambda scope: scope.name)
def test_nothing_that_happens_beside_a_rewrite_changes_what_readers_find(
    scope: RewriteScope,
) -> None:
    result = RewriteExplorer(scope).run()

    assert result.violation is None, "\n".join(result.story)
    assert result.is_complete


@pytest.mark.parametrize("shape", [(2, 2, 1), (2, 2, 2)])
def test_worlds_that_differ_in_names_stand_for_each_other(shape: tuple[int, int, int]) -> None:
    scope = Scope("one entry, one recoverer", shape=shape)
    explorer = Explorer(scope)
    plain = Explorer(scope)
    plain._begin(is_symmetric=False)

    kept = _reached(explorer)
    everything = {
        (naming.all_machines(c), naming.all_bookies(b), naming.row(r), naming.flight(f), n)
        for c, b, r, f, n in kept
        for naming in explorer.symmetry.namings
    }

    assert explorer.symmetry.counterexample() is None
    assert len(kept) < len(everything) == len(_reached(plain))


def test_a_machine_that_prefers_a_bookie_is_searched_under_every_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered = LedgerWriter._add_answered

    def deaf(self: LedgerWriter, event: AddAnswered) -> None:
        if event.position:
            answered(self, event)

    monkeypatch.setattr(LedgerWriter, "_add_answered", deaf)

    result = Explorer(SMALL).run()

    assert result.is_complete
    assert result.namings == 1


def _reached(explorer: Explorer) -> set[World]:
    first = explorer.start()
    found, todo = {first}, [first]
    while todo:
        for _, after in explorer.next(todo.pop()):
            assert not isinstance(after, Broken)
            least: Any = explorer._least(*after)
            if least not in found:
                found.add(least)
                todo.append(least)
    return found
