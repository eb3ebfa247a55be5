"""Expired certificates, which the command line does not create."""

from collections.abc import Sequence
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Self
from unittest.mock import patch

from quorumlog import certificates


class _LastYear(datetime):
    """A clock that is 400 days behind, so that a certificate for one day has expired."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return super().now(tz) - timedelta(days=400)


def expired(folder: Path, role: str, name: str, hosts: Sequence[str]) -> Path:
    """An expired certificate, issued by the authority in `folder`."""
    with patch.object(certificates, "datetime", _LastYear):
        return certificates.issue(folder, role, name, hosts, days=1)
