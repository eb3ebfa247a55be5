"""The certificate that an operator's programs show."""

import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from quorumlog.certificates import create_authority, issue, key_file
from quorumlog.wire.secret import (
    LOCAL_CERTIFICATE,
    CertificateUnusable,
    client_context,
    operator_context,
)

HERE = ("http://127.0.0.1:8080", "https://localhost:1")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_local_cluster_s_certificate_is_for_this_machine_only() -> None:
    assert operator_context(None, None, None, HERE) is None
    create_authority(LOCAL_CERTIFICATE.parent, "local")
    issue(LOCAL_CERTIFICATE.parent, "operator", "local")

    assert isinstance(operator_context(None, None, None, HERE), ssl.SSLContext)
    assert operator_context(None, None, None, (*HERE, "https://store.example")) is None


def test_files_that_lack_or_do_not_fit_are_told(tmp_path: Path) -> None:
    authority = create_authority(tmp_path / "own", "tests")
    file = issue(authority.parent, "operator", "anna")

    with pytest.raises(CertificateUnusable, match="--cert-file, --key-file and --ca-file"):
        operator_context(file, None, authority, HERE)
    with pytest.raises(CertificateUnusable, match="No such file"):
        operator_context(file, tmp_path / "none", authority, HERE)
    with pytest.raises(CertificateUnusable, match="mismatch"):
        operator_context(file, key_file(authority), authority, HERE)
    named = operator_context(file, key_file(file), authority, ["https://store.example"])
    assert named is not None
    assert named.verify_mode is ssl.CERT_REQUIRED
    assert named.check_hostname


def test_a_key_with_a_password_is_refused_and_not_asked_for(tmp_path: Path) -> None:
    authority = create_authority(tmp_path / "own", "tests")
    key = serialization.load_pem_private_key(key_file(authority).read_bytes(), None)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )

    with pytest.raises(OSError, match="the key has a password"):
        client_context(authority, locked, authority)
