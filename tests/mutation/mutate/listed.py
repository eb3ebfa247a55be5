"""`equivalent.toml`: mutants that nothing can or need show, each with its reason."""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

LIST: Final = Path(__file__).with_name("equivalent.toml")


def equivalent(path: Path = LIST) -> dict[str, str]:
    """The names of these mutants, and why each is here."""
    with path.open("rb") as file:
        groups = tomllib.load(file).get("because", [])
    found: dict[str, str] = {}
    for group in groups:
        for name in group["mutants"]:
            assert name not in found, f"{name} is listed twice"
            found[name] = group["reason"]
    return found


def stale(listed: Iterable[str], paths: Iterable[str], known: Iterable[str]) -> list[str]:
    """Those of the files walked that the code no longer has: their reason is to be looked at again."""
    walked, there = set(paths), set(known)
    return [name for name in listed if name.partition("::")[0] in walked and name not in there]
