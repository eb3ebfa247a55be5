"""Copies the console's JavaScript libraries from the npm registry: `make vendor` (needs npm).

The lock file in `requirements/npm` names the versions and their hashes. The files change in two ways: an
import names the copied file, and the comment about a source map goes.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).resolve().parents[2]
CONSOLE: Final = _ROOT / "services" / "gateway" / "console"
FILES: Final = {
    "preact.js": ("preact", "dist/preact.mjs"),
    "preact-hooks.js": ("preact", "hooks/dist/hooks.mjs"),
    "htm.js": ("htm", "dist/htm.mjs"),
}
"""The copied files, each with its package and its path there."""


def vendored() -> dict[str, str]:
    """The contents of the files, by their names. Raises: CalledProcessError if npm fails."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(_ROOT / "requirements" / "npm" / name, folder)
        subprocess.run(
            ("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"),
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return {
            name: _adapted(Path(folder) / "node_modules" / package, path)
            for name, (package, path) in FILES.items()
        }


def _adapted(package: Path, path: str) -> str:
    text = re.sub(r"\n?//# sourceMappingURL=\S+", "", (package / path).read_text()).strip()
    text = text.replace('from"preact"', 'from"./preact.js"')
    about = json.loads((package / "package.json").read_text())
    licence = about["license"]
    if licence != "Apache-2.0":  # whose text is the file LICENSE of this project
        licence += "\n\n" + (package / "LICENSE").read_text().strip()
    return f"/*! {about['name']} {about['version']}, licence: {licence} */\n{text}\n"


if __name__ == "__main__":
    for name, text in vendored().items():
        (CONSOLE / name).write_text(text)
        sys.stdout.write(f"wrote {name}\n")
