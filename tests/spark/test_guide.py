"""The examples of docs/guides/spark.md, run as they stand there."""

import re
from pathlib import Path
from typing import Any

import pytest

from loadtest.spark_cluster import SparkCluster

pytest.importorskip("pyspark", reason="PySpark is not installed: make setup-spark")

from pyspark.sql import SparkSession

README = Path(__file__).resolve().parents[2] / "README.md"
GUIDE = README.parent / "docs" / "guides" / "spark.md"


def programs(page: Path) -> list[str]:
    """The Python of a page."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def test_the_examples_of_the_guide_do_what_it_says(
    spark: SparkSession, cluster: SparkCluster
) -> None:
    examples = programs(GUIDE)
    names: dict[str, Any] = {"__name__": "guide"}

    for example in examples:
        code = example.replace("http://127.0.0.1:8080", cluster.url("gateway-1"))
        exec(compile(code, str(GUIDE), "exec"), names)
    names["http"].close()

    assert names["spark"].sparkContext is spark.sparkContext
    assert len(examples) >= 10
    # 1000 copied as a stream, 1000 by a write in foreachBatch, 100 by a UDF, 1010 by foreachBatch.
    assert len(cluster.values("copy")) == 1000 + 1000 + 100 + 1010
    assert len(cluster.values("orders")) == 1010


def test_the_example_of_the_readme_does_what_it_says(
    spark: SparkSession, cluster: SparkCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = [code for code in programs(README) if "pyspark" in code]
    code = example.replace("http://127.0.0.1:8080", cluster.url("gateway-1"))

    exec(compile(code, str(README), "exec"), {"__name__": "readme"})

    assert spark.sparkContext is not None
    assert capsys.readouterr().out.split() == ["1000"]
