"""Tests that are too slow for `make test`: pip installs packages, or several JVMs start. `make test-spark` runs them."""

import os
from typing import Final

import pytest

VERSIONS: Final = os.environ.get("PYSPARK_VERSIONS", "").split()
"""The versions of PySpark to test besides the installed one; empty in `make test`."""
SLOW: Final = pytest.mark.skipif(not VERSIONS, reason="several JVMs start: make test-spark")
