"""`quorumlog certificates`, as a shell uses it."""

import json
import shlex
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from quorumlog import certificates
from quorumlog.certificates import ROLES
from quorumlog.cli.commands import app
from quorumlog.cli.output import ExitStatus, run_command
from quorumlog.net import tls
from quorumlog.net.identity import Role
from tests.support.tools import needs
from tests.unit.client.test_cli_ends import error_of
from tests.unit.client.test_guides import BLOCK, ROOT

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands run."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "certificates"


def run(*words: str) -> int:
    return run_command(app, ["certificates", *words])


def reported(capsys: Captured) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_roles_are_those_of_the_services() -> None:
    assert set(ROLES) == {role.value for role in Role}
    assert certificates.SCHEME == tls.SCHEME


def test_a_certificate_names_its_owner_who_alone_has_keys(folder: Path, capsys: Captured) -> None:
    assert run("init", "demo", "--json") == ExitStatus.DONE
    host = ("--host", "store.example", "--host", "10.0.0.1", "--host", "::1")
    assert run("issue", "bookie", "bookie-1", *host, "--json") == ExitStatus.DONE

    authority, issued = reported(capsys)

    assert authority["role"] == "authority"
    assert (issued["cluster"], issued["role"], issued["name"]) == ("demo", "bookie", "bookie-1")
    assert issued["hosts"] == ["store.example", "10.0.0.1", "::1"]
    assert issued["days_left"] == 364
    keys = [file for file in folder.iterdir() if file.name.endswith("-key.pem")]
    assert len(keys) == 2
    assert {file.stat().st_mode & 0o777 for file in keys} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_certificate_fits_its_key_and_its_authority(folder: Path) -> None:
    run("init")
    run("issue", "gateway", "gateway-1", "--host", "localhost")

    context = ssl.create_default_context(cafile=folder / "ca.pem")
    context.load_cert_chain(folder / "gateway-gateway-1.pem", folder / "gateway-gateway-1-key.pem")

    assert context.cert_store_stats()["x509_ca"] == 1


def test_nothing_is_replaced_but_by_renew(folder: Path, capsys: Captured) -> None:
    run("init")
    run("issue", "operator", "anna")
    before = {file: file.read_bytes() for file in folder.iterdir()}
    capsys.readouterr()

    for words in (("init",), ("issue", "operator", "anna")):
        assert run(*words, "--json") == ExitStatus.FAILED
        error = error_of(capsys.readouterr().err)
        assert "exists: nothing was written" in error["detail"]
    assert before == {file: file.read_bytes() for file in folder.iterdir()}

    assert run("renew", "certificates/operator-anna.pem", "--json") == ExitStatus.DONE
    [renewed] = reported(capsys)
    changed = {file.name for file in folder.iterdir() if before[file] != file.read_bytes()}
    assert changed == {"operator-anna.pem", "operator-anna-key.pem", "issued.txt"}
    assert (renewed["role"], renewed["name"], renewed["hosts"]) == ("operator", "anna", [])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("issue", "bookie", "bookie-1"), "needs hosts"),
        (("issue", "king", "arthur"), "is not a role"),
        (("issue", "operator", "an/na"), "is not a valid name"),
        (("issue", "bookie", "b", "--host", "http://x"), "is not a host"),
        (("issue", "bookie", "b", "--host", "x:80"), "is not a host"),
        (("init", "a b", "--folder", "other"), "is not a valid cluster"),
        (("issue", "operator", "anna", "--folder", "nowhere"), "No such file"),
        (("renew", "certificates/ca.pem"), "has no URI"),
        (("revoke", "bookie", "never-issued"), "has issued no certificate"),
        (("revoke", "bookie", "b", "--folder", "nowhere"), "No such file"),
        (("show", "certificates/ca-key.pem"), "must be a certificate"),
        (("show", "--folder", "nowhere"), "certificates init"),
    ],
)
def test_what_can_t_be_a_certificate_is_refused_with_a_sentence(
    words: tuple[str, ...], why: str, folder: Path, capsys: Captured
) -> None:
    run("init")
    before = sorted(folder.parent.rglob("*"))
    capsys.readouterr()

    assert run(*words, "--json") == ExitStatus.FAILED

    assert why in error_of(capsys.readouterr().err)["detail"]
    assert sorted(folder.parent.rglob("*")) == before


def test_a_certificate_of_another_cluster_is_not_renewed(folder: Path, capsys: Captured) -> None:
    run("init", "one")
    run("init", "two", "--folder", "other")
    run("issue", "operator", "anna")
    capsys.readouterr()

    given = ("renew", str(folder / "operator-anna.pem"), "--folder", "other", "--json")
    assert run(*given) == ExitStatus.FAILED

    assert (
        "is of cluster one, but the authority in other is of two"
        in error_of(capsys.readouterr().err)["detail"]
    )


@needs("openssl")
def test_a_process_is_revoked_with_all_its_certificates(folder: Path, capsys: Captured) -> None:
    run("init")
    run("issue", "operator", "anna")
    run("issue", "operator", "bert")
    run("renew", "certificates/operator-anna.pem")
    capsys.readouterr()
    authority = folder / "ca.pem"
    before = authority.read_bytes()

    counts = []
    for name in ("anna", "anna", "bert"):
        assert run("revoke", "operator", name, "--json") == ExitStatus.DONE
        counts += [row["revoked"] for row in reported(capsys)]

    assert counts == [2, 2, 1]
    listed = subprocess.run(
        ["openssl", "crl", "-noout", "-text", "-CAfile", authority, "-in", authority],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "verify OK" in listed.stderr
    assert listed.stdout.count("Serial Number:") == 3
    assert authority.read_bytes().startswith(before), "the authority's certificate stays"
    assert authority.read_bytes().count(b"BEGIN X509 CRL") == 1
    issued = (folder / "issued.txt").read_text().splitlines()
    assert len(issued) == 3
    assert all(line.split()[0].upper() in listed.stdout for line in issued)


def test_no_certificate_outlives_its_authority(capsys: Captured) -> None:
    run("init", "--days", "10", "--json")
    run("issue", "operator", "anna", "--json")

    authority, issued = reported(capsys)

    assert issued["ends"] == authority["ends"]


def test_the_guide_s_commands_run(capsys: Captured) -> None:
    page = (ROOT / "docs/guides/certificates.md").read_text()
    programs = [block[2] for block in BLOCK.finditer(page) if block[1] == "sh"]
    commands = [shlex.split(line) for line in "".join(programs).splitlines()]

    assert len(commands) > 9
    for program, *words in commands:
        assert program == "quorumlog"
        assert run_command(app, words) == ExitStatus.DONE, words
    assert "bookie-1" in capsys.readouterr().out
