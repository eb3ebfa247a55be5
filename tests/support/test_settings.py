"""The tables of settings are those of the models, and each setting says what it is."""

import re

import pytest

from quorumlog.net.settings import unit_of
from tests.support.settings import MODELS, PAGES, ROOT, own_fields, tables_in, with_tables

_NAMED = re.compile(r"`([A-Z]+(?:_[A-Z]+)+)(?:=[^`]*)?`")
_OTHER_NAMES = {
    "JAVA_HOME", "METADATA_CUTS", "IN_RECOVERY", "PR_SET_PDEATHSIG", "FS_IOC_SHUTDOWN",
    "VERIFY_CRL_CHECK_LEAF", "SSL_CERT_FILE", "ADMIN_DSN", "PYSPARK_VERSIONS",
}  # fmt: skip
"""Names of Spark and make, a state; of the kernel; of OpenSSL, of a page's shell, of the tests."""


def names_in_code() -> set[str]:
    """Constants, and the variables of the command line."""
    sources = (path for folder in ("shared", "services") for path in (ROOT / folder).rglob("*.py"))
    return {
        name for path in sources for name in re.findall(r"[A-Z]+(?:_[A-Z]+)+", path.read_text())
    }


def test_the_pages_have_the_tables_of_the_models() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")

        assert with_tables(text) == text, "run `make docs`"


def test_each_model_has_a_table() -> None:
    assert sorted(
        name for page in PAGES for name in tables_in(page.read_text(encoding="utf-8"))
    ) == sorted(MODELS)


@pytest.mark.parametrize("service", MODELS)
def test_each_setting_says_what_it_is_and_in_which_unit(service: str) -> None:
    fields = own_fields(MODELS[service])

    assert [name for name, field in fields.items() if not field.description] == []
    bare = [n for n, field in fields.items() if field.annotation is float and not unit_of(n)]
    assert bare == [], "a name ends with its unit"


def test_each_setting_that_a_page_names_is_one_or_a_constant() -> None:
    settings = {name.upper() for model in MODELS.values() for name in model.model_fields}
    files = {f"{name}_FILE" for name in settings}  # of secrets
    known = settings | files | names_in_code() | _OTHER_NAMES
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    strays = {
        (str(page.relative_to(ROOT)), name)
        for page in pages
        if page.name != "CHANGELOG.md"
        for name in _NAMED.findall(page.read_text(encoding="utf-8"))
        if name not in known
    }

    assert strays == set()
