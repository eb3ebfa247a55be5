"""A scenario's text: comments (#), lines to play (>), and below each what came of it."""

from pathlib import Path

from tests.scenarios.stage import Stage

FOLDER = Path(__file__).parent


def paths() -> list[Path]:
    return sorted(FOLDER.glob("*/*.txt"))


def played(text: str) -> str:
    """The same scenario with what comes of it now."""
    stage = Stage()
    out: list[str] = []
    for line in text.splitlines():
        if line.startswith("> "):
            out.append(line)
            out.extend(f"  {said}" for said in stage.play(line[2:]))
        elif not line.startswith("  "):
            out.append(line)
    return "\n".join(out).rstrip("\n") + "\n"
