"""A scenario's text: comments (#), lines to play (>), and below each what came of it.

A comment `# Without: ...` names the mutants (tests/mutation/mutants) that break it, and how.
"""

from contextlib import ExitStack
from pathlib import Path

from tests.model.logs.stage import LogStage
from tests.model.scenarios.stage import Stage, Wrong
from tests.mutation.mutants.hunt import Mutant, applied

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


def scripts_of(mutant: Mutant) -> list[Path]:
    """The scenarios that name a mutant."""
    return [path for path in paths() if mutant.name in switches(path)]


def goes_wrong(path: Path, mutant: Mutant) -> bool:
    """Whether a scenario goes otherwise without a guard; one of logs must end in a violation."""
    with applied(mutant):
        try:
            went = played(path)
        except (Wrong, IndexError, AssertionError):
            # What the script waits for does not come, or a machine's own check fails.
            return path.parent.name != LOGS
    return went != path.read_text(encoding="utf-8") and (
        path.parent.name != LOGS or "VIOLATION" in went
    )
