"""The repository itself: what lint-imports and ruff can't say."""

import ast
import re
import subprocess
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from quorumlog import header

_ROOT = Path(__file__).resolve().parent.parent
_CODE = ("shared", "services", "loadtest")

_ONLY_IN: dict[str, str | tuple[str, ...]] = {
    "asyncpg": ("services/metadata", "loadtest/bench/many", "loadtest/bench/metadata"),
    "redis": ("services/metadata",),
    "rocksdict": ("services/bookie",),
    "pyspark": (
        *("shared/quorumlog/spark", "shared/pyspark_quorumlog"),
        *("loadtest/spark", "loadtest/bench/spark"),
    ),
    "nats": ("loadtest",),
    "locust": ("loadtest",),
}
"""Who may import a package that the others must not know."""

_WITHIN = ("quorumlog", "local", "jobs")
"""The library as a whole, a folder that uses nothing of ours, and programs within `spark`."""

_READS_ENVIRONMENT = ("config.py", "embedded.py", "cli.py", "ready.py", "serve.py")
"""embedded.py and serve.py hand ours on to other programs; the command line has its own settings; ready.py is a program."""

_QUORUM = frozenset(
    ("ack_quorum", "write_quorum", "is_covered", "has_ack_quorum", "can_reach", "negatives_needed")
)
_DOCSTRING = re.compile(r'(?:#.*\n|\s)*r?"""')
"""A module begins with it, behind comments."""
_SIZES_OF_A_LOG = ("services/gateway/logs/keeper.py",)
"""Compares the sizes that it gives to a log of its own."""


def sources(*folders: str) -> list[Path]:
    return sorted(
        path
        for folder in folders
        for path in (_ROOT / folder).rglob("*.py")
        if ".egg-info" not in str(path)
    )


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(path.read_text())


@cache
def imported(path: Path) -> frozenset[str]:
    """The modules that a module imports, and the names that may be modules."""
    found = set[str]()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    return frozenset(found)


def name_of(path: Path) -> str:
    return str(path.relative_to(_ROOT))


def test_every_module_says_why_it_exists() -> None:
    silent = [
        name_of(path)
        for path in sources(*_CODE, "tests")
        if (text := path.read_text()).strip() and not _DOCSTRING.match(text)
    ]

    assert not silent


def test_every_folder_says_what_it_is_for_and_what_it_may_use() -> None:
    silent = [
        name_of(path)
        for path in sources("shared/quorumlog", "services")
        if path.name == "__init__.py"
        and path.parent.name not in _WITHIN
        and not re.search(r"ay\s+(use|import)\b", ast.get_docstring(parsed(path)) or "")
    ]

    assert not silent


def test_packages_are_imported_where_they_belong() -> None:
    strays = [
        (name_of(path), module)
        for path in sources(*_CODE)
        for module in imported(path)
        if not name_of(path).startswith(_ONLY_IN.get(module.partition(".")[0], ""))
    ]

    assert not strays


def test_headers_of_ours_are_named_in_one_place() -> None:
    """Except where a gateway describes them to people, and names them in what it refuses."""
    ours = {value for name, value in vars(header).items() if name.isupper()}
    home = _ROOT / "shared/quorumlog/header.py"

    strays = [
        (name_of(path), node.value)
        for path in sources("shared", "services")
        if path != home
        and not name_of(path).startswith(("services/gateway/edge", "services/gateway/logs"))
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in ours
    ]

    assert not strays


def test_services_meet_over_http_only() -> None:
    strays = [
        (name_of(path), module)
        for path in sources("services")
        for module in imported(path)
        if module.startswith("services.")
        and module.split(".")[1] != path.relative_to(_ROOT / "services").parts[0]
    ]

    assert not strays


def test_only_machines_decide_by_a_quorum() -> None:
    """Code that performs effects neither compares the sizes of a quorum nor asks whether answers make one: the explorer and
    the simulations see what `protocol/` decides, and nothing else.
    """
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in sources("shared/quorumlog/net", "services")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Compare | ast.Call)
        and _QUORUM.intersection(_attributes_of(node))
        and name_of(path) not in _SIZES_OF_A_LOG
    ]

    assert not found


def _attributes_of(node: ast.Compare | ast.Call) -> set[str]:
    """The attributes that are compared, or the one that is called."""
    parts = [node.func] if isinstance(node, ast.Call) else [node.left, *node.comparators]
    return {one.attr for part in parts for one in ast.walk(part) if isinstance(one, ast.Attribute)}


def test_only_config_reads_the_environment() -> None:
    found = [
        name_of(path)
        for path in sources("shared", "services")
        if "os.environ" in path.read_text()
        and path.name not in (*_READS_ENVIRONMENT, "__main__.py")
    ]

    assert not found


def test_no_module_is_dead() -> None:
    """A module is imported by another one, or it is an entry point."""
    everyone = {name for path in sources(*_CODE) for name in imported(path)}
    tests = {path: path.read_text() for path in sources("tests")}
    scripts = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    entries = {script.partition(":")[0] for script in scripts.values()}
    starters = (
        *("Makefile", "Dockerfile"),
        *("loadtest/load.py", "loadtest/spark_chaos.py", "loadtest/bench/__main__.py"),
    )
    texts = "".join((_ROOT / name).read_text() for name in starters)

    dead = []
    for path in sources(*_CODE):
        base = _ROOT / "shared" if path.is_relative_to(_ROOT / "shared") else _ROOT
        module = ".".join(path.relative_to(base).with_suffix("").parts)
        if path.name in ("__init__.py", "__main__.py") or module in entries:
            continue
        if module in everyone or module in texts or path.name in texts:
            continue
        # Only these few are looked for in the tests, most of which are large.
        if not any(path.stem in text and module in imported(test) for test, text in tests.items()):
            dead.append(module)

    assert not dead


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Neither late, within a function, nor for the type checker only."""
    found = {}
    for path in sources("shared", "services"):
        base = _ROOT / "shared" if path.is_relative_to(_ROOT / "shared") else _ROOT
        found[".".join(path.relative_to(base).with_suffix("").parts)] = path

    graph = {name: imported(path) & found.keys() for name, path in found.items()}

    assert list(TopologicalSorter(graph).static_order())


def test_nothing_of_one_machine_is_tracked() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=_ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git repository")

    tracked = [name for name in listed.stdout.split("\0") if name]

    assert not [name for name in tracked if name.startswith((".venv", ".quorumlog", "build/"))]
    assert not [name for name in tracked if name.endswith((".pyc", ".orig", ".rej", ".log"))]
