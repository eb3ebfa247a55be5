"""Found by PySpark because of its name: registers the format `quorumlog` in every session.

PySpark finds no Python data source of an environment at all if one such module can't be imported. So this
module can be imported wherever PySpark looks for it, and a use of the format says what is missing.
"""

try:
    from quorumlog.spark.source import QuorumLogSource as DefaultSource
except ImportError as error:
    try:
        from pyspark.sql.datasource import DataSource
    except ImportError:
        DataSource = object  # type: ignore[assignment, misc]

    _MISSING = str(error)

    class DefaultSource(DataSource):  # type: ignore[no-redef]
        """Stands for the data source where it can't be imported."""

        def __init__(self, options: object) -> None:
            del options
            raise RuntimeError(f"the format quorumlog can't be used here: {_MISSING}")

        @classmethod
        def name(cls) -> str:
            """The name for `format`."""
            return "quorumlog"


__all__ = ["DefaultSource"]
