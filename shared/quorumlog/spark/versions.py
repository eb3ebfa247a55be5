"""Compatibility with PySpark 4.0 to 4.3: stand-ins replace classes that older versions lack."""

import re
from collections.abc import Iterable
from typing import Final

import pyspark

from quorumlog.spark.options import BadOption

try:
    from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamWriter
except ImportError:
    raise ImportError(
        f"the format quorumlog needs PySpark 4.0 to 4.3, and this is PySpark {pyspark.__version__}:"
        " pip install 'quorumlog[spark]'"
    ) from None

try:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
except ImportError:

    class DataSourceStreamArrowWriter(DataSourceStreamWriter, DataSourceArrowWriter):  # type: ignore[no-redef, misc]
        """For PySpark 4.0, which passes Arrow to a stream writer that is also a batch Arrow writer."""


try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:

    class _Absent:
        """Stands in for classes that PySpark has from 4.2 on."""

    ReadAllAvailable = ReadLimit = ReadMaxBytes = ReadMaxRows = _Absent  # type: ignore[assignment, misc]
    SupportsTriggerAvailableNow = _Absent  # type: ignore[assignment, misc]

__all__ = [
    "DataSourceStreamArrowWriter",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxBytes",
    "ReadMaxRows",
    "SupportsTriggerAvailableNow",
    "check",
]

_SINCE: Final = {
    "pushFilters": (4, 1),
    "maxOffsetsPerTrigger": (4, 2),
    "maxBytesPerTrigger": (4, 2),
    "minOffsetsPerTrigger": (4, 2),
    "maxTriggerDelay": (4, 2),
    "publishProgressAs": (4, 2),
    "queue": (4, 2),
}
"""The PySpark version that each option needs; 4.0 lacks filters and limits of reads."""


def check(options: Iterable[str], version: str = pyspark.__version__) -> None:
    """Raise BadOption for an option that this version of PySpark can't fulfil."""
    found = re.match(r"(\d+)\.(\d+)", version)
    own = (int(found[1]), int(found[2])) if found else (0, 0)
    given = {name.lower() for name in options}
    for name, since in _SINCE.items():
        if name.lower() in given and own < since:
            raise BadOption(
                f"{name} needs PySpark {since[0]}.{since[1]} or later; this is {version}"
            )
