"""The secret that a cluster makes for itself, and the compose file that has one made."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import yaml  # type: ignore[import-untyped]

from quorumlog.net.service import ServiceSettings
from quorumlog.wire.secret import read_secret
from services.autorecovery.config import Config as AutorecoverySettings
from services.bookie.config import Config as BookieSettings
from services.gateway.config import GatewaySettings
from services.local.config import ROOT
from services.local.secret import kept_secret
from services.metadata.config import Config as MetadataSettings

SETTINGS: Final[dict[str, type[ServiceSettings]]] = {
    "services.autorecovery": AutorecoverySettings,
    "services.bookie": BookieSettings,
    "services.gateway": GatewaySettings,
    "services.metadata": MetadataSettings,
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cluster-secret"


def test_a_secret_is_made_once_for_its_user_only(file: Path) -> None:
    before = os.umask(0)
    try:
        made = kept_secret(file)
    finally:
        os.umask(before)

    assert file.stat().st_mode & 0o777 == 0o600
    assert read_secret(file) == made == kept_secret(file)


def test_a_start_that_was_cut_short_leaves_no_half_of_a_secret(file: Path) -> None:
    file.with_name(file.name + ".new").write_text("0123")

    assert len(kept_secret(file)) == 64


def test_two_clusters_have_two_secrets(tmp_path: Path) -> None:
    assert kept_secret(tmp_path / "a") != kept_secret(tmp_path / "b")


def services() -> dict[str, dict[str, Any]]:
    text = (ROOT / "compose.yaml").read_text()
    found: dict[str, dict[str, Any]] = yaml.safe_load(re.sub(r"\${\w+:-([^}]*)}", r"\1", text))[
        "services"
    ]
    return found


def test_the_compose_file_s_settings_are_settings_and_need_the_secret(file: Path) -> None:
    command = services()["secret"]["command"]
    assert command[1] == "/secret/cluster-secret"
    subprocess.run([sys.executable, "-m", command[0], str(file)], cwd=ROOT, check=True)

    seen = set()
    for service in services().values():
        [module, *_] = service.get("command", [""])
        if module not in SETTINGS:
            continue
        seen.add(module)
        # As the image sets it.
        environment = service["environment"] | {"HOST": "0.0.0.0"}
        assert environment["CLUSTER_SECRET_FILE"] == command[1]
        assert "secret:/secret" in service["volumes"]
        assert "secret" in service["depends_on"]

        read = SETTINGS[module].read(environment | {"CLUSTER_SECRET_FILE": str(file)})

        assert read.authenticator is not None
        # Of a gateway's public listener the file says that anybody may call it.
        strict = environment | {"ALLOW_ANONYMOUS": "", "REQUIRE_TOKENS": "1"}
        for lacking in ("CLUSTER_SECRET_FILE", "ALLOW_PLAIN"):
            given = {"CLUSTER_SECRET_FILE": str(file), lacking: ""}
            with pytest.raises(SystemExit, match=lacking):
                SETTINGS[module].read(strict | given)
    assert seen == set(SETTINGS)
