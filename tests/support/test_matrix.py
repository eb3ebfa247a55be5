"""The matrix in docs/internals agrees with the code, and each of its norms is checked."""

import re

from tests.support.invariants import CHECKS
from tests.support.matrix import NORMS, PAGE, WORLDS, asked_in, cited, rows, with_matrix

NOT_COVERED = PAGE.parent / "not-covered.md"


def test_the_page_has_the_matrix_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")

    assert with_matrix(page) == page, "run `make docs`"


def test_each_norm_is_checked_by_something() -> None:
    assert [row.norm.label for row in rows() if not row.is_checked] == []


def test_each_invariant_is_judged_in_a_world_or_by_a_test() -> None:
    bare = [
        row.norm.label
        for row in rows()
        if row.norm.label[0] in "IL" and not row.judges and not row.tests
    ]

    assert bare == []


def test_each_named_check_is_asked_in_a_world_and_named_by_a_norm() -> None:
    asked = frozenset[str]().union(*map(asked_in, WORLDS))
    page = NORMS.read_text(encoding="utf-8")

    assert asked == {check.__name__ for check in CHECKS}
    assert [name for name in sorted(asked) if f"`{name}`" not in page] == []


def test_the_norms_without_a_script_are_those_that_the_page_excuses() -> None:
    reported = re.search(
        r"^(Rules [^:]*) have no script of their own", NOT_COVERED.read_text(), re.MULTILINE
    )
    without = {
        row.norm.label for row in rows() if row.norm.label[0] not in "IL" and not row.scripts
    }

    assert reported is not None
    assert without == cited(reported[1])
