"""The files of deploy/: settings that the services take, units that systemd takes, and a page that names them."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quorumlog.certificates import create_authority, issue, key_file
from services.autorecovery.config import Config as AutorecoveryConfig
from services.bookie.config import Config as BookieConfig
from services.gateway.config import GatewaySettings
from services.metadata.config import Config as MetadataConfig
from tests.cluster.hosts.init import Unit, _settings
from tests.cluster.hosts.page import PAGE, ROOT, sections

_ENV = ROOT / "deploy/env"
_UNITS = ROOT / "deploy/systemd"
_NAMES = {
    "metadata": "metadata-metadata-2", "bookie@a": "bookie-bookie-2a", "bookie@b": "bookie-bookie-2b",
    "gateway": "gateway-gateway-2", "autorecovery": "autorecovery-autorecovery-2",
}  # fmt: skip
_DATABASES = {
    "postgres-dsn": "postgresql://u:p@host-1.example:5432/quorumlog\n",
    "redis-url": "redis://:p@host-1.example\n",
}
"""Files beside the certificates' folder, of which a service's environment has the paths only."""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As docs/learn/production.md has them made for host-2."""
    folder: Path = tmp_path_factory.mktemp("certificates")
    create_authority(folder, "demo")
    for file in _NAMES.values():
        role, _, name = file.partition("-")
        assert issue(folder, role, name, ["host-2.example"]).stem == file
    for name, text in _DATABASES.items():
        (folder / name).write_text(text)
    return folder


def settings_of(service: str, certificates: Path) -> dict[str, str]:
    """What the unit of a service gives it on host-2."""
    found: dict[str, str] = {}
    for file in Unit(f"quorumlog-{service}", _UNITS).values("EnvironmentFile"):
        name = Path(file).name
        text = (_ENV / name).read_text().replace("NUMBER", "2")
        for path in ("certificates", *_DATABASES):
            here = certificates / path if path in _DATABASES else certificates
            text = text.replace(f"/etc/quorumlog/{path}", str(here))
        found |= dict(_settings(text))
    return found


def known(model: Any) -> set[str]:
    names = {name.upper() for name in model.model_fields}
    return names | {f"{name}_FILE" for name in names}


@pytest.mark.parametrize(
    ("service", "model"),
    [
        ("metadata", MetadataConfig),
        ("bookie@a", BookieConfig),
        ("bookie@b", BookieConfig),
        ("gateway", GatewaySettings),
        ("autorecovery", AutorecoveryConfig),
    ],
)
def test_each_service_starts_beyond_loopback_with_the_settings_of_its_unit(
    service: str, model: Any, certificates: Path
) -> None:
    given = settings_of(service, certificates)

    settings = model.read(given)

    assert settings.tls is not None
    assert settings.tls_key_file == key_file(settings.tls_cert_file)
    assert settings.url.startswith("https://host-2.example:")
    assert not settings.allow_anonymous
    # METADATA_URLS of cluster.env is for all services but the metadata service.
    assert given.keys() - known(model) <= {"METADATA_URLS"}
    assert not given.keys() & {"POSTGRES_DSN", "REDIS_URL"}, "their passwords are in files"
    if service == "gateway":
        assert settings.require_tokens
        assert settings.public_tls is not None
        assert settings.internal_url(0).startswith("https://host-2.example:")


def test_services_of_a_host_share_no_port_and_no_certificate(certificates: Path) -> None:
    given = [settings_of(service, certificates) for service in _NAMES]

    ports = [each[name] for each in given for name in ("PORT", "INTERNAL_PORT") if name in each]
    assert len(ports) == len(set(ports))
    assert {Path(each["TLS_CERT_FILE"]).stem for each in given} == set(_NAMES.values())
    page = PAGE.read_text()
    assert all(port in page for port in ports)


def test_a_unit_waits_for_longer_than_a_drain_before_it_kills() -> None:
    drain_s = float(dict(_settings((_ENV / "cluster.env").read_text()))["DRAIN_S"])

    for service in _NAMES:
        unit = Unit(f"quorumlog-{service}", _UNITS)
        assert float(unit.value("TimeoutStopSec")) > drain_s
        assert unit.value("Restart") == "always"
        assert unit.value("NoNewPrivileges") == "yes"
        assert unit.value("ProtectSystem") == "strict"
    assert len({unit.name for unit in _UNITS.glob("*.service")}) == 4


def test_each_kind_of_service_has_a_user_of_its_own() -> None:
    users = {
        service.partition("@")[0]: Unit(f"quorumlog-{service}", _UNITS).value("User")
        for service in _NAMES
    }

    assert users == {kind: f"quorumlog-{kind}" for kind in users}
    compose = (ROOT / "deploy/compose/compose.yaml").read_text()
    assert set(re.findall(r"number of the user ([\w-]+)", compose)) == set(users.values())


@pytest.fixture
def analyzed(tmp_path: Path) -> Callable[..., str]:
    """systemd's opinion of the units, as they would be installed."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip(
            "systemd-analyze is not on this machine: its opinion of the units was not asked"
        )
    shutil.copytree(_UNITS, tmp_path, dirs_exist_ok=True)
    for unit in tmp_path.glob("*.service"):
        # The software is not in /opt here.
        unit.write_text(
            unit.read_text().replace("/opt/quorumlog/.venv/bin/python", os.path.realpath("/bin/sh"))
        )
    shutil.copy(tmp_path / "quorumlog-bookie@.service", tmp_path / "quorumlog-bookie@a.service")

    def analyze(*words: str) -> str:
        done = subprocess.run(
            ["systemd-analyze", *words], env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
            cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stderr

    return analyze


def test_systemd_understands_each_line_of_the_units(analyzed: Callable[..., str]) -> None:
    units = [f"./quorumlog-{service}.service" for service in _NAMES if service != "bookie@b"]

    complaints = analyzed("verify", *units)

    assert "quorumlog" not in complaints


def test_the_units_are_confined(analyzed: Callable[..., str]) -> None:
    """At most 2 of 10 by systemd's own measure, where 10 is a service that may do everything."""
    for service in ("metadata", "bookie@a", "gateway", "autorecovery"):
        analyzed(
            "security", "--offline=true", "--threshold=20", f"./quorumlog-{service}.service",
            "--no-pager",
        )  # fmt: skip


def test_each_block_of_the_page_says_where_it_is_run_and_is_a_shell_script() -> None:
    found = sections()

    assert len(found) > 10
    for blocks in found.values():
        for block in blocks:
            subprocess.run(["sh", "-n", "-c", block.script], check=True, timeout=60)
