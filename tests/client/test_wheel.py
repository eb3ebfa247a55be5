"""`pip install quorumlog` brings the SDK and the command line, and what those need."""

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]

IMPORTED = """
import sys
wheel, *here = sys.argv[1:]

class Bare:
    '''What the wheel does not require is as good as not there.'''
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top[0] != "_" and top not in {"quorumlog", *here, *sys.stdlib_module_names}:
            raise ModuleNotFoundError(name, name=name)

sys.path.insert(0, wheel)
sys.meta_path.insert(0, Bare())
import quorumlog.cli, quorumlog.client.sync
assert quorumlog.cli.__file__.startswith(wheel)
assert "aiohttp" in sys.modules
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    # Built from a copy, so that nothing of it is left in the tree.
    for name in ("pyproject.toml", "README.md", "shared"):
        subprocess.run(["cp", "-R", ROOT / name, source / name], check=True)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index",
         "--no-build-isolation", "--wheel-dir", folder, source],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def closure(names: set[str]) -> Iterator[str]:
    """Distributions with all that they need."""
    seen: set[str] = set()
    left = {canonicalize_name(name) for name in names}
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        yield name
        try:
            wanted = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # for another platform
        left |= {
            canonicalize_name(need.name)
            for need in map(Requirement, wanted)
            if need.marker is None or need.marker.evaluate({"extra": ""})
        }


def test_the_wheel_holds_the_package_and_nothing_of_the_services(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()

    tops = {name.partition("/")[0] for name in names}
    assert tops == {"quorumlog", "pyspark_quorumlog", "quorumlog-0.1.0.dist-info"}
    assert {"quorumlog/py.typed", "quorumlog/client/sync.py", "quorumlog/cli/logs.py"} <= set(names)


def test_nothing_but_what_it_requires_is_needed_to_import_it(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    (info,) = tmp_path.glob("*.dist-info")
    wanted = metadata.PathDistribution(info).requires or []
    direct = {
        need.name for need in map(Requirement, wanted) if need.marker is None
        or need.marker.evaluate({"extra": ""})
    }  # fmt: skip

    required = set(closure(direct))
    owners = metadata.packages_distributions()
    modules = [
        module
        for module, of in owners.items()
        if required & {canonicalize_name(owner) for owner in of}
    ]

    done = subprocess.run(
        [sys.executable, "-I", "-c", IMPORTED, tmp_path, *modules],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip

    assert "asyncpg" not in modules
    assert done.returncode == 0, done.stderr
