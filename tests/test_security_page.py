"""docs/security.md names tests that are there."""

import re
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent


def test_every_test_that_the_page_names_is_there() -> None:
    named = re.findall(
        r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (_ROOT / "docs/security.md").read_text()
    )
    assert len(named) > 10

    missing = [
        (path, name)
        for path, name in named
        if not (_ROOT / path).exists()
        or (name and f"def {name}(" not in (_ROOT / path).read_text())
    ]

    assert not missing
