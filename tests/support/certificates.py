"""Expired certificates, which the command line does not create."""

from collections.abc import Sequence
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Self
from unittest.mock import patch

from quorumlog import certificates


class _LastYear(datetime):
    """A clock by which a certificate of a day has ended long ago."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return super().now(tz) - timedelta(days=400)


def expired(folder: Path, role: str, name: str, hosts: Sequence[str]) -> Path:
    """A certificate of the authority in a folder that has ended."""
    with patch.object(certificates, "datetime", _LastYear):
        return certificates.issue(folder, role, name, hosts, days=1)
