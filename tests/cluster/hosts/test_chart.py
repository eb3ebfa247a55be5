"""The Helm chart renders, and Kubernetes knows each field of what comes of it.

`make chart` builds the program that renders it, from Go modules; without it these tests are skipped.
"""

import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from services.autorecovery.config import Config as AutorecoveryConfig
from services.bookie.config import Config as BookieConfig
from services.gateway.config import GatewaySettings
from services.metadata.config import Config as MetadataConfig
from tests.cluster.hosts.page import ROOT

_CHART: Final = ROOT / "deploy/helm/quorumlog"
_PROGRAM: Final = ROOT / "build/chart"
_ROLES: Final[dict[str, Any]] = {
    "metadata": MetadataConfig, "bookie": BookieConfig, "gateway": GatewaySettings,
    "autorecovery": AutorecoveryConfig,
}  # fmt: skip
_OWN: Final = {"POD_NAME", "METADATA_URLS"}
_KEPT: Final = {
    "/database/POSTGRES_DSN": "postgresql://user:password@kept.example/quorumlog",
    "/database/REDIS_URL": "redis://kept.example",
}
"""What the secret of the databases keeps, which the pod has as files."""

pytestmark = pytest.mark.skipif(
    not _PROGRAM.exists(),
    reason="build/chart is not built: the chart was not rendered (make chart)",
)


class Refused(Exception):
    """The chart does not take these values."""


def rendered(folder: Path, chart: Path = _CHART, **values: Any) -> list[dict[str, Any]]:
    file = folder / "values.json"
    file.write_text(json.dumps(values))
    done = subprocess.run(
        [_PROGRAM, chart, file], capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode:
        raise Refused(done.stderr)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def of_kind(objects: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


def pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The pods' specifications by the name of what makes them."""
    makers = of_kind(objects, "StatefulSet") | of_kind(objects, "Deployment")
    return {name: each["spec"]["template"]["spec"] for name, each in makers.items()}


VARIANTS: Final[dict[str, dict[str, Any]]] = {
    "as it is": {},
    "secrets": {"certificates": {"mode": "secret"}, "operator": {"enabled": True}},
    "zone of the pod": {"bookie": {"zone": {"from": "pod"}, "storage": {"className": "fast"}}},
    "no zone": {"bookie": {"zone": {"from": "none"}}, "networkPolicy": {"enabled": False}},
    "for clients elsewhere": {
        "operator": {"enabled": True},
        "image": {"repository": "registry.example/quorumlog", "pullSecrets": [{"name": "pull"}]},
        "gateway": {
            "publicCertificateSecret": "edge",
            "allowedHosts": ["logs.example"],
            "trustedProxies": ["10.0.0.0/8", "2001:db8::/32"],
            "proxiesSend": "proxy-protocol",
            "service": {"type": "LoadBalancer", "port": 443, "annotations": {"a": "b"}},
            "nodeSelector": {"pool": "edge"},
            "tolerations": [{"key": "edge", "operator": "Exists"}],
        },
        "networkPolicy": {
            "clients": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
            "monitors": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
        },
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_kubernetes_knows_each_field_of_each_object(name: str, tmp_path: Path) -> None:
    objects = rendered(tmp_path, **VARIANTS[name])

    assert set(of_kind(objects, "StatefulSet")) == {f"demo-quorumlog-{role}" for role in _ROLES}
    assert set(of_kind(objects, "PodDisruptionBudget")) == {
        f"demo-quorumlog-{role}" for role in _ROLES
    }


@pytest.mark.parametrize("name", VARIANTS)
def test_no_container_may_more_than_its_service_needs(name: str, tmp_path: Path) -> None:
    found = pods(rendered(tmp_path, **VARIANTS[name]))

    assert found
    for pod in found.values():
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]


@pytest.mark.parametrize("name", VARIANTS)
def test_each_service_takes_the_settings_of_its_pod(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = pods(rendered(tmp_path, **VARIANTS[name]))
    monkeypatch.setattr("quorumlog.net.tls.Tls.__init__", lambda *_: None)

    for role, model in _ROLES.items():
        [container] = found[f"demo-quorumlog-{role}"]["containers"]
        names = {"POD_NAME": f"demo-quorumlog-{role}-0"}
        for each in container["env"]:
            text = each.get("value", "kept")
            for other, value in names.items():
                text = text.replace(f"$({other})", value)
            if each["name"].endswith("KEY_FILE") or text in _KEPT:  # a service looks at the mode
                file = tmp_path / Path(text).name
                file.touch(0o600)
                file.write_text(_KEPT.get(text, ""))
                text = str(file)
            names.setdefault(each["name"], text)
        settings = model.read(names)

        assert settings.tls_cert_file is not None
        assert settings.url.startswith(
            f"https://demo-quorumlog-{role}-0.demo-quorumlog-{role}.logs"
        )
        known = {field.upper() for field in model.model_fields}
        known |= {f"{name}_FILE" for name in known}
        assert names.keys() - known <= _OWN
        assert not [each for each in container["env"] if "secretKeyRef" in str(each)]
        assert str(settings.port) in {str(port["containerPort"]) for port in container["ports"]}


def test_gateways_stay_reachable_while_there_is_no_metadata_service(tmp_path: Path) -> None:
    for name, pod in pods(rendered(tmp_path)).items():
        [container] = pod["containers"]
        probe = str(container["readinessProbe"])
        assert ("/health/live" in probe) == name.endswith("-gateway"), probe
        assert ("/health/ready" in probe) != name.endswith("-gateway"), probe


def test_a_load_balancer_of_connections_keeps_the_addresses_of_clients(tmp_path: Path) -> None:
    for kind, policy in (("LoadBalancer", "Local"), ("NodePort", "Local"), ("ClusterIP", None)):
        found = rendered(tmp_path, gateway={"service": {"type": kind}})
        public = of_kind(found, "Service")["demo-quorumlog"]
        assert public["spec"].get("externalTrafficPolicy") == policy


def test_a_stranger_in_the_cluster_reaches_the_public_port_only(tmp_path: Path) -> None:
    policies = of_kind(rendered(tmp_path), "NetworkPolicy")

    assert set(policies) == {f"demo-quorumlog-{role}" for role in _ROLES}
    for policy in policies.values():
        for rule in policy["spec"]["ingress"]:
            [port] = rule["ports"]
            assert port["port"] == "public" or rule["from"]


def test_the_programs_in_the_chart_are_programs(tmp_path: Path) -> None:
    programs = set()
    for pod in pods(rendered(tmp_path)).values():
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            for words in (
                container["command"],
                *(container[key]["exec"]["command"] for key in container
                  if key.endswith("Probe") and "exec" in container[key]),
            ):  # fmt: skip
                if words[:2] == ["python", "-c"]:
                    programs.add(words[2])
                elif words[:2] == ["sh", "-c"]:
                    assert shlex.split(words[2])

    assert len(programs) == 3  # the zone of a node, and two probes
    for program in programs:
        compile(program, "chart", "exec")


@pytest.mark.parametrize(
    "values",
    [
        {"bookies": 3},
        {"bookie": {"replicas": 0}},
        {"bookie": {"zone": {"from": "dice"}}},
        {"gateway": {"settings": {"ZONES_MIN": 3}}},
        {"certificates": {"mode": "none"}},
    ],
)
def test_values_unknown_to_the_schema_are_refused(values: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(Refused, match="schema"):
        rendered(tmp_path, **values)


def test_a_field_that_kubernetes_does_not_know_is_refused(tmp_path: Path) -> None:
    chart = tmp_path / "chart"
    shutil.copytree(_CHART, chart)
    helpers = chart / "templates/_helpers.tpl"
    helpers.write_text(helpers.read_text().replace("maxUnavailable: 1", "maxUnavailabel: 1"))

    with pytest.raises(Refused, match="unknown field"):
        rendered(tmp_path, chart)
