"""Links between the pages of this repository lead to a file that is there, and to a heading in it."""

import re
import subprocess
from pathlib import Path
from typing import Final

import pytest

_ROOT: Final = Path(__file__).resolve().parent.parent
_LINK: Final = re.compile(r"\]\(([^)\s:]+)\)")
_FENCED: Final = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.md"], cwd=_ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git repository")
    return [_ROOT / name for name in listed.stdout.split("\0") if name and (_ROOT / name).exists()]


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub names them in links."""
    headings = re.findall(r"^#+ (.+)$", _FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_each_link_leads_to_a_page_and_its_heading() -> None:
    lost = []
    for page in pages():
        for link in _LINK.findall(_FENCED.sub("", page.read_text())):
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                lost.append((str(page.relative_to(_ROOT)), link))

    assert lost == []
