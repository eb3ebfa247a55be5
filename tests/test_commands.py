"""The commands and requests that pages show are those of the command line and of the services.

Guides whose programs are run by `tests/unit/client/test_guides.py` and the like are held here too: a page is read whole, also what it
shows in the middle of a sentence.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import typer
from typer.core import TyperGroup
from typer.main import get_command

from quorumlog.cli.commands import app
from tests.support.roles import TABLES
from tests.support.scopes import operations
from tests.test_links import pages

_ROOT: Final = Path(__file__).resolve().parent.parent
_RUNBOOK: Final = _ROOT / "docs" / "guides" / "runbook.md"
_PAST: Final = ("docs/adr/", "docs/internals/journal/", "CHANGELOG.md")
"""What these pages say was so when they were written."""
_BLOCK: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN: Final = re.compile(r"`([^`]+)`")
_SHELLS: Final = ("sh", "console")

_BEFORE: Final = {"do", "then", "else", "if", "until", "while", "!", "sudo"}
"""Words of a shell that a command may follow."""
_IN_CONTAINER: Final = ["docker", "compose", "exec", "operator"]
_REDIRECTION: Final = re.compile(r"(?<!\S)\d?(?:>>?|<)&?\s*[^\s)]+")
_ASSIGNMENT: Final = re.compile(r"^(\w+)=(\S*)")
_VARIABLE: Final = re.compile(r"\$\{?(\w+)\}?")
_PLACEHOLDER: Final = re.compile(r"<[a-z][\w-]*>|\{\w+\}|\$\{?\w+\}?|\$(?=\()")
_LEFT_OUT: Final = ("MissingParameter", "BadOptionUsage")
_TREE: Final = get_command(app)
_GROUPS: Final = frozenset(group.name for group in app.registered_groups)

_REQUEST: Final = re.compile(r"^(GET|HEAD|PUT|POST|PATCH|DELETE|OPTIONS) (/[^\s?`]*)")
_PATH: Final = re.compile(r"/(?:v1|health|metrics|docs|openapi\.json|internal)\b[^\s?\"']*")
_DATA: Final = ("-d", "--data-binary")
_WITH_VALUE: Final = (*_DATA, "-H", "-X", "-o", "-w")
"""Options of curl whose value is no URL."""
_SHARED: Final = frozenset(
    f"GET {path}"
    for path in ("/health/live", "/health/ready", "/metrics", "/docs", "/openapi.json")
)
_ROUTES: Final = _SHARED.union(
    *TABLES.values(), (f"{operation.method} {operation.path}" for operation in operations())
)


# --- what pages show -------------------------------------------------------------------------------


def present() -> list[Path]:
    """The pages about what there is."""
    return [page for page in pages() if not str(page.relative_to(_ROOT)).startswith(_PAST)]


def scripts(page: Path) -> list[str]:
    """The page's programs for a shell."""
    return [source for language, source in _BLOCK.findall(page.read_text()) if language in _SHELLS]


def spans(page: Path) -> list[str]:
    """What the page shows within its sentences."""
    return [" ".join(span.split()) for span in _SPAN.findall(_BLOCK.sub("", page.read_text()))]


def words_of(script: str) -> Iterator[list[str]]:
    """The words of each simple command of a script, without what is done with its input and output."""
    script = re.sub(r"^\$ ", "", script.replace("\\\n", " "), flags=re.MULTILINE)
    for line in script.splitlines():
        lexer = shlex.shlex(_REDIRECTION.sub("", line), posix=True, punctuation_chars="();|&")
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # a text of several lines
            continue
        command: list[str] = []
        for word in words:
            if set(word) <= set("();|&"):
                yield command
                command = []
            else:
                command.append(word)
        yield command


def called(words: list[str], program: str) -> list[str] | None:
    """What a simple command gives a program; None where it calls another one."""
    while words and (words[0] in _BEFORE or _ASSIGNMENT.match(words[0]) or words[0].endswith("=$")):
        words = words[1:]
    if words[: len(_IN_CONTAINER)] == _IN_CONTAINER:
        words = words[len(_IN_CONTAINER) :]
    return words[1:] if words[:1] == [program] else None


# --- the command line ------------------------------------------------------------------------------


def wrong_usage(words: list[str], *, is_whole: bool) -> str | None:
    """Why the command line refuses words; None where it takes them. Not `is_whole`: arguments and values may be left out."""
    given = [_PLACEHOLDER.sub("1", word).strip("[]") for word in words]
    given = [word.rstrip("…") for word in given if word.rstrip("…")]
    name, command = "quorumlog", _TREE
    context: Any = None
    while isinstance(command, TyperGroup):
        context = command.make_context(name, [], parent=context, resilient_parsing=True)
        if not given:
            return None
        if given[0].startswith("-"):
            named = {option for one in command.get_params(context) for option in one.opts}
            return None if given[0] in named else f"no option {given[0]}"
        name, *given = given
        following = command.get_command(context, name)
        if following is None:
            return f"no command {name}"
        command = following
    try:
        command.make_context(name, given, parent=context)
    except typer.Exit:  # help, or what the shell is to complete
        return None
    except typer.TyperException as error:
        kind = type(error).__name__
        return None if kind in _LEFT_OUT and not is_whole else f"{kind}: {error}"
    return None


def commands(page: Path) -> Iterator[tuple[list[str], bool]]:
    """The commands of `quorumlog` on a page, each with whether it is all that is typed."""
    for script in scripts(page):
        for words in words_of(script):
            given = called(words, "quorumlog")
            if given is not None:
                yield given, True
    for span in spans(page):
        for words in words_of(span):
            given = called(words, "quorumlog")
            if given is not None:
                yield given, False
            elif len(words) > 1 and words[0] in _GROUPS and re.fullmatch(r"[a-z-]+", words[1]):
                yield words, False


def test_each_command_that_a_page_shows_is_taken_by_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the pages have set and made before.
    monkeypatch.setenv("METADATA_URLS", "http://127.0.0.1:8082")
    monkeypatch.chdir(tmp_path)
    for file in ("service.token", "report.token"):
        (tmp_path / file).touch()
    wrong, count = [], 0
    for page in present():
        for words, is_whole in commands(page):
            count += 1
            why = wrong_usage(words, is_whole=is_whole)
            if why is not None:
                wrong.append((str(page.relative_to(_ROOT)), shlex.join(words), why))

    assert not wrong, "\n".join(map(str, wrong))
    assert count > 150


# --- the API -----------------------------------------------------------------------------------------


def is_route(method: str, path: str) -> bool:
    """Whether a service has a route for a path, in which any part may be a placeholder."""
    parts = (path.rstrip("/") or "/").split("/")
    for route in _ROUTES:
        of, _, template = route.partition(" ")
        if of != ("GET" if method == "HEAD" else method):
            continue
        wanted = template.split("/")
        has_tail = ":" in wanted[-1]
        if len(parts) != len(wanted) and not (has_tail and len(parts) >= len(wanted)):
            continue
        if all(
            one.startswith("{") or one == part for one, part in zip(wanted, parts, strict=False)
        ):
            return True
    return False


def requests(page: Path) -> Iterator[tuple[str, str]]:
    """The requests on a page: method and path."""
    for span in spans(page):
        if found := _REQUEST.match(span):
            yield found[1], found[2]
    for script in scripts(page):
        known: dict[str, str] = {}
        for words in words_of(script):
            for word in words:
                if found := _ASSIGNMENT.match(word):
                    known[found[1]] = _filled(found[2], known)
            given = called(words, "curl")
            if given is not None:
                yield from _requests_of_curl([_filled(word, known) for word in given])


def _filled(word: str, known: dict[str, str]) -> str:
    return _VARIABLE.sub(lambda found: known.get(found[1], "1"), word)


def _requests_of_curl(words: list[str]) -> Iterator[tuple[str, str]]:
    method, urls, option = "GET", list[str](), ""
    for word in words:
        if option == "-X":
            method = word
        elif option in _DATA and method == "GET":
            method = "POST"
        if option not in _WITH_VALUE and (found := _PATH.search(word)):
            urls.append(found[0])
        option = word
    yield from ((method, path) for path in urls)


def test_each_request_that_a_page_shows_has_a_route() -> None:
    wrong, count = [], 0
    for page in present():
        for method, path in requests(page):
            count += 1
            if not is_route(method, path):
                wrong.append((str(page.relative_to(_ROOT)), method, path))

    assert not wrong, "\n".join(map(str, wrong))
    assert count > 200


# --- the checks themselves -----------------------------------------------------------------------------


def test_the_runbooks_commands_are_among_them() -> None:
    shown = [" ".join(words) for words, _ in commands(_RUNBOOK)]

    for command in ("repair limit --bytes-per-s 50000000 --concurrency 4", "bookie drain --wait"):
        assert command in shown
    assert ("GET", "/v1/damage") in requests(_RUNBOOK)


@pytest.mark.parametrize(
    "command",
    [
        "ledger verfy 7",
        "ledger verify 7 --repear",
        "ledger verify x",
        "ledger verify 7 8",
        "repair delay",
        "nothing",
        "log --nothing",
    ],
)
def test_a_command_that_is_none_is_found(command: str) -> None:
    assert wrong_usage(command.split(), is_whole=True) is not None


@pytest.mark.parametrize(
    "script",
    [
        "$ A=1 quorumlog ledger verify 7 > out 2>&1",
        "echo | docker compose exec operator quorumlog ledger verify 7; true",
        "until quorumlog ledger \\\n  verify 7; do sleep 1; done",
        "id=$(quorumlog ledger verify 7)  # as told",
    ],
)
def test_a_command_is_found_within_a_script(script: str) -> None:
    found = [given for words in words_of(script) if (given := called(words, "quorumlog"))]
    assert found == [["ledger", "verify", "7"]]


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/ledger/7"), ("PUT", "/v1/ledgers/7/entries"), ("GET", "/v1/ledgers/7/entry")],
)
def test_a_request_that_is_none_is_found(method: str, path: str) -> None:
    assert not is_route(method, path)
