"""Pages that hold their lines by tests name tests that are there."""

import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("page", ["docs/reference/security.md", "docs/reference/dependencies.md"])
def test_every_test_that_the_page_names_is_there(page: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (_ROOT / page).read_text())
    assert len(named) > 10

    missing = [
        (path, name)
        for path, name in named
        if not (_ROOT / path).exists()
        or (name and f"def {name}(" not in (_ROOT / path).read_text())
    ]

    assert not missing


def test_each_line_of_the_page_of_dependencies_has_a_test() -> None:
    lines = (_ROOT / "docs/reference/dependencies.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ") and "| test |" not in line]
    assert len(rows) > 25
    assert not [row for row in rows if "`tests/" not in row]
