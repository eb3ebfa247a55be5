"""compose.yaml as a program reads it."""

import re
from collections.abc import Mapping
from typing import Any, Final

import yaml  # type: ignore[import-untyped]

from services.local.config import ROOT

_VARIABLE: Final = re.compile(r"\$\{(\w+):([-+])([^}]*)\}")


def read_compose(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The file with its variables replaced."""
    given = environ or {}

    def value(match: re.Match[str]) -> str:
        name, when, other = match.groups()
        has = bool(given.get(name))
        if when == "+":
            return other if has else ""
        return given[name] if has else other

    found: dict[str, Any] = yaml.safe_load(
        _VARIABLE.sub(value, (ROOT / "compose.yaml").read_text())
    )
    return found


def is_job(service: Mapping[str, Any]) -> bool:
    """Whether it runs once and ends."""
    return bool(service["restart"] == "no")
