"""The documentation builds as a site, with every link and anchor checked."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).resolve().parents[1]


def test_the_site_has_every_page_and_no_broken_link(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "--site-dir", str(tmp_path)],
        cwd=_ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert built.returncode == 0, built.stdout + built.stderr
    pages = {page.relative_to(_ROOT / "docs") for page in (_ROOT / "docs").rglob("*.md")}
    for page in pages:
        stem = page.with_name("index.md") if page.name == "README.md" else page
        assert (tmp_path / stem.with_suffix(".html")).is_file(), page
    assert "quorumlog" in (tmp_path / "search" / "search_index.js").read_text("utf-8")
    assert "https://fonts." not in (tmp_path / "index.html").read_text("utf-8")
