"""Executors that have PySpark and no package of ours but a zip."""

import json
import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

from loadtest.spark_cluster import SparkCluster
from quorumlog.spark import config
from tests.spark.slow import SLOW

pytest.importorskip("pyspark", reason="PySpark is not installed: make setup-spark")

SHARED: Final = Path(__file__).resolve().parents[2] / "shared"
NEEDED: Final = ("pyspark", "py4j", "pyarrow", "pandas", "numpy", "numpy.libs", "dateutil", "pytz")
MORE: Final = ("six.py", "tzdata", "pandas.libs")

JOB: Final = """
import json, sys
from pyspark.sql import SparkSession
asked = json.loads(sys.argv[1])
spark = (
    SparkSession.builder.master("local-cluster[1,2,1024]")
    .config("spark.ui.enabled", "false")
    .config("spark.log.level", "ERROR")
    # Quick to start, as in conftest.py.
    .config("spark.driver.extraJavaOptions", asked["java"])
    .config("spark.executor.extraJavaOptions", asked["java"])
    .config("spark.executorEnv.PYTHONPATH", asked["site"])
    .getOrCreate()
)
spark.sparkContext.addPyFile(asked["zip"])
sys.path.insert(0, asked["zip"])
from quorumlog.spark.source import QuorumLogSource
spark.dataSource.register(QuorumLogSource)

def absent(_):
    import importlib.util
    import quorumlog
    yield bool(importlib.util.find_spec("aiohttp")), quorumlog.__file__

def options(on):
    return on.format("quorumlog").option("gateway.url", asked["urls"])

rows = spark.range(1000, numPartitions=2).selectExpr("CAST(id AS string) AS value")
options(rows.write).option("topic", asked["log"]).mode("append").save()
count = options(spark.read).option("subscribe", asked["log"]).load().count()
where = spark.sparkContext.parallelize(range(2), 2).mapPartitions(absent).collect()
print(json.dumps({"count": count, "where": where}))
spark.stop()
"""


@SLOW
def test_executors_need_pyspark_and_a_zip_and_nothing_else(
    cluster: SparkCluster, tmp_path: Path
) -> None:
    site, archive = tmp_path / "site", tmp_path / "quorumlog.zip"
    _link_pyspark(site)
    with zipfile.ZipFile(archive, "w") as zipped:
        for path in sorted(SHARED.rglob("*.py")):
            zipped.write(path, path.relative_to(SHARED))
    interpreter = tmp_path / "python"
    # Without site-packages: what is to be found stands in PYTHONPATH.
    interpreter.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    interpreter.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(site), "PYSPARK_PYTHON": str(interpreter)}
    environment["PYSPARK_DRIVER_PYTHON"] = str(interpreter)
    config.prepare(environment)
    asked = {
        "urls": cluster.urls,
        "log": cluster.create("zipped"),
        "zip": str(archive),
        "site": str(site),
        "java": f"-XX:TieredStopAtLevel=1 -Xlog:disable -Djava.io.tmpdir={tmp_path}",
    }

    done = subprocess.run(
        [str(interpreter), "-c", JOB, json.dumps(asked)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=tmp_path,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["count"] == 1000
    assert sorted(map(int, cluster.values("zipped"))) == list(range(1000))
    for has_aiohttp, place in found["where"]:
        assert not has_aiohttp
        assert ".zip" in place


def _link_pyspark(site: Path) -> None:
    """A folder with PySpark and what it needs, from wherever they are installed."""
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    packages = Path(spec.origin).parent.parent
    site.mkdir()
    for name in (*NEEDED, *MORE):
        if (packages / name).exists():
            (site / name).symlink_to(packages / name)
