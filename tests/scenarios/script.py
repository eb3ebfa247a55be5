"""A scenario's text: comments (#), lines to play (>), and below each what came of it.

A comment `# Without: ...` names the mutants (tests/mutants) that break it, and how.
"""

from contextlib import ExitStack
from pathlib import Path

from tests.logs.stage import LogStage
from tests.scenarios.stage import Stage

FOLDER = Path(__file__).parent
LOGS = "logs"
"""The folder of scenarios of logs."""


def paths() -> list[Path]:
    return sorted(FOLDER.glob("*/*.txt"))


def played(path: Path) -> str:
    """The scenario of a file with what comes of it now."""
    text = path.read_text(encoding="utf-8")
    out: list[str] = []
    with ExitStack() as stack:
        stage: Stage | LogStage = Stage()
        if path.parent.name == LOGS:
            stage = LogStage()
            stack.callback(stage.close)
        for line in text.splitlines():
            if line.startswith("> "):
                out.append(line)
                out.extend(f"  {said}" for said in stage.play(line[2:]))
            elif not line.startswith("  "):
                out.append(line)
    return "\n".join(out).rstrip("\n") + "\n"


def switches(path: Path) -> list[str]:
    """The mutants that a scenario names."""
    mark = "# Without: "
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.removeprefix(mark) for line in lines if line.startswith(mark)]
