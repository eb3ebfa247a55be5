"""`python -m tests.support.picture --write`: draws `docs/append.svg`, the picture of README.md."""

import sys
from pathlib import Path
from typing import Final

FILE: Final = Path(__file__).resolve().parents[2] / "docs" / "append.svg"

_HEAD: Final = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 330" role="img"
 font-family="system-ui, sans-serif" font-size="14" aria-label="The way of an append">
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">
<path d="M0 0L8 4L0 8z" fill="#334155"/></marker></defs>
<rect width="900" height="330" rx="12" fill="#ffffff"/>
"""


def box(x: int, y: int, width: int, title: str, text: str, fill: str = "#e0f2fe") -> str:
    """A process, with its name and what it does."""
    middle = x + width // 2
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="52" rx="8" fill="{fill}" stroke="#334155"/>\n'
        f'<text x="{middle}" y="{y + 22}" text-anchor="middle" font-weight="600">{title}</text>\n'
        f'<text x="{middle}" y="{y + 41}" text-anchor="middle" font-size="12" fill="#475569">{text}</text>\n'
    )


def arrow(start: tuple[int, int], end: tuple[int, int], *, is_dashed: bool = False) -> str:
    """A message, in the direction in which it is sent."""
    (x, y), (to_x, to_y) = start, end
    dashes = ' stroke-dasharray="5 4"' if is_dashed else ""
    line = f'<path d="M{x} {y}L{to_x} {to_y}" stroke="#334155" fill="none"'
    return f'{line} marker-end="url(#tip)"{dashes}/>\n'


def label(x: int, y: int, text: str) -> str:
    """Words beside an arrow."""
    return (
        f'<text x="{x}" y="{y}" text-anchor="middle" font-size="12" fill="#0f172a">{text}</text>\n'
    )


def drawn() -> str:
    """The whole picture."""
    clients = (("curl, any language", "JSON, NDJSON, SSE"), ("Python, CLI", "quorumlog.client"),
               ("Spark", "batches and streams"))  # fmt: skip
    parts = [_HEAD]
    parts += [box(20, 50 + 75 * at, 170, *each, "#f1f5f9") for at, each in enumerate(clients)]
    parts.append(box(330, 125, 170, "gateway", "stateless, any number"))
    parts += [box(690, 50 + 75 * at, 190, f"bookie {at + 1}", "append-only files, fsync")
              for at in range(3)]  # fmt: skip
    parts.append(box(255, 262, 150, "Postgres", "ledger metadata", "#fef9c3"))
    parts.append(box(425, 262, 150, "Redis", "which bookies live", "#fef9c3"))
    parts += [arrow((190, 76 + 75 * at), (328, 145 + 6 * at)) for at in range(3)]
    parts += [arrow((500, 145 + 6 * at), (688, 76 + 75 * at)) for at in range(3)]
    parts += [arrow((390, 178), (340, 260), is_dashed=True),
              arrow((440, 178), (490, 260), is_dashed=True)]  # fmt: skip
    parts += [
        label(415, 30, "A gateway acknowledges an append when two of three bookies have it on disk."),
        label(258, 88, "1. append"), label(590, 88, "2. entry"), label(785, 38, "3. sync"),
        label(415, 112, "4. acknowledge"),
    ]  # fmt: skip
    return "".join(parts) + "</svg>\n"


if __name__ == "__main__":
    if "--write" in sys.argv:
        FILE.write_text(drawn(), encoding="utf-8")
    else:
        sys.stdout.write(drawn())
