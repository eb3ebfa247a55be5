"""A data directory of a later release is refused with a sentence, and nothing in it is changed."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from loadtest.stores import scratch
from services.bookie.cookie import CookieRefused, read_cookie
from services.bookie.directory import FORMAT, DirectoryTooNew
from services.bookie.log import Kind, LogDamaged, QueuedRecord, encode_batch
from services.bookie.segments import Segments
from tests.bookie.support import add, batches_of, image, last_segment, opened, run_of, started


@pytest.fixture
def root() -> Iterator[Path]:
    with scratch("ql-formats-") as path:
        yield path


async def a_directory(root: Path) -> Path:
    """Of a bookie that was not stopped cleanly."""
    store = started(root / "d")
    await add(store, run_of(7, range(10)))
    copy = image(store, root / "copy")
    await store.stop()
    return copy


def content(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("found", [str(FORMAT + 1), "", "x" * 1000, "0"])
async def test_a_directory_of_another_format_is_refused_and_not_changed(
    root: Path, found: str
) -> None:
    directory = await a_directory(root)
    (directory / "format").write_text(found)
    before = content(directory)

    with pytest.raises(DirectoryTooNew, match=r"Start the release that wrote it"):
        opened(directory)

    assert content(directory) == before


async def test_a_directory_that_names_the_present_format_is_opened(root: Path) -> None:
    directory = await a_directory(root)
    (directory / "format").write_text(f"{FORMAT}\n")

    opened(directory).close()


@pytest.mark.parametrize("body", [b"x" * 600, bytes(2000)], ids=["full", "with blank sectors"])
async def test_a_record_of_a_later_release_at_the_end_of_the_log_is_not_cut_as_a_torn_write(
    root: Path, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = await a_directory(root)
    path = last_segment(directory)
    last = batches_of(path)[-1]
    segments = Segments(directory / "log", 0)
    later = QueuedRecord(Kind.RUN, 7, (body,), len(body))
    monkeypatch.setattr(later, "kind", 99)
    batch = b"".join(
        encode_batch(
            segments.head(int(path.stem)),
            offset=last.end,
            sequence=last.sequence + 1,
            synced_below=last.synced_below,
            records=[later],
        )
    )
    with path.open("r+b") as file:
        file.seek(last.end)
        file.write(batch)
    log = {name: found for name, found in content(directory).items() if name.startswith("log/")}

    with pytest.raises(LogDamaged, match=r"a record of kind 99, which this release does not know"):
        opened(directory)

    assert {name: content(directory)[name] for name in log} == log


def test_a_cookie_of_a_later_release_is_refused_by_the_names_of_its_fields(root: Path) -> None:
    cookie = {
        "name": "b1",
        "incarnation": 1,
        "cluster_id": "c",
        "instance": "i",
        "directories": [],
        "boots": 1,
        "shards": 2,
    }
    (root / "cookie.json").write_bytes(orjson.dumps(cookie))

    with pytest.raises(CookieRefused, match=r"fields that this release does not know: shards\."):
        read_cookie(root)
