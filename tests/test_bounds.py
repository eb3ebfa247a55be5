"""docs/reference/bounds.md is complete: each bound of the code has a row, which has its value and its test."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_ROOT: Final = Path(__file__).resolve().parent.parent
_PAGE: Final = _ROOT / "docs" / "reference" / "bounds.md"
_BOUND: Final = re.compile(r"(^|_)(MAX|KEPT|EXPIRY|WINDOW|HOURS|SPARE)(_|$)")
_ROW: Final = re.compile(
    r"^\| `(\w+)` \| ([^|]+) \| `([^`|]+)` \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE
)


class Row(NamedTuple):
    """One row of the page."""

    name: str
    value: str
    home: str
    beyond: str
    test: str


def rows() -> list[Row]:
    return [Row(*(cell.strip() for cell in found)) for found in _ROW.findall(_PAGE.read_text())]


def bounds() -> Iterator[tuple[str, str, float]]:
    """The module-level constants of the code that bound something: home, name, value."""
    for folder in ("services", "shared"):
        for path in sorted((_ROOT / folder).rglob("*.py")):
            names = [name for name in _names(path) if _BOUND.search(name)]
            if names:
                home = str(path.relative_to(_ROOT))
                dotted = home.removeprefix("shared/").removesuffix(".py").replace("/", ".")
                module = importlib.import_module(dotted)
                for name in names:
                    value = getattr(module, name)
                    if isinstance(value, int | float):
                        yield home, name, value


def _names(path: Path) -> Iterator[str]:
    for node in ast.parse(path.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in [node.target] if isinstance(node, ast.AnnAssign) else targets:
            if isinstance(target, ast.Name):
                yield target.id


def shown(name: str, value: float) -> str:
    """A value as the page says it."""
    words = name.strip("_").split("_")
    seconds = {"S": 1.0, "MS": 0.001, "HOURS": 3600.0}
    unit = next((seconds[word] for word in words if word in seconds), None)
    if unit is not None:
        value *= unit
        for size, called in ((86_400, "days"), (3600, "hours")):
            if value >= size and value % size == 0:
                return f"{value / size:,.0f} {called}"
        return f"{value:,g} s"
    if "BYTES" in words:
        for size, called in ((1 << 20, "MiB"), (1 << 10, "KiB")):
            if value >= size and value % size == 0:
                return f"{value // size:,} {called}"
        return f"{value:,} B"
    return f"{value:,}"


def test_each_bound_of_the_code_is_a_row_of_the_page_with_its_value() -> None:
    """A new bound fails here until docs/reference/bounds.md says what the first one beyond it gets."""
    code = {(home, name): shown(name, value) for home, name, value in bounds()}
    page = {(row.home, row.name): row.value for row in rows()}

    assert {key: code[key] for key in code if page.get(key) != code[key]} == {}
    assert [key for key in page if key not in code] == [], "the code has no such bound"
    assert len(rows()) == len(page), "each bound has one row"


def test_each_row_says_what_is_beyond_and_the_tests_that_are_named_are_there() -> None:
    named = re.findall(r"([\w/]+\.py)::(\w+)", _PAGE.read_text())
    for file, test in named:
        assert f"def {test}(" in (_ROOT / "tests" / file).read_text(), test
    assert len(named) == _PAGE.read_text().count("::")
    for row in rows():
        assert len(row.beyond) > 2, row


def test_what_is_remembered_of_others_has_a_test_of_the_first_one_beyond() -> None:
    remembered = _PAGE.read_text().split("\n## ")[1]

    assert remembered.startswith("Remembered state")
    assert [row for row in _ROW.findall(remembered) if row[4].strip() == "-"] == []
