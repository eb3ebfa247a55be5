"""The guides' programs run as they stand, and print what the guides say that they print."""

import asyncio
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest

from loadtest.cluster import Cluster
from quorumlog.client import Client
from tests.support.commands import path_with_quorumlog
from tests.support.tools import needs
from tests.support.waiting import SETTLED_S, within

pytestmark = pytest.mark.asyncio(loop_scope="package")

ROOT = Path(__file__).resolve().parents[3]
PAGES = {
    "ledger": ("docs/learn/first-ledger.md", "sh"),
    "log": ("docs/learn/first-log.md", "sh"),
    "consumer": ("docs/learn/consumer.md", "sh"),
    "consumer-python": ("docs/learn/consumer.md", "python"),
    "once": ("docs/learn/exactly-once.md", "sh"),
    "once-python": ("docs/learn/exactly-once.md", "python"),
    "curl": ("docs/guides/curl.md", "sh"),
    "transactions": ("docs/guides/transactions.md", "sh"),
    "python": ("docs/guides/python.md", "python"),
    "readme-python": ("README.md", "python"),
    "logs-python": ("docs/guides/logs.md", "python"),
    "record-keys-python": ("docs/guides/record-keys.md", "python"),
    "compaction-python": ("docs/guides/compaction.md", "python"),
    "consumers": ("docs/guides/consumers.md", "sh"),
    "consumers-python": ("docs/guides/consumers.md", "python"),
    "queues": ("docs/guides/queues.md", "sh"),
    "queues-python": ("docs/guides/queues.md", "python"),
    "queues-javascript": ("docs/guides/queues.md", "js"),
    "queues-go": ("docs/guides/queues.md", "go"),
    "transactions-python": ("docs/guides/transactions.md", "python"),
    "javascript": ("docs/guides/javascript.md", "js"),
    "go": ("docs/guides/go.md", "go"),
}
SPARK = ("docs/guides/spark.md", "docs/learn/spark.md")
"""Pages whose examples are one program each, which tests/spark/test_guide.py runs."""
ELSEWHERE = ("docs/guides/webhooks.md",)
"""Pages whose programs tests/unit/subscriptions/test_cluster.py runs."""
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    """A program of a page, and what it prints."""

    name: str
    language: str
    source: str
    output: str

    def __str__(self) -> str:
        return self.name


def snippets(page: str) -> list[Snippet]:
    path, language = PAGES[page]
    found = [
        Snippet(f"{page}-{number}", language, block[2], block[3])
        for number, block in enumerate(BLOCK.finditer((ROOT / path).read_text()), 1)
        if block[1] == language and "pyspark" not in block[2]
    ]
    assert found, page
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
    needed = "curl" if snippet.language == "sh" else commands[snippet.language][0]
    if shutil.which(needed) is None:
        pytest.skip(f"{needed} is not on this machine: the guide's program was not run")
    return commands[snippet.language]


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


@pytest.mark.parametrize("snippet", [s for page in PAGES for s in snippets(page)], ids=str)
async def test_a_guide_s_program_prints_what_the_guide_says(
    cluster: Cluster, snippet: Snippet, tmp_path: Path
) -> None:
    source = snippet.source
    for number, url in enumerate(cluster.gateways):
        source = source.replace(f"http://127.0.0.1:{8080 + number}", url)
    suffix = {"python": "py", "js": "mjs"}.get(snippet.language, snippet.language)
    file = tmp_path / f"program.{suffix}"
    file.write_text(source)
    # The user's own cache: otherwise each new checkout compiles Go's library, which takes 15 s.
    cache = os.environ.get("GOCACHE") or str(Path.home() / ".cache" / "go-build")

    found = await output_of(
        command(snippet, file), tmp_path,
        PATH=path_with_quorumlog(tmp_path), QUORUMLOG_GATEWAY=cluster.gateways[0],
        GOCACHE=cache, GOPROXY="off", GOTOOLCHAIN="local", GOFLAGS="",
        CGO_ENABLED="0",
    )  # fmt: skip

    assert [line.rstrip() for line in found.splitlines()] == [
        line.rstrip() for line in snippet.output.splitlines()
    ]


@needs("curl")
async def test_the_pages_on_logs_and_bodies_are_done(cluster: Cluster, tmp_path: Path) -> None:
    """They print what nobody can foretell: times, owners, ledgers."""
    blocks = [
        block[2]
        for page in ("docs/guides/logs.md", "docs/reference/http.md")
        for block in BLOCK.finditer((ROOT / page).read_text())
        if block[1] == "sh" and "logs/events" in block[2]
    ]
    script = re.sub(r"\bevents\b", "of-the-guides", "".join(blocks)).replace("$ gzip", "gzip")
    for number, url in enumerate(cluster.gateways):
        script = re.sub(rf"(http://127\.0\.0\.1|localhost):{8080 + number}", url, script)
    (tmp_path / "lines.ndjson").write_text('{"text":"of a line"}\n')
    environment = {"PATH": path_with_quorumlog(tmp_path), "QUORUMLOG_GATEWAY": cluster.gateways[0]}

    out = await output_of(
        ["sh", "-euc", script.replace("curl ", "curl -fsS ")], tmp_path, **environment
    )

    assert len(blocks) == 6
    assert out.count('"text":"hello"') == 3, (
        "read from the beginning, from before the end, and by key"
    )
    async with Client(*cluster.gateways) as client:
        shown = (await client.log("of-the-guides").info())["settings"]
        assert (shown["retention_seconds"], shown["retention_bytes"]) == (604800, 0)
        read = await client.log("of-the-guides").read(0)
        assert [record.value for record in read.records] == [b"hello", b"of a line"]


async def test_the_audit_commands_print_who_changed_what(cluster: Cluster, tmp_path: Path) -> None:
    (commands,) = [
        block[2]
        for block in BLOCK.finditer((ROOT / "docs/guides/audit.md").read_text())
        if block[1] == "sh"
    ]
    selected, everything = commands.splitlines()
    environment = {"PATH": path_with_quorumlog(tmp_path), "QUORUMLOG_GATEWAY": cluster.gateways[0]}
    async with Client(*cluster.gateways) as client:
        await client.create_log("orders")
        await client.create_log("others-than-orders")

    lines = await output_of(["sh", "-ec", selected], tmp_path, **environment)
    rows = await output_of(["sh", "-ec", everything], tmp_path, **environment)

    assert {line.split("  ")[2] for line in lines.splitlines()} == {"logs/orders"}
    reported = [orjson.loads(row) for row in rows.splitlines()]
    assert {"logs/orders", "logs/others-than-orders"} <= {row["target"] for row in reported}
    page = (ROOT / "docs/guides/audit.md").read_text()
    assert [field for field in reported[-1] if f"\n| `{field}` |" not in page] == []


def python_of(path: str) -> list[str]:
    return [block[2] for block in BLOCK.finditer((ROOT / path).read_text()) if block[1] == "python"]


async def test_the_guides_python_passes_the_strict_type_check(tmp_path: Path) -> None:
    sources = [snippet.source for page in PAGES for snippet in snippets(page)
               if snippet.language == "python"]  # fmt: skip
    names = []
    for number, source in enumerate(sources):
        file = tmp_path / f"guide_{number}.py"
        file.write_text(source)
        names.append(file.name)

    said = await output_of(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", os.devnull, *names,
         "--cache-dir", str(ROOT / "build" / "mypy-guides")],
        tmp_path, MYPYPATH=str(ROOT / "shared"),
    )  # fmt: skip

    assert said.startswith("Success")


async def test_every_python_program_of_the_pages_is_a_whole_file_that_a_test_runs() -> None:
    pages = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").rglob("*.md")]
    with_python = {
        str(page.relative_to(ROOT)) for page in pages if python_of(str(page.relative_to(ROOT)))
    }
    run_here = {path for path, language in PAGES.values() if language == "python"}

    assert with_python == run_here | {*SPARK, *ELSEWHERE}
    for path in with_python:
        sources = python_of(path)
        for source in ["\n".join(sources)] if path in SPARK else sources:
            compile(source, path, "exec")
            assert "import" in source
