"""Settings as they are read: from variables, secrets also from files, with a sentence for each that is wrong."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import Field, SecretStr, ValidationError

from quorumlog.net.settings import Settings, SettingsUnusable, is_near, with_password
from services.local.config import ROOT, LocalSettings
from services.metadata.config import Config
from tests.support.settings import MODELS

PROGRAMS = (
    "services.autorecovery",
    "services.bookie",
    "services.gateway",
    "services.local",
    "services.metadata",
)
GOOD = {
    "PORT": "8082",
    "POSTGRES_DSN": "postgresql://user@db-1:5432,db-2:5432/rows",
    "REDIS_URL": "redis://redis",
}


class Toy(Settings):
    count: int = Field(1, ge=1, le=9)
    names: tuple[str, ...] = ()
    key: SecretStr | None = None


def test_every_wrong_setting_gets_its_sentence_at_once() -> None:
    wrong = {"PORT": "http", "CONNECTIONS_MAX": "0", "REDIS_PREFIX": "a b", "POSTGRES_DSN": ""}

    with pytest.raises(SettingsUnusable) as refused:
        Config.read(GOOD | wrong)

    assert refused.value.code == 2
    said = str(refused.value).split("\n")
    assert len(said) == 4
    assert "PORT = 'http': must be a whole number from 1 to 65535" in said
    assert "CONNECTIONS_MAX = '0': must be a whole number from 1 to 200" in said
    assert any(line.startswith("POSTGRES_DSN is not set, nor POSTGRES_DSN_FILE: ") for line in said)
    assert any(line.startswith("REDIS_PREFIX = 'a b': ") for line in said)


def test_a_secret_may_stand_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("canary \n\n")
    file.chmod(0o600)

    read = Toy.read({"KEY_FILE": str(file)})

    assert read.key == SecretStr("canary ")
    assert read.doubts == ()
    with pytest.raises(SettingsUnusable, match=r"^KEY and KEY_FILE are both set: set one of them$"):
        Toy.read({"KEY": "canary", "KEY_FILE": str(file)})
    with pytest.raises(SettingsUnusable, match=r"^KEY_FILE = .*/none': No such file or directory$"):
        Toy.read({"KEY_FILE": str(tmp_path / "none")})


@pytest.mark.parametrize(("mode", "is_reported"), [(0o600, False), (0o440, False), (0o644, True)])
def test_a_readable_secret_file_is_told(tmp_path: Path, mode: int, *, is_reported: bool) -> None:
    file = tmp_path / "key"
    file.write_text("canary")
    file.chmod(mode)

    doubts = Toy.read({"KEY_FILE": str(file)}).doubts

    assert [doubt.split(" ")[0] for doubt in doubts] == ["KEY_FILE"] * is_reported


def test_a_misspelt_setting_is_told_and_a_stranger_s_is_not() -> None:
    environ = GOOD | {"REDIS_DEADLIN_S": "1", "HOSTNAME": "here", "PATH": "/bin"}

    assert Config.read(environ).doubts == (
        "REDIS_DEADLIN_S is not a setting: did you mean REDIS_DEADLINE_S?",
    )


@pytest.mark.parametrize(
    ("name", "meant"),
    [("PROT", "PORT"), ("PORTT", "PORT"), ("DAT", "DATA"), ("TSL", "TLS"), ("BOOKIE", "BOOKIES")],
)
def test_a_misspelt_short_setting_of_the_local_cluster_is_told(name: str, meant: str) -> None:
    environ = {name: "1", "HOME": "/", "HOST": "here", "PATH": "/bin", "PWD": "/", "TERM": "dumb"}

    assert LocalSettings.read(environ).doubts == (
        f"{name} is not a setting: did you mean {meant}?",
    )


def test_no_setting_of_one_service_is_taken_for_a_misspelt_one_of_another() -> None:
    names = {name.upper() for model in MODELS.values() for name in model.model_fields}

    for service, model in MODELS.items():
        own = [name.upper() for name in model.model_fields]
        strangers = names.difference(own)
        near = [name for name in strangers if any(is_near(name, other) for other in own)]
        assert near == [], service


@pytest.mark.parametrize(
    "wrong",
    [
        "postgresql://user:canary/1@host/rows",
        "postgresql://user:can#ary@host/rows",
        "postgresql://user:12/canary@host/rows",
        "postgresql://user:can@ary@host/rows",
        "postgresql://user:[canary@host/rows",
        "canary:canary@host",
        "host?password=canary",
    ],
)
def test_a_database_s_url_that_can_not_be_used_is_refused_without_being_shown(
    wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SettingsUnusable, match=r"^POSTGRES_DSN: must have the form") as refused:
        Config.read(GOOD | {"POSTGRES_DSN": wrong})

    assert "ary" not in str(refused.value) + capsys.readouterr().err


def test_no_text_of_settings_has_a_secret() -> None:
    read = Config.read(GOOD | {"POSTGRES_PASSWORD": "canary", "REDIS_URL": "redis://:canary@host"})

    assert "canary" not in f"{read} {read!r} {read.model_dump()} {read.model_dump_json()}"
    with pytest.raises(ValidationError) as refused:
        Toy.model_validate({"key": ["canary"], "cuont": "canary"})
    assert "canary" not in str(refused.value)


def test_a_password_completes_the_url_that_has_none() -> None:
    password = SecretStr("a/b@c")

    dsn = with_password(SecretStr("postgresql://user@db-1:1,db-2:2/rows"), password)
    assert dsn == "postgresql://user:a%2Fb%40c@db-1:1,db-2:2/rows"
    assert with_password(SecretStr("redis://host/0"), password) == "redis://:a%2Fb%40c@host/0"
    for complete in ("postgresql://user:own@host/rows", "redis://:own@host"):
        assert with_password(SecretStr(complete), password) == complete


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_prints_every_setting_and_no_secret(program: str) -> None:
    environ = {"POSTGRES_DSN": "canary", "COLUMNS": "200", "PYTHONPATH": f"{ROOT}/shared:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", program, "--help"],
        env=environ, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip

    assert (done.returncode, done.stderr) == (0, "")
    model = MODELS[program.removeprefix("services.")]
    is_local = program == "services.local"  # it has an option for each setting
    names = [
        f"--{name.replace('_', '-')}" if is_local else name.upper() for name in model.model_fields
    ]
    assert [name for name in names if name not in done.stdout] == []
    assert "canary" not in done.stdout


def test_a_service_prints_its_version_and_refuses_other_arguments() -> None:
    def run(argument: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "services.metadata", argument]
        return subprocess.run(
            argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
        )

    assert run("--version").stdout.startswith("quorumlog ")
    assert run("--prot").returncode == 2


def test_a_command_of_a_stopped_bookie_has_its_own_help() -> None:
    argv = [sys.executable, "-m", "services.bookie", "verify", "--help"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)

    assert (done.returncode, done.stderr) == (0, "")
    assert "HEARTBEAT_S" not in done.stdout
