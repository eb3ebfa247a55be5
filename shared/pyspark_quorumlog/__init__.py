"""Registers the format `quorumlog` in every session: PySpark imports modules named `pyspark_…`.

If such a module raises on import, PySpark finds none of the environment's Python data sources. So
this module never raises; instead, a use of the format raises an error that says what is missing.
"""

try:
    from quorumlog.spark.source import QuorumLogSource as DefaultSource
except Exception as error:  # noqa: BLE001 - a package that is half installed raises anything
    try:
        from pyspark.sql.datasource import DataSource
    except ImportError:
        DataSource = object  # type: ignore[assignment, misc]

    _MISSING = f"{type(error).__name__}: {error}"

    class DefaultSource(DataSource):  # type: ignore[no-redef]
        """Stands in for a data source that can't be imported; its use raises RuntimeError."""

        def __init__(self, options: object) -> None:
            del options
            raise RuntimeError(f"the format quorumlog can't be used here: {_MISSING}")

        @classmethod
        def name(cls) -> str:
            """The name to pass to `format`."""
            return "quorumlog"


__all__ = ["DefaultSource"]
