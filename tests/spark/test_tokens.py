"""Spark against a gateway that requires tokens: the option `token` is enough, and Spark shows it nowhere."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from loadtest.stores import Stores, StoreServers
from tests.support.issuer import Issuer
from tests.support.waiting import SETTLED_S
from tests.unit.gateway.tokens.support import LOG, guarded

pytest.importorskip("pyspark", reason="PySpark is not installed: make setup-spark")

from pyspark.sql import DataFrame, SparkSession


@pytest.fixture
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Issuer:
    return Issuer(tmp_path_factory.mktemp("issuer") / "keys.json")


@pytest.fixture
def gateways(servers: StoreServers, issuer: Issuer) -> Iterator[str]:
    """Gateways in a thread, with a log; their URLs. They start no process: a fork would end py4j's connection."""
    reported: Future[str] = Future()
    ended = asyncio.Event()
    loop = asyncio.new_event_loop()
    stores = servers.fresh()
    thread = threading.Thread(
        target=lambda: loop.run_until_complete(_serve(stores, issuer, reported, ended))
    )
    thread.start()
    try:
        yield reported.result(SETTLED_S)
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(SETTLED_S)
        loop.close()


async def _serve(
    stores: Stores, issuer: Issuer, reported: "Future[str]", ended: asyncio.Event
) -> None:
    try:
        async with guarded(stores, issuer=issuer) as found:
            await found.log(LOG)
            reported.set_result(",".join(found.http.urls))
            await ended.wait()
    except Exception as error:
        if not reported.done():
            reported.set_exception(error)
        raise


def explained(frame: DataFrame) -> str:
    """What Spark prints of a frame and its plans."""
    execution: Any = frame._jdf.queryExecution()
    jvm: Any = frame.sparkSession._jvm
    explain = jvm.org.apache.spark.sql.api.python.PythonSQLUtils.explainString
    texts = (explain(execution, mode) for mode in ("extended", "cost", "formatted"))
    return "\n".join((*texts, execution.toString(), repr(frame)))


def pages(spark: SparkSession) -> str:
    """What the pages of Spark's UI show of queries."""
    store: Any = spark._jsparkSession.sharedState().statusStore()
    found = store.executionsList()
    runs = [found.apply(number) for number in range(found.size())]
    return "\n".join(
        f"{run.description()} {run.details()} {run.physicalPlanDescription()}" for run in runs
    )


def test_spark_reads_and_writes_with_a_token_and_shows_it_nowhere(
    spark: SparkSession, gateways: str, issuer: Issuer
) -> None:
    token = issuer.jwt(f"append:logs/{LOG}", f"read:logs/{LOG}")
    wrong = issuer.jwt(f"read:logs/{LOG}", aud="another")
    access = {"gateway.url": gateways, "token": token}

    rows = spark.range(3, numPartitions=1).selectExpr("cast(id AS string) AS value")
    rows.write.format("quorumlog").options(**access, topic=LOG).mode("append").save()
    frame = spark.read.format("quorumlog").options(**access, subscribe=LOG).load()
    values = [bytes(row.value) for row in frame.collect()]
    refused = spark.read.format("quorumlog").options(**access | {"token": wrong}, subscribe=LOG)
    with pytest.raises(Exception, match="the JWT is for another audience") as error:
        refused.load().collect()
    seen = [explained(frame), pages(spark), f"{error.value} {error.value!r}"]

    assert values == [b"a record", b"0", b"1", b"2"]
    assert all("quorumlog" in text.lower() for text in seen), "something was looked at"
    for secret in (token, wrong):
        for part in secret.split("."):
            assert [number for number, text in enumerate(seen) if part in text] == []
