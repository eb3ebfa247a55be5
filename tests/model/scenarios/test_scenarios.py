"""Each scenario goes as it is written down. `make scenarios` rewrites; a person reads the diff.

A scenario of a rule names the guards without which it goes otherwise: they are the rule's switches.
"""

from pathlib import Path

import pytest

from tests.model.scenarios.script import FOLDER, goes_wrong, paths, played, switches
from tests.model.scenarios.stage import Stage, Wrong
from tests.mutation.mutants.list import MUTANTS
from tests.mutation.mutants.logs import LOG_MUTANTS
from tests.support.salted import printed_under_salts

MUTANT_OF = {mutant.name: mutant for mutant in (*MUTANTS, *LOG_MUTANTS)}
SWITCHES = [(path, name) for path in paths() for name in switches(path)]


@pytest.mark.parametrize("path", paths(), ids=lambda path: str(path.relative_to(FOLDER)))
def test_a_scenario_goes_as_it_is_written_down(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# "), "a scenario says first what it shows"
    assert "VIOLATION" not in text
    assert played(path) == text


@pytest.mark.parametrize(("path", "name"), SWITCHES, ids=lambda part: getattr(part, "stem", part))
def test_without_its_guard_a_scenario_goes_wrong(path: Path, name: str) -> None:
    assert goes_wrong(path, MUTANT_OF[name])


def test_scenarios_go_the_same_in_any_process() -> None:
    assert printed_under_salts("-m", "tests.model.scenarios") == {""}


def test_a_line_that_nobody_can_play_is_an_error() -> None:
    with pytest.raises(Wrong):
        Stage().play("b1 makes coffee")
