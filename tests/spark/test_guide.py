"""The examples of the Spark guide and of the Spark tutorial, run as they stand there."""

import re
from pathlib import Path
from typing import Any

import pytest

from loadtest.spark_cluster import SparkCluster

pytest.importorskip("pyspark", reason="PySpark is not installed: make setup-spark")

from pyspark.sql import SparkSession

DOCS = Path(__file__).resolve().parents[2] / "docs"
GUIDE = DOCS / "guides" / "spark.md"
TUTORIAL = DOCS / "learn" / "spark.md"


def programs(page: Path) -> list[str]:
    """The Python of a page."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def run(page: Path, cluster: SparkCluster) -> tuple[int, dict[str, Any]]:
    """Run a page's examples as one program. Returns their number and the program's names."""
    examples = programs(page)
    names: dict[str, Any] = {"__name__": "guide"}
    for example in examples:
        code = example.replace("http://127.0.0.1:8080", cluster.url("gateway-1"))
        exec(compile(code, str(page), "exec"), names)
    return len(examples), names


def test_the_examples_of_the_guide_do_what_it_says(
    spark: SparkSession, cluster: SparkCluster
) -> None:
    count, names = run(GUIDE, cluster)
    names["http"].close()

    assert names["spark"].sparkContext is spark.sparkContext
    assert count >= 10
    # 1000 copied as a stream, 1000 by a write in foreachBatch, 100 by a UDF, 1010 by foreachBatch.
    assert len(cluster.values("copy")) == 1000 + 1000 + 100 + 1010
    assert len(cluster.values("orders")) == 1010


@pytest.mark.usefixtures("spark")
def test_the_tutorial_writes_reads_and_follows_a_log(
    cluster: SparkCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    count, _ = run(TUTORIAL, cluster)

    assert count == 3
    assert len(cluster.values("clicks")) == 100
    assert "|   0|   15|" in capsys.readouterr().out
