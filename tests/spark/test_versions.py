"""Older versions of PySpark, and Spark Connect: what they need is in folders below build/ (`pip install`, once)."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from loadtest.spark_cluster import SparkCluster
from quorumlog.spark import config

pytest.importorskip("pyspark", reason="PySpark is not installed: make setup-spark")

from quorumlog.spark.options import BadOption
from quorumlog.spark.versions import check
from tests.spark.slow import SLOW, VERSIONS
from tests.support.waiting import LOST_WORKER, DeadlineMissed

ROOT: Final = Path(__file__).resolve().parents[2]
OTHER: Final = """
from pyspark.sql.datasource import DataSource, DataSourceReader
class DefaultSource(DataSource):
    @classmethod
    def name(cls): return "other"
    def schema(self): return "a int"
    def reader(self, schema): return Reader()
class Reader(DataSourceReader):
    def read(self, partition): yield (1,)
"""


def installed(name: str, *wanted: str) -> Path:
    """A folder with these packages, of which other packages are as they are installed here."""
    folder = ROOT / "build" / name
    if not folder.exists():
        draft = folder.with_name(f"{name}.{os.getpid()}")
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "install",
                "-q",
                "--no-input",
                "--target",
                str(draft),
                *wanted,
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            shutil.rmtree(draft, ignore_errors=True)
            pytest.skip(f"{' '.join(wanted)} can't be installed: {done.stderr.strip()[-300:]}")
        draft.rename(folder)
    return folder


def printed_by(job: str, packages: Path, folder: Path, **asked: Any) -> Any:
    """What a program of this folder prints, with these packages and beside another data source."""
    folder.joinpath("pyspark_other.py").write_text(OTHER)
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (packages, ROOT / "shared", folder)))
    config.prepare(environment)
    asked["java"] = f"-XX:TieredStopAtLevel=1 -Xlog:disable -Djava.io.tmpdir={folder}"
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(job)), json.dumps(asked)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    if done.returncode and LOST_WORKER in done.stderr:
        raise DeadlineMissed(LOST_WORKER, done.stderr[-300:], 10)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@SLOW
@pytest.mark.parametrize("version", VERSIONS or [""])
def test_an_older_pyspark_writes_reads_and_streams_and_names_what_it_lacks(
    cluster: SparkCluster, tmp_path: Path, version: str
) -> None:
    one, other = (f"version-{version}-{name}" for name in ("one", "other"))
    for log in (one, other):
        if cluster.http.pages("/v1/logs", "logs", prefix=log):
            cluster.http.request("DELETE", f"/v1/logs/{log}", is_repeatable=True)
        cluster.create(log)
    wanted = ("--no-deps", "--no-build-isolation", f"pyspark=={version}")
    packages = installed(f"pyspark-{version}", *wanted)
    where = {"urls": cluster.urls, "one": one, "other": other}
    found = printed_by("versioned_job.py", packages, tmp_path, **where)
    assert (found["version"], found["others"], found["counts"]) == (version, 1, [105, 105])
    lacks_limits, lacks_filters = version < "4.2", version < "4.1"
    assert ("maxOffsetsPerTrigger needs PySpark 4.2" in found["limited"]) == lacks_limits
    assert ("pushFilters needs PySpark 4.1" in found["filtered"]) == lacks_filters


@SLOW
def test_jobs_run_under_spark_connect_or_say_that_they_do_not(
    cluster: SparkCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_TESTING", "1")  # the server listens at any free port
    monkeypatch.setenv("CLUSTER_SECRET_FILE", str(cluster.data / "cluster-secret"))
    log = cluster.create("connected")
    cluster.append(log, "a")
    packages = installed(
        "spark-connect", "grpcio", "grpcio-status", "googleapis-common-protos", "zstandard"
    )

    found = printed_by("connect_job.py", packages, tmp_path, urls=cluster.urls, log=log)

    assert found["rows"] == 2
    assert found["copies"] > 0
    assert "which Spark Connect does not offer" in found["refused"]


def printed(code: str) -> list[str]:
    """What a Python without a module of somebody else's prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "shared")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("pyspark.sql.datasource", "the format quorumlog needs PySpark 4.0 to 4.3, and this is "),
        ("pyarrow", "pyarrow"),
        ("pyspark", "pyspark"),
    ],
)
def test_the_module_that_spark_finds_can_be_imported_anywhere_and_says_what_is_missing(
    module: str, said: str
) -> None:
    name, sentence = printed(
        f"""import sys
sys.modules[{module!r}] = None
from pyspark_quorumlog import DefaultSource
print(DefaultSource.name())
try:
    DefaultSource({{}})
except RuntimeError as error:
    print(error)
"""
    )
    assert name == "quorumlog"
    assert sentence.startswith("the format quorumlog can't be used here: ")
    assert said in sentence


def test_a_module_that_fails_in_any_way_hides_no_other_data_source() -> None:
    """As numpy does where it does not fit what was built for another version of it."""
    (sentence,) = printed(
        """import sys
import pyspark.sql.datasource
class Broken:
    def find_spec(self, name, *_):
        if name == "pyarrow":
            raise ValueError("numpy.dtype size changed")
sys.meta_path.insert(0, Broken())
from pyspark_quorumlog import DefaultSource
try:
    DefaultSource({})
except RuntimeError as error:
    print(error)
"""
    )
    assert sentence.endswith("can't be used here: ValueError: numpy.dtype size changed")


def test_the_source_needs_nothing_that_pyspark_4_0_lacks() -> None:
    """`make test-spark` runs it there."""
    name, kinds = printed(
        """import sys
import pyspark.sql.datasource as api
kind = api.Filter
for name, found in list(vars(api).items()):
    if name == "DataSourceStreamArrowWriter" or isinstance(found, type) and issubclass(found, kind):
        delattr(api, name)
sys.modules["pyspark.sql.streaming.datasource"] = None
from pyspark_quorumlog import DefaultSource
from quorumlog.spark.source import StreamReader, StreamWriter
print(DefaultSource.__name__)
print(issubclass(StreamReader, api.DataSourceStreamReader), [base.__name__ for base in StreamWriter.__mro__])
"""
    )
    assert name == "QuorumLogSource"
    # A writer of streams gets Arrow in 4.0 if it is a batch's Arrow writer too.
    assert kinds.startswith("True ")
    assert "'DataSourceStreamWriter', 'DataSourceArrowWriter'" in kinds


@pytest.mark.parametrize(
    "name", ["pushFilters", "maxOffsetsPerTrigger", "publishProgressAs", "queue"]
)
def test_an_option_is_refused_where_pyspark_is_too_old_for_it(name: str) -> None:
    with pytest.raises(BadOption, match=rf"{name} needs PySpark 4\.[12] or later; this is 4\.0\.5"):
        check({name.lower(): "1"}, "4.0.5")
    check({name: "1", "subscribe": "a"}, "4.2.0.dev1")
