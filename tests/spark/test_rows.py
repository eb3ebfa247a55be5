"""Rows of a DataFrame as records: how much each weighs."""

import zlib

import pytest

pytest.importorskip("pyspark", reason="PySpark is not installed: make setup-spark")

import pyarrow as pa

from quorumlog.spark.rows import by_log, crc32, sizes


def test_a_row_weighs_what_its_value_key_and_headers_do() -> None:
    rows = [
        {"value": b"abc", "key": b"k", "headers": [("h", "12345")]},
        {"value": b"", "key": None, "headers": None},
        {"value": b"ab", "key": b"", "headers": [("a", "1"), ("b", "22")]},
        {"value": b"a", "key": None, "headers": []},
    ]
    kind = pa.schema(
        [("value", pa.binary()), ("key", pa.binary()), ("headers", pa.map_(*[pa.string()] * 2))]
    )
    ((_, table),) = by_log(pa.RecordBatch.from_pylist(rows, kind), "log")

    assert list(sizes(table)) == [3 + 1 + 6, 0, 2 + 5, 1]
    assert list(sizes(table.slice(1, 2))) == [0, 7]
    assert list(sizes(pa.concat_tables([table.slice(2), table]))) == [7, 1, 10, 0, 7, 1]
    plain = table.select(["value"])
    both = pa.concat_tables([plain, table], promote_options="default")
    assert list(sizes(both)) == [3, 0, 2, 1, 10, 0, 7, 1]
    assert list(sizes(plain)) == [3, 0, 2, 1]
    assert list(sizes(table.slice(0, 0))) == []


def test_the_digest_of_a_ledger_is_of_its_values_however_they_are_cut() -> None:
    values = [b"abc", b"", b"d" * 1000, b"ef"]
    table = pa.table({"value": pa.array(values, pa.binary())})
    empty = pa.table({"value": pa.array([], pa.binary())})
    parts = pa.concat_tables([empty, table.slice(0, 1), table.slice(1)])

    assert crc32(table) == crc32(parts) == zlib.crc32(b"".join(values))
    assert crc32(table.slice(2, 2), crc32(table.slice(0, 2))) == crc32(table)
    assert crc32(table.slice(1, 1), 7) == crc32(empty, 7) == 7
