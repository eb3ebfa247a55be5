"""Small worlds of the real machines, searched to their end."""

import pytest

from tests.explore.explorer import Explorer, Scope
from tests.explore.scopes import QUICK


@pytest.mark.parametrize("scope", QUICK, ids=lambda scope: scope.name)
def test_nothing_that_can_happen_breaks_an_invariant(scope: Scope) -> None:
    result = Explorer(scope).run()

    assert result.violation is None, "\n".join(result.story)
    assert result.is_complete
