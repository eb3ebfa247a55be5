"""The hooks of `mkdocs.yml`: pages of the repository's root join the site, and links to code become plain text."""

import re
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parents[2]
ADDED: Final = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
_LINK: Final = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the repository's root."""
    for name in ADDED:
        files.append(File.generated(config, name, content=(ROOT / name).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, **_more: Any) -> str:
    """Point each link at its page in the site; a link to a file or folder that is not in the site becomes its text."""
    name = page.file.src_uri
    at = ROOT if name in ADDED else (ROOT / "docs" / name).parent

    def linked(found: re.Match[str]) -> str:
        text, target = found[1], found[2]
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        path, mark, anchor = target.partition("#")
        full = (at / path).resolve()
        if str(full.relative_to(ROOT)) in ADDED:
            up = "../" * name.count("/")
            return f"[{text}]({up}{full.name}{mark}{anchor})"
        if full.is_relative_to(ROOT / "docs") and full.suffix in {".md", ".svg"}:
            return (
                found[0] if at != ROOT else f"[{text}]({path.removeprefix('docs/')}{mark}{anchor})"
            )
        return text

    return _LINK.sub(linked, markdown)
