"""`python -m tests.support.matrix`: which technique checks which rule, invariant and counter-example.

The matrix is generated from the code. Norms and their titles come from docs/protocol.md. A script is a
scenario that cites a norm. A world judges an invariant if its code calls a check whose docstring names
the invariant. Mutants name the norm that their guard keeps, and tests cite norms.
The matrix is a part of docs/internals/verification.md. Without an argument the program prints the matrix,
`--write` puts it into the page.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from tests.model.explore.log_judge import LogJudge
from tests.model.explore.log_parts import LogParts
from tests.model.explore.rewrite_judge import RewriteJudge
from tests.model.logs.judge import Judge
from tests.model.scenarios.script import FOLDER, switches
from tests.model.scenarios.script import paths as scripts
from tests.mutation.mutants.ends import END_MUTANTS
from tests.mutation.mutants.hunt import Mutant
from tests.mutation.mutants.list import MUTANTS
from tests.mutation.mutants.logs import CLAIMS, LOG_MUTANTS
from tests.support import history, log_history
from tests.support.invariants import CHECKS
from tests.unit.autorecovery.test_guards import GUARDS as AUTORECOVERY
from tests.unit.bookie.mutants import STORAGE_MUTANTS, by_crashes, by_flips
from tests.unit.gateway.streams.test_forks import GUARDS as FORKS_READ
from tests.unit.metadata.test_forks import GUARDS as FORKS
from tests.unit.metadata.test_guards import GUARDS as METADATA

ROOT: Final = Path(__file__).resolve().parents[2]
NORMS: Final = ROOT / "docs" / "protocol.md"
PAGE: Final = ROOT / "docs" / "internals" / "verification.md"
BEGIN: Final = "<!-- matrix: written by `python -m tests.support.matrix --write` -->\n"
END: Final = "<!-- end of the matrix -->\n"

WORLDS: Final = {
    "E": ("model/explore",),
    "S": ("model/sim/*.py",),
    "W": ("model/sim/services", "model/sim/bookie.py"),
}
"""Where the code of a world asks named checks. Whole services keep their ledgers in the swarm's bookies."""

SEARCHES: Final = {by_crashes: "K", by_flips: "F"}
META: Final = ("explore", "scenarios", "sim", "mutants", "support", "mutate")
"""Folders whose citations count elsewhere, or are no tests of the product."""

_LABEL: Final = re.compile(r"\b([IXL]\d{1,2})\b")
_RULES: Final = re.compile(
    r"\b[Rr]ules?\s+(\d+[a-z]?(?:(?:,\s+|\s+(?:and|to)\s+|,?\s+and\s+)\d+[a-z]?)*)"
)
_SECTION: Final = re.compile(
    r"^### (?:Rule (\d+[a-z]?)|([IXL]\d+))\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL
)


def cited(text: str) -> set[str]:
    """The norms that a text cites: "7", "16a", "I12". "rules 22 to 28" cites only 22 and 28."""
    rules = {number for found in _RULES.findall(text) for number in re.findall(r"\d+\w?", found)}
    return rules | set(_LABEL.findall(text))


@dataclass(frozen=True, slots=True)
class Norm:
    """A rule, an invariant, a counter-example or a claim of liveness."""

    label: str
    title: str
    text: str

    @property
    def link(self) -> str:
        name = f"rule-{self.label}" if self.is_rule else self.label.lower()
        return f"[{self.label}](../protocol.md#{name})"

    @property
    def is_rule(self) -> bool:
        return self.label[0].isdigit()


def norms() -> list[Norm]:
    """All norms, as the page of norms has them, in its order."""
    found = []
    for rule, label, text in _SECTION.findall(NORMS.read_text(encoding="utf-8")):
        bold = re.match(r"\*\*(.+?)\*\*", text, re.DOTALL)
        title = " ".join((bold[1] if bold else re.split(r"[.:]\s| \(", text)[0]).split())
        found.append(Norm(rule or label, title.rstrip(".,:;"), text))
    return found


# --- who judges --------------------------------------------------------------------------------------


@cache
def asked_in(world: str) -> frozenset[str]:
    """The named checks that the code of a world asks."""
    named = {check.__name__ for check in CHECKS}
    return frozenset(
        node.attr
        for pattern in WORLDS[world]
        for path in _modules(pattern)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in named
    )


def _modules(pattern: str) -> Iterator[Path]:
    for path in (ROOT / "tests").glob(pattern):
        yield from path.glob("*.py") if path.is_dir() else (path,)


def judged() -> Iterator[tuple[str, set[str]]]:
    """The letter of each judge, and the norms that one of its checks names."""
    for world in WORLDS:
        for check in CHECKS:
            if check.__name__ in asked_in(world):
                yield world, _head(check) | _named(check.__name__)
    owned = {
        "E": (LogJudge, LogParts, RewriteJudge),
        "L": (Judge, log_history.Checker),
        "H": HISTORIES,
    }
    for letter, owners in owned.items():
        for owner in owners:
            for name, check in vars(owner).items():
                yield letter, _head(check) | (_named(name) if _head(check) else set())


HISTORIES: Final = (history.Checker, log_history.Checker)


def _head(check: Any) -> set[str]:
    """What a check's docstring says before its colon, or in parentheses: "I1, I12: ... (rule 16a)."."""
    text = (getattr(check, "__doc__", None) or "").partition("Source:")[0]
    head, colon, _ = text.partition(":")
    return cited(text) if colon and re.match(r"([IL]\d+|Rules? \d+)", head) else set()


def _named(name: str) -> set[str]:
    """The norms whose section of the page names a check, a script or a test."""
    return {norm.label for norm in _all_norms() if f"`{name}`" in norm.text}


@cache
def _all_norms() -> tuple[Norm, ...]:
    return tuple(norms())


# --- what is taken out -------------------------------------------------------------------------------


def hunted() -> Iterator[tuple[str, set[str]]]:
    """The letter of what finds each mutant, and the norms that it names."""
    for mutant in (*MUTANTS, *END_MUTANTS, *LOG_MUTANTS):
        yield _finder(mutant), cited(mutant.rule)
    for stored in STORAGE_MUTANTS:
        yield SEARCHES.get(stored.claim, "P"), cited(stored.rule)
    for guard in (*METADATA, *FORKS, *FORKS_READ, *AUTORECOVERY):
        yield "P", cited(guard.rule)


def _finder(mutant: Mutant) -> str:
    if mutant.is_equivalent:
        return "="
    if mutant in LOG_MUTANTS:
        return "C" if mutant.name in CLAIMS else "L" if mutant.scope is None else "E"
    if mutant.draw_services:
        return "W"
    return "S" if mutant.scope is None else "E"


# --- scripts and tests -------------------------------------------------------------------------------


def scripted() -> Iterator[tuple[str, set[str]]]:
    """Each script, and the norms that it shows: by its name, its comments, or the mutants it misses."""
    rules = {mutant.name: mutant.rule for mutant in (*MUTANTS, *END_MUTANTS, *LOG_MUTANTS)}
    for path in scripts():
        name = str(path.relative_to(FOLDER).with_suffix(""))
        lines = path.read_text(encoding="utf-8").splitlines()
        comments = [line.lstrip("# ") for line in lines if line.startswith("#")]
        missed = [rules[mutant] for mutant in switches(path)]
        own = re.findall(r"^rule_(\d+[a-z]?)_", path.name)
        yield name, _named(name) | cited(" ".join((*comments, *missed))) | set(own)


def tested() -> Iterator[tuple[str, set[str]]]:
    """The folder of each test that cites a norm, or that a norm's section names."""
    for path in sorted((ROOT / "tests").glob("*/**/test_*.py")):
        name = str(path.relative_to(ROOT))
        parts = path.relative_to(ROOT / "tests").parts
        folder = parts[1] if len(parts) > 2 else parts[0]
        if folder not in META:
            yield folder, _named(name) | cited(path.read_text(encoding="utf-8"))


# --- the table ---------------------------------------------------------------------------------------


def of(label: str, found: Iterable[tuple[str, set[str]]]) -> Counter[str]:
    """Counts how often each name occurs with a norm."""
    return Counter(name for name, labels in found if label in labels)


@dataclass(frozen=True, slots=True)
class Row:
    """How one norm is checked."""

    norm: Norm
    scripts: Counter[str]
    judges: Counter[str]
    mutants: Counter[str]
    tests: Counter[str]

    @property
    def is_checked(self) -> bool:
        """Whether any technique notices a violation of the norm; "=" notices none."""
        found = self.scripts + self.judges + self.tests + self.mutants
        return bool(found.keys() - {"="})

    def __str__(self) -> str:
        mutants = " ".join(f"{letter}{count}" for letter, count in sorted(self.mutants.items()))
        cells = (
            self.norm.link,
            self.norm.title,
            str(len(self.scripts) or ""),
            " ".join(letter for letter in "ESWLH" if letter in self.judges),
            mutants,
            ", ".join(sorted(self.tests)),
        )
        return f"| {' | '.join(cells)} |"


def rows() -> list[Row]:
    """A row for each norm."""
    ways = [list(way()) for way in (scripted, judged, hunted, tested)]
    return [Row(norm, *(of(norm.label, way) for way in ways)) for norm in _all_norms()]


def matrix() -> str:
    """The table, as the page has it."""
    head = "| norm | what | scripts | judged in | mutants | tests |\n|---|---|---|---|---|---|\n"
    return head + "".join(f"{row}\n" for row in rows())


def with_matrix(page: str) -> str:
    """The page with the current table."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{matrix()}\n{END}{after}"


def main() -> int:
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(with_matrix(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        sys.stdout.write(matrix())
    return 0


if __name__ == "__main__":
    sys.exit(main())
