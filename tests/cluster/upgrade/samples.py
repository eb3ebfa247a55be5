"""Samples of what a release stores and sends: made by that release, read by later ones (`test_samples.py`).

`python -m tests.cluster.upgrade.samples --write` makes those of the present release, in a folder with its number.
"""

import argparse
import asyncio
import gzip
import importlib
import io
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from uuid import UUID

import orjson

from quorumlog import __version__
from quorumlog.protocol.messages import Status
from quorumlog.protocol.row_copy import RowCopy, RowName
from quorumlog.wire import frames
from quorumlog.wire.bodies import codec, document_of
from quorumlog.wire.frames import ChannelAnswer, Op, Request
from services.bookie.cookie import LocalCookie, write_cookie
from services.bookie.log import Kind
from services.bookie.store import Store
from tests.unit.bookie.support import (
    KEY,
    ME,
    add,
    fence,
    image,
    keep_row,
    run_of,
    started,
    write_lac,
)

SAMPLES: Final = Path(__file__).parent / "samples"
ATTEMPT: Final = str(UUID(int=7))

ENTRIES: Final = {7: range(20), 8: range(5), 9: range(0, 30, 3)}
"""The entries of the sample directory by ledger. Ledger 8 is fenced, of ledger 9 every third one is here."""
LAC: Final = 15
ROW: Final = RowName(3, UUID(ATTEMPT).bytes)
"""The row of ledger 7 of which there is a copy."""

_QUORUM: Final = {"ensemble_size": 3, "write_quorum": 3, "ack_quorum": 2}
_FRAGMENTS: Final = [{"first_entry": 0, "bookies": ["b1@1", "b2@1", "b3@1"]}]
_ROW: Final[dict[str, Any]] = {
    "ledger_id": 7,
    "version": 3,
    "attempt": ATTEMPT,
    "state": "OPEN",
    "digest": "crc32c",
    "quorum": _QUORUM,
    "fragments": _FRAGMENTS,
    "ledger_key": "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=",
    "writer": {"id": "g-1", "url": "http://127.0.0.1:8080"},
    "custom": {"colour": "red"},
    "created_at": "2026-11-23T08:00:00Z",
}
_CLOSED: Final = {**_ROW, "state": "CLOSED", "last_entry": 19, "length": 190}
_LOG: Final = {
    "name": "events",
    "version": 4,
    "settings": {"quorum": _QUORUM, "roll_entries": 25, "custom": {"colour": "red"}},
    "items": [
        {"ledger_id": 7, "first_offset": 0, "last_offset": 24, "bytes": 100},
        {"ledger_id": 8, "first_offset": 25},
    ],
    "writer_token": 2,
}
_COOKIE: Final = {
    "incarnation": 1,
    "cluster_id": "c",
    "instance": "i",
    "directories": ["/data"],
    "boots": 2,
    "process": "p",
}
_URL: Final = "http://127.0.0.1:8080"

BODIES: Final[dict[str, list[dict[str, Any]]]] = {
    "protocol.metadata.LedgerMetadata": [_ROW, _CLOSED],
    "wire.bodies.LedgerChange": [{"row": _ROW, "attempt": ATTEMPT}],
    "wire.bodies.CookieRow": [{"name": "b1", "version": 1, "cookie": _COOKIE, "log_end": 5}],
    "wire.bodies.CookiePut": [{"cookie": _COOKIE, "version": 1, "attempt": ATTEMPT}],
    "wire.bodies.BookieHeartbeat": [{"incarnation": 1, "url": _URL, "process": "p"}],
    "wire.bodies.ServiceHeartbeat": [{"url": _URL}],
    "wire.bodies.ServiceInfo": [{"kind": "gateway", "id": "g-1", "url": _URL, "state": "ready"}],
    "wire.bodies.Change": [
        {"kind": "hello"},
        {"kind": "change", "ledger_id": 7, "version": 3, "state": "OPEN"},
        {"kind": "change", "ledger_id": 7, "version": 4, "deleted": True},
    ],
    "wire.bodies.LedgerUse": [{"ledger_id": 7, "member": "b1@1", "state": "OPEN"}],
    "wire.bodies.WitnessState": [{"held": [], "missing": []}],
    "wire.bodies.BookieWitnesses": [
        {"bookie": "b1", "cluster_id": "c", "witnesses": [], "highest_ledger": 9}
    ],
    "protocol.log.LogMetadata": [_LOG],
    "wire.log_bodies.LogChange": [{"row": _LOG, "attempt": ATTEMPT}],
    "wire.repair_bodies.RepairItem": [
        {"ledger_id": 7, "member": "b1@1", "version": 1, "ranges": [[0, 4]]}
    ],
    "protocol.transaction.Transaction": [{"id": ATTEMPT, "log": "events"}],
    "wire.rebuild_bodies.HeldRows": [{"ledger_id": 7, "highest_entry": 19}],
}
"""Bodies by model: of these fields, and of all that the release adds to them."""


def model_of(name: str) -> Any:
    """The class of a body or value: `wire.bodies.LedgerChange`."""
    module, _, model = name.rpartition(".")
    return getattr(importlib.import_module(f"quorumlog.{module}"), model)


def bodies() -> dict[str, list[Any]]:
    """The bodies as this release writes them."""
    made = {}
    for name, samples in BODIES.items():
        read = [codec(model_of(name)).validate_json(orjson.dumps(one)) for one in samples]
        made[name] = [document_of(value) for value in read]
    return made


def requests() -> dict[str, str]:
    """A message of each kind on the channel, as hexadecimal digits."""
    name = RowName(3, bytes(16))
    row = RowCopy(name, b"row")
    run = run_of(7, range(3))
    made = {
        "add": Request(Op.ADD, 1, 7, 0, 2, ME, KEY, run=run),
        "recovery add": Request(Op.ADD, 2, 7, 0, 2, ME, KEY, run=run, recovery=True),
        "add with a row": Request(Op.ADD, 3, 7, 0, 2, ME, KEY, run=run, named_by=name, row=row),
        "read": Request(Op.READ, 4, 7, 0, 9, ME, bytes_max=1000),
        "fencing read": Request(Op.READ, 5, 7, 0, 9, ME, KEY, bytes_max=1000, fence=True),
        "read from disk": Request(Op.READ, 6, 7, 0, 9, ME, bytes_max=1000, from_disk=True),
        "fence": Request(Op.FENCE, 7, 7, -1, -1, ME, KEY),
        "read lac": Request(Op.READ_LAC, 8, 7, -1, -1, ME),
        "write lac": Request(Op.WRITE_LAC, 9, 7, -1, 5, ME, KEY),
        "keep row": Request(Op.KEEP_ROW, 10, 7, -1, -1, ME, KEY, named_by=name, row=row),
    }
    return {name: b"".join(frames.encode_request(made[name])).hex() for name in made}


def answers() -> dict[str, str]:
    """An answer of each status, by its name."""
    made = {status.name: frames.encode_answers(ME, [_answer(status)]) for status in Status}
    return {name: b"".join(message).hex() for name, message in made.items()}


def _answer(status: Status) -> ChannelAnswer:
    return ChannelAnswer(Op.READ_LAC, status, 1, 7, -1, -1, 5)


async def fill(store: Store) -> None:
    """Write records of every kind that operations make."""
    for ledger_id, ids in ENTRIES.items():
        await add(store, run_of(ledger_id, ids))
    await write_lac(store, 7, LAC)
    await fence(store, 8)
    await keep_row(store, 7, ROW)
    await store.checkpoint()


async def directory() -> bytes:
    """A bookie's directory after an unclean stop, packed."""
    with TemporaryDirectory() as folder:
        store = started(Path(folder) / "d")
        await fill(store)
        await add(store, run_of(10, range(3)))
        stopped = image(store, Path(folder) / "image")
        await store.stop()
        cookie = LocalCookie(
            name="b1",
            incarnation=1,
            cluster_id="c",
            instance="i",
            directories=("/data",),
            boots=1,
            registered=True,
            processes=("p",),
        )
        write_cookie(stopped, cookie)
        for leftover in ("lock", "reserve"):
            (stopped / leftover).unlink(missing_ok=True)
        return _packed(stopped)


def _packed(folder: Path) -> bytes:
    data = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=data, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for path in sorted(folder.rglob("*")):
            info = archive.gettarinfo(path, str(path.relative_to(folder)))
            info.mtime, info.uname, info.gname = 0, "", ""
            info.uid = info.gid = 0
            with path.open("rb") if path.is_file() else io.BytesIO() as content:
                archive.addfile(info, content if path.is_file() else None)
    return data.getvalue()


def unpacked(sample: Path, folder: Path) -> Path:
    """The directory of a sample."""
    with tarfile.open(sample / "directory.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def write(name: str) -> None:
    """Write all samples of this release."""
    folder = SAMPLES / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "directory.tar.gz").write_bytes(asyncio.run(directory()))
    wire = {
        "bodies": bodies(),
        "requests": requests(),
        "answers": answers(),
        "kinds": {kind.name: int(kind) for kind in Kind},
    }
    (folder / "wire.json").write_bytes(orjson.dumps(wire, option=orjson.OPT_INDENT_2) + b"\n")


def _release() -> str:
    return f"v{__version__}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.upgrade.samples")
    parser.add_argument("--write", action="store_true", required=True)
    parser.add_argument("--name", default="", help="of the release, where it says none")
    asked = parser.parse_args()
    write(asked.name or _release())
