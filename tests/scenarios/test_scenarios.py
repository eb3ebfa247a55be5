"""Each scenario goes as it is written down. `make scenarios` rewrites; a person reads the diff."""

from pathlib import Path

import pytest

from tests.scenarios.script import FOLDER, paths, played
from tests.scenarios.stage import Stage, Wrong


@pytest.mark.parametrize("path", paths(), ids=lambda path: str(path.relative_to(FOLDER)))
def test_a_scenario_goes_as_it_is_written_down(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# "), "a scenario says first what it shows"
    assert played(text) == text


def test_a_line_that_nobody_can_play_is_an_error() -> None:
    with pytest.raises(Wrong):
        Stage().play("b1 makes coffee")
