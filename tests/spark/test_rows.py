"""Rows of a DataFrame as records: how much each weighs."""

import zlib
from typing import Any, cast

import pytest

pytest.importorskip("pyspark", reason="PySpark is not installed: make setup-spark")

import pyarrow as pa

from quorumlog.spark.http import Gateways
from quorumlog.spark.plan import TaskRange
from quorumlog.spark.rows import by_log, crc32, rows, sizes


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


class Compacted:
    """A gateway with a log of which only the offsets `left` below 100 are there (rule 27d)."""

    speaks_arrow = False

    def __init__(self, *left: int) -> None:
        self.left, self.asked = left, list[int]()

    def get(self, _path: str, params: dict[str, Any]) -> dict[str, Any]:
        at, limit = params["from"], params["limit"]
        self.asked.append(at)
        found = [offset for offset in self.left if offset >= at][:limit]
        record = {"timestamp": "2026-01-02T03:04:05.678Z", "ledger_id": 1, "entry_id": 0}
        return {
            "records": [
                {**record, "offset": each, "key": "YQ==", "headers": {}, "data": "YQ=="}
                for each in found
            ],
            "next": found[-1] + 1 if len(found) == limit else 100,
        }


@pytest.mark.parametrize(
    ("left", "first", "end", "expected"),
    [
        ((3, 5, 50, 60), 0, 10, [3, 5]),
        ((50,), 0, 10, []),
        ((9, 10), 9, 10, [9]),
        ((), 0, 10, []),
    ],
)
def test_a_range_of_a_compacted_log_has_no_record_of_another_range(
    left: tuple[int, ...], first: int, end: int, expected: list[int]
) -> None:
    part = TaskRange("log", 1, first, end)

    found = rows(cast("Gateways", Compacted(*left)), part, ("offset",), fails_on_loss=True)

    assert [at for batch in found for at in batch.column("offset").to_pylist()] == expected
