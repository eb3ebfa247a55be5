"""The guides' programs run as they stand, and print what the guides say that they print."""

import asyncio
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from loadtest.cluster import Cluster
from tests.support.waiting import SETTLED_S, within

pytestmark = pytest.mark.asyncio(loop_scope="package")

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "docs" / "guides"
LANGUAGES = {
    "curl": "sh",
    "transactions": "sh",
    "python": "python",
    "javascript": "js",
    "go": "go",
}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    """A program of a guide, and what it prints."""

    guide: str
    number: int
    source: str
    output: str

    def __str__(self) -> str:
        return f"{self.guide}-{self.number}"


def snippets(guide: str) -> list[Snippet]:
    found = [
        Snippet(guide, number, block[2], block[3])
        for number, block in enumerate(BLOCK.finditer((GUIDES / f"{guide}.md").read_text()), 1)
        if block[1] == LANGUAGES[guide]
    ]
    assert found, guide
    assert all(snippet.output for snippet in found), "a program without its output"
    return found


def command(snippet: Snippet, file: Path) -> list[str]:
    """How it is run; the test is skipped where the tool is not on the machine."""
    commands = {
        "sh": ["sh", str(file)],
        "python": [sys.executable, str(file)],
        "js": ["node", str(file)],
        # Compiling takes most of it; nothing of what optimising gives is needed here.
        "go": ["go", "run", "-gcflags=all=-N -l", str(file)],
    }
    language = LANGUAGES[snippet.guide]
    needed = "curl" if language == "sh" else commands[language][0]
    if shutil.which(needed) is None:
        pytest.skip(f"{needed} is not on this machine: the guide's program was not run")
    return commands[language]


async def output_of(words: list[str], folder: Path, **environment: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *words,
        cwd=folder,
        env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with within(f"{words[0]} ends", SETTLED_S):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()[-4000:]
    return out.decode()


@pytest.mark.parametrize("snippet", [s for name in LANGUAGES for s in snippets(name)], ids=str)
async def test_a_guide_s_program_prints_what_the_guide_says(
    cluster: Cluster, snippet: Snippet, tmp_path: Path
) -> None:
    source = snippet.source
    for number, url in enumerate(cluster.gateways):
        source = source.replace(f"http://127.0.0.1:{8080 + number}", url)
    language = LANGUAGES[snippet.guide]
    suffix = {"python": "py", "js": "mjs"}.get(language, language)
    file = tmp_path / f"program.{suffix}"
    file.write_text(source)
    cache = ROOT / "build" / "go"

    found = await output_of(
        command(snippet, file), tmp_path,
        GOCACHE=str(cache), GOPATH=str(cache), GOPROXY="off", GOTOOLCHAIN="local", GOFLAGS="",
        CGO_ENABLED="0",
    )  # fmt: skip

    assert [line.rstrip() for line in found.splitlines()] == [
        line.rstrip() for line in snippet.output.splitlines()
    ]


async def test_the_guides_python_passes_the_strict_type_check(tmp_path: Path) -> None:
    names = []
    for snippet in snippets("python"):
        file = tmp_path / f"guide_{snippet.number}.py"
        file.write_text(snippet.source)
        names.append(file.name)

    said = await output_of(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", os.devnull, *names,
         "--cache-dir", str(ROOT / "build" / "mypy-guides")],
        tmp_path, MYPYPATH=str(ROOT / "shared"),
    )  # fmt: skip

    assert said.startswith("Success")
