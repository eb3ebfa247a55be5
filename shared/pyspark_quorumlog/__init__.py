"""Found by PySpark because of its name: registers the format `quorumlog` in every session.

If one such module raises when it is imported, PySpark finds none of the environment's Python data sources.
So this module never raises; a use of the format says what is missing.
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
        """Stands for the data source where it can't be imported."""

        def __init__(self, options: object) -> None:
            del options
            raise RuntimeError(f"the format quorumlog can't be used here: {_MISSING}")

        @classmethod
        def name(cls) -> str:
            """The name for `format`."""
            return "quorumlog"


__all__ = ["DefaultSource"]
