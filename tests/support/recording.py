"""`python -m tests.support.recording`: runs `make demo` and draws what it prints as `docs/demo.svg`."""

import os
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

ROOT: Final = Path(__file__).resolve().parents[2]
FILE: Final = ROOT / "docs" / "demo.svg"
_WIDTH: Final = 110


def main() -> None:
    """Run the demo, show its output, and write the picture if the demo succeeds."""
    demo = subprocess.Popen(
        ["make", "-s", "demo"],
        cwd=ROOT,
        env=os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(_WIDTH)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert demo.stdout is not None
    screen = Console(record=True, width=_WIDTH, file=StringIO(), force_terminal=True)
    screen.print(Text("$ make demo", style="bold"))
    for line in demo.stdout:
        sys.stdout.write(line)
        if "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in line:
            continue  # a state of the progress bar, which the next one overwrites
        screen.print(Text.from_ansi(line.rstrip("\n")))
    if status := demo.wait():
        raise SystemExit(status)
    drawn = screen.export_svg(title="make demo")
    # Without the web fonts: a picture must not make a reader's browser ask other hosts.
    FILE.write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL), "utf-8")


if __name__ == "__main__":
    main()
