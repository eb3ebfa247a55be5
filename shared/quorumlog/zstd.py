"""Imports `zstd` from the standard library (Python 3.14 or later) or from `backports.zstd`."""

import sys

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

__all__ = ["zstd"]
