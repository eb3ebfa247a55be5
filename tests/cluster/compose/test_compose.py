"""What compose.yaml promises, as far as its text and the programs that read it show it without an engine."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml  # type: ignore[import-untyped]

from quorumlog.certificates import describe, revoke
from quorumlog.net.service import ServiceSettings
from services.autorecovery.config import Config as AutorecoverySettings
from services.bookie.config import Config as BookieSettings
from services.gateway.config import GatewaySettings
from services.local.config import ROOT
from services.local.credentials import keep_credentials
from services.metadata.config import Config as MetadataSettings
from tests.cluster.compose.files import is_job, read_compose

SETTINGS: Final[dict[str, type[ServiceSettings]]] = {
    "services.autorecovery": AutorecoverySettings,
    "services.bookie": BookieSettings,
    "services.gateway": GatewaySettings,
    "services.metadata": MetadataSettings,
}
COMPOSE: Final = read_compose()
SERVICES: Final[dict[str, dict[str, Any]]] = COMPOSE["services"]
OURS: Final = {
    name: service
    for name, service in SERVICES.items()
    if service.get("command", [""])[0] in SETTINGS
}


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the job `credentials` makes."""
    folder = tmp_path_factory.mktemp("credentials")
    module, _, cluster, *processes = SERVICES["credentials"]["command"]
    assert module == "services.local.credentials"
    keep_credentials(folder, cluster, processes)
    return folder


def role_of(service: dict[str, Any]) -> str:
    """The role whose credentials a service is given."""
    [volume] = [each for each in service["volumes"] if ":/credentials" in each]
    name, *_ = volume.partition("-credentials")
    return str(name)


@pytest.mark.parametrize("name", SERVICES)
def test_each_container_is_confined_bounded_and_comes_back(name: str) -> None:
    service = SERVICES[name]

    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "cap_add" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"]
    assert service["pids_limit"]
    assert service["logging"]["driver"] == "json-file"
    assert set(service["logging"]["options"]) == {"max-size", "max-file"}
    if is_job(service):
        assert service["healthcheck"] == {"disable": True}
    else:
        assert service["restart"] == "unless-stopped"
        assert service["healthcheck"]["test"]


@pytest.mark.parametrize("name", OURS)
def test_a_service_is_healthy_once_it_can_do_its_work(name: str) -> None:
    service = OURS[name]
    url = service["healthcheck"]["test"][-1]
    environment = service["environment"]

    scheme, _, rest = environment["ADVERTISED_URL"].partition("://")
    assert service["healthcheck"]["test"][:4] == ["CMD", "python", "-m", "services.local.ready"]
    assert url == f"{scheme}://localhost:{rest.partition(':')[2]}"
    assert url.endswith(":" + environment["PORT"])


def test_images_are_pinned_to_a_release() -> None:
    images = {service["image"] for service in SERVICES.values() if "build" not in service}
    images |= set(re.findall(r"^ARG PYTHON=(.+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    assert len(images) >= 4
    for image in images:
        assert re.fullmatch(r"[\w/-]+:v?\d+\.\d+(\.\d+)?[\w.-]*", image), image


def test_ports_are_published_on_this_machine_only() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)
    assert not any("ports" in service for service in OURS.values())


def test_only_metadata_services_reach_the_stores() -> None:
    networks = {name: set(service.get("networks", ())) for name, service in SERVICES.items()}
    inside = {name for name, joined in networks.items() if "stores" in joined}
    assert inside == {"postgres", "redis"} | {name for name in OURS if name.startswith("metadata-")}
    assert COMPOSE["networks"]["stores"] == {"internal": True}
    assert COMPOSE["networks"]["inside"] == {"internal": True}


def test_two_of_each_process_that_another_one_can_replace() -> None:
    counts = dict.fromkeys(SETTINGS, 0)
    for service in OURS.values():
        counts[service["command"][0]] += 1
    assert min(counts.values()) >= 2


@pytest.mark.parametrize("name", OURS)
def test_settings_are_known_and_have_the_services_certificate(name: str, credentials: Path) -> None:
    service = OURS[name]
    module = service["command"][0]
    assert role_of(service) == module.removeprefix("services.")
    assert f"{role_of(service)}-credentials:/credentials:ro,nocopy" in service["volumes"]
    folder = credentials / role_of(service)
    # As the image sets it.
    environment = {**service["environment"], "HOST": "0.0.0.0"}
    in_folder = {
        key: str(value).replace("/credentials", str(folder)) for key, value in environment.items()
    }

    read = SETTINGS[module].read(in_folder)

    assert read.authenticator is not None
    assert read.tls_cert_file is not None
    subject = describe(read.tls_cert_file).subject
    assert subject is not None
    assert (subject.role, subject.name) == (role_of(service), name)
    assert name in subject.hosts
    advertised = environment.get("INTERNAL_ADVERTISED_URL", environment["ADVERTISED_URL"])
    assert advertised.startswith(f"https://{name}:")
    assert environment.get("BOOKIE_NAME", name) == name
    bare = {key: value for key, value in in_folder.items() if not key.startswith("TLS_")}
    with pytest.raises(SystemExit):
        SETTINGS[module].read(bare)


def test_each_name_of_a_metadata_service_is_one() -> None:
    services = {name for name in OURS if name.startswith("metadata-")}
    for service in [*OURS.values(), SERVICES["operator"]]:
        urls = service["environment"].get("METADATA_URLS", "")
        assert not urls or set(re.findall(r"https://([\w-]+):8082", urls)) == services


def test_the_password_is_in_files_and_in_no_setting(credentials: Path) -> None:
    password = (credentials / "postgres" / "password").read_text().strip()

    assert (credentials / "metadata" / "pgpass").read_text() == f"*:*:*:*:{password}\n"
    assert (credentials / "metadata" / "pgpass").stat().st_mode & 0o777 == 0o600
    assert (credentials / "postgres" / "password").stat().st_mode & 0o777 == 0o640
    for service in OURS.values():
        dsn = service["environment"].get("POSTGRES_DSN", "//quorumlog@")
        assert "//quorumlog@" in dsn
    assert SERVICES["postgres"]["environment"]["POSTGRES_PASSWORD_FILE"] == "/credentials/password"


def test_credentials_are_made_once(credentials: Path) -> None:
    def kept() -> dict[Path, tuple[bytes, int]]:
        files = (file for file in credentials.rglob("*") if file.is_file())
        return {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in files}

    before = kept()

    keep_credentials(credentials, *_arguments())

    assert kept() == before, "nothing is written again: services read these files at any time"


def test_what_is_revoked_reaches_the_services(credentials: Path) -> None:
    revoke(credentials / "authority", "monitor", "prometheus")

    keep_credentials(credentials, *_arguments())

    content = (credentials / "authority" / "ca.pem").read_bytes()
    roles = ("metadata", "bookie", "gateway", "autorecovery", "operator", "monitor")
    assert b"X509 CRL" in content
    assert {(credentials / role / "ca.pem").read_bytes() for role in roles} == {content}


def test_a_certificate_without_its_key_is_made_again(credentials: Path) -> None:
    key = credentials / "operator" / "operator-operator-key.pem"
    key.unlink()

    keep_credentials(credentials, *_arguments())

    assert key.exists()


def _arguments() -> tuple[str, list[str]]:
    _, _, cluster, *processes = SERVICES["credentials"]["command"]
    return cluster, processes


def test_the_image_has_a_folder_for_each_volume_of_credentials() -> None:
    mounted = {
        volume.partition(":/credentials/")[2] for volume in SERVICES["credentials"]["volumes"]
    }
    found = re.search(r"for role in ([\w ]+);", (ROOT / "Dockerfile").read_text())
    assert found is not None
    assert set(found[1].split()) == mounted


def test_only_the_job_gives_a_volume_of_credentials_its_owner() -> None:
    # Containers are created in any order, and a volume takes over the folder of the first one that copies.
    mounts = [
        volume
        for name, service in SERVICES.items()
        for volume in service.get("volumes", ())
        if "credentials:" in volume and name != "credentials"
    ]
    assert mounts
    assert all(volume.endswith("nocopy") for volume in mounts)


def test_volumes_are_declared_and_used() -> None:
    used = {
        volume.partition(":")[0]
        for service in SERVICES.values()
        for volume in service.get("volumes", ())
        if not volume.startswith("./")
    }
    assert used == set(COMPOSE["volumes"])


def test_files_that_are_mounted_are_there() -> None:
    mounted = [
        volume.partition(":")[0]
        for service in SERVICES.values()
        for volume in service.get("volumes", ())
        if volume.startswith("./")
    ]
    assert mounted
    assert all((ROOT / file).is_file() for file in mounted)


# --- the balancer and Prometheus --------------------------------------------------------------------

HAPROXY: Final = ROOT / "deploy" / "compose" / "haproxy.cfg"


def test_the_balancer_knows_each_gateway() -> None:
    gateways = {
        (name, service["environment"]["PORT"])
        for name, service in OURS.items()
        if name.startswith("gateway-")
    }
    backends = HAPROXY.read_text().split("\nbackend ")[1:]
    assert len(backends) == 2
    for backend in backends:
        assert set(re.findall(r"server [\w-]+ ([\w-]+):(\d+)", backend)) == gateways


def test_the_balancer_waits_longer_than_a_gateway() -> None:
    limits = GatewaySettings.model_fields
    [seconds] = re.findall(r"timeout server (\d+)s", HAPROXY.read_text())
    assert int(seconds) > limits["stream_idle_s"].default


@pytest.mark.skipif(shutil.which("haproxy") is None, reason="no haproxy here")
def test_haproxy_takes_its_configuration(tmp_path: Path) -> None:
    # Elsewhere the names of containers are none.
    text = re.sub(r"gateway-\d:", "127.0.0.1:", HAPROXY.read_text())
    file = tmp_path / "haproxy.cfg"
    file.write_text(text)

    done = subprocess.run(
        ["haproxy", "-c", "-f", file], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr


def test_prometheus_asks_every_service() -> None:
    file = ROOT / "deploy" / "compose" / "prometheus.yml"
    [job] = yaml.safe_load(file.read_text())["scrape_configs"]
    [found] = job["static_configs"]
    ports = {
        f"{name}:{service['environment'].get('INTERNAL_PORT', service['environment']['PORT'])}"
        for name, service in OURS.items()
    }
    assert set(found["targets"]) == ports
    assert job["job_name"] == "quorumlog"
