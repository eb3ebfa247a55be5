"""The commands of docs/learn/production.md: each block says in its first line where it is run."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[3]
PAGE: Final = ROOT / "docs/learn/production.md"
HOSTS: Final = ("host-1", "host-2", "host-3")
ADMINISTRATION: Final = "the administration host"
PLACES: Final = {
    "on each host": HOSTS,
    f"on {ADMINISTRATION}": (ADMINISTRATION,),
    **{f"on {host}": (host,) for host in HOSTS},
}

_SECTION: Final = re.compile(r"^## (.+)\n((?:(?!^## ).*\n?)*)", re.MULTILINE)
_BLOCK: Final = re.compile(r"^```sh\n# ([^\n]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """Commands, and where they are run."""

    places: tuple[str, ...]
    script: str


def sections() -> dict[str, list[Block]]:
    """The blocks of the page below each heading that has any. Raises: KeyError for a place that is none."""
    text = PAGE.read_text()
    found = {
        heading: [Block(PLACES[place], script) for place, script in _BLOCK.findall(body)]
        for heading, body in _SECTION.findall(text)
    }
    assert sum(map(len, found.values())) == text.count("```sh\n"), "a block that says no place"
    return {heading: blocks for heading, blocks in found.items() if blocks}
