"""Loaded by schemathesis: half of the requests are about things that are there."""

import zlib
from typing import Any

import schemathesis

# It says what no HTTP server refuses.
from tests.unit.client.schemathesis_hooks import filter_case

__all__ = ["filter_case", "map_path_parameters"]

_LEDGERS = 4
_NAMES = {"name": ("events", "bookie-1", "bookie-2"), "member": ("bookie-1@1",)}


@schemathesis.hook  # type: ignore[untyped-decorator]
def map_path_parameters(
    _context: schemathesis.HookContext, path_parameters: dict[str, Any] | None
) -> dict[str, Any] | None:
    """A ledger, a log, a bookie that exists, as often as what was made up."""
    if not path_parameters:
        return path_parameters
    made = dict(path_parameters)
    for name, value in path_parameters.items():
        dice = zlib.crc32(repr(value).encode())
        if dice % 2:
            continue
        if name == "ledger_id":
            made[name] = dice // 2 % _LEDGERS + 1
        elif name in _NAMES:
            made[name] = _NAMES[name][dice // 2 % len(_NAMES[name])]
    return made
