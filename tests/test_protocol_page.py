"""docs/protocol.md is the norm: what the code cites stands there, and what it names is in the code."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.model.scenarios.script import FOLDER
from tests.mutation.mutants.ends import END_MUTANTS
from tests.mutation.mutants.list import MUTANTS
from tests.mutation.mutants.logs import LOG_MUTANTS
from tests.mutation.mutants.positions import POSITION_MUTANTS
from tests.mutation.mutants.queues import QUEUE_MUTANTS
from tests.mutation.mutants.subscriptions import SUBSCRIPTION_MUTANTS
from tests.support.matrix import cited
from tests.unit.bookie.mutants import STORAGE_MUTANTS

_ROOT: Final = Path(__file__).resolve().parent.parent
_PAGE: Final = (_ROOT / "docs" / "protocol.md").read_text()

_CLAUSE_WORDS: Final = 200
"""A longer clause is two, or a clause and an ADR; a longer rule has titled groups of clauses."""

_LABELS: Final = ("- Kept by: ", "- Mutant: ", "Without the rule: ")

_HEADING: Final = re.compile(r"^### (?:Rule (\d+[a-z]?)|([IXL]\d+))$", re.MULTILINE)


def headings() -> set[str]:
    """The ids that the page defines: "7", "16a", "I12", "X1", "L3"."""
    return {rule or label for rule, label in _HEADING.findall(_PAGE)}


def code(*folders: str) -> Iterator[Path]:
    for folder in folders:
        for suffix in ("*.py", "*.txt"):
            yield from (_ROOT / folder).rglob(suffix)


def lines(word: str) -> Iterator[str]:
    """The page's lines "- <word>: ..."."""
    yield from re.findall(rf"^- {word}: (.+)$", _PAGE, re.MULTILINE)


def located(name: str) -> Path:
    """A file as the page names it: the library's folders stand without their root."""
    return _ROOT / name if name.startswith("services/") else _ROOT / "shared/quorumlog" / name


def test_each_id_that_the_code_cites_has_a_heading() -> None:
    defined = headings()

    strange = {
        str(path.relative_to(_ROOT)): sorted(unknown)
        for path in code("shared/quorumlog", "services", "tests", "loadtest")
        if path.name != Path(__file__).name and (unknown := cited(path.read_text()) - defined)
    }

    assert not strange


def test_each_heading_is_cited_by_the_code() -> None:
    everywhere = "\n".join(
        path.read_text() for path in code("shared/quorumlog", "services", "tests", "loadtest")
    )

    assert not headings() - cited(everywhere)


def test_each_heading_stands_once() -> None:
    found = [rule or label for rule, label in _HEADING.findall(_PAGE)]

    assert len(found) == len(set(found))


def test_the_code_that_keeps_a_rule_is_there() -> None:
    lost = []
    for line in lines("Kept by"):
        for name, guards in re.findall(r"`([\w/]+\.py)` \(([^)]*)\)", line):
            text = located(name).read_text() if located(name).is_file() else ""
            lost += [
                (name, guard)
                for guard in re.findall(r"`(\w+)`", guards)
                if not re.search(rf"(def|class) {guard}\b", text)
            ]

    assert not lost


def test_each_rule_names_its_code_and_what_shows_its_absence() -> None:
    sections = re.split(r"^### ", _PAGE, flags=re.MULTILINE)[1:]

    bare = [
        section.partition("\n")[0]
        for section in sections
        if section.startswith("Rule") and not all(label in section for label in _LABELS)
    ]

    assert not bare


def test_the_scripts_and_mutants_that_the_page_names_are_there() -> None:
    scripts = {str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.rglob("*.txt")}
    mutants = {mutant.name for mutant in (*MUTANTS, *END_MUTANTS, *LOG_MUTANTS, *POSITION_MUTANTS)}
    mutants |= {mutant.name for mutant in (*QUEUE_MUTANTS, *SUBSCRIPTION_MUTANTS)}
    mutants |= {mutant.name for mutant in STORAGE_MUTANTS}

    strange = [
        name
        for line in lines("Shown by")
        for name in re.findall(r"`([^`]+)`", line)
        if name not in scripts and not (_ROOT / name).exists()
    ]
    strange += [
        name
        for line in lines("Mutant")
        for name in re.findall(r'"([^"]+)"', line)
        if name not in mutants
    ]

    assert not strange


def clauses() -> Iterator[tuple[str, str]]:
    """Each numbered clause of a rule, with the rule's heading."""
    for section in re.split(r"^### ", _PAGE, flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        for clause in re.findall(r"^\d+\. .+(?:\n   .+)*", text, re.MULTILINE):
            yield heading, clause


def test_a_clause_is_short() -> None:
    assert not [heading for heading, clause in clauses() if len(clause.split()) > _CLAUSE_WORDS]


def test_the_clauses_of_a_long_rule_stand_in_short_groups() -> None:
    long = []
    for section in re.split(r"^### ", _PAGE, flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        if not heading.startswith("Rule"):
            continue
        text = re.split(r"^(?:Without the rule:|- Kept by)", text, flags=re.MULTILINE)[0]
        groups = re.split(r"^(?=\*[A-Z][^*\n]*\*(?:,|$))", text, flags=re.MULTILINE)
        long += [(heading, group[:40]) for group in groups if len(group.split()) > _CLAUSE_WORDS]

    assert not long


def test_the_clauses_of_a_rule_are_numbered_from_one() -> None:
    """Others cite "rule 18d, clause 8"."""
    numbers: dict[str, list[int]] = {}
    for heading, clause in clauses():
        if heading.startswith("Rule"):
            numbers.setdefault(heading, []).append(int(clause.partition(".")[0]))

    assert numbers
    assert all(found == [*range(1, len(found) + 1)] for found in numbers.values())


def test_what_checks_a_clause_is_there() -> None:
    judges = "\n".join(path.read_text() for path in code("tests"))
    named = [
        name
        for line in re.findall(r"[Cc]hecked\s+by:\s+((?:`[^`]+`(?:,\s+|\s+and\s+)?)+)", _PAGE)
        for name in re.findall(r"`([^`]+)`", line)
    ]

    assert named
    assert not [
        name
        for name in named
        if not (_ROOT / name).exists()
        and not (FOLDER / f"{name}.txt").exists()
        and f"def {name}(" not in judges
    ]


def test_the_checks_that_an_invariant_names_are_there() -> None:
    judges = "\n".join(
        (_ROOT / "tests" / name).read_text()
        for name in (
            "support/invariants.py",
            "support/history.py",
            "support/log_history.py",
            "model/logs/judge.py",
            "model/sim/checker.py",
        )
    )
    named = {
        name
        for found in re.findall(r"Checks?(?: \(H\))?:\s+((?:[^.#]|\.\w)+)", _PAGE)
        for name in re.findall(r"`([a-z_]+)`", found)
    }

    assert named
    assert not {name for name in named if f"def {name}" not in judges}


def test_nothing_cites_a_page_that_is_not_here() -> None:
    """Of "(docs/reference/http.md, Bounds)" the file is there, and has that heading."""
    named = re.compile(r"\b(docs/[\w/-]+\.md)(?:, \"?([A-Z][\w ]+?)\"?)?[).]")
    lost = []
    for path in code("shared/quorumlog", "services", "tests", "loadtest"):
        for page, heading in named.findall(path.read_text()):
            text = (_ROOT / page).read_text() if (_ROOT / page).is_file() else None
            if text is None or (heading and f"# {heading}\n" not in text):
                lost.append((str(path.relative_to(_ROOT)), page, heading))

    assert not lost
