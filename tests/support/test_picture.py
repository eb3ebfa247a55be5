"""The picture of README.md is the one that the program draws."""

from tests.support.picture import FILE, drawn


def test_the_picture_of_the_readme_is_what_make_docs_draws() -> None:
    assert FILE.read_text(encoding="utf-8") == drawn()
