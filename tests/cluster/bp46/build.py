"""A bookie built for tests: `python -m tests.cluster.bp46.build`.

Its disk can be held: while the file `hold` lies in the data directory, no sync of the log ends. So a
test knows which bytes a power cut would have discarded. BUILD takes one protection out, by a patch
of one shipped function.
"""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from quorumlog.net.service import run_service
from services.bookie import registration
from services.bookie.app import build
from services.bookie.config import Config
from services.bookie.cookie import LocalCookie, Situation, decide
from services.bookie.ledger import StoredLedger

_LOOK_S: Final = 0.005


def hold_path(data: Path) -> Path:
    """The file that holds the disk."""
    return data / "hold"


def _slow_disk(hold: Path) -> None:
    """Let no `fdatasync` (only the log's writer calls it) end while the disk is held."""
    sync = os.fdatasync

    def held(fd: int) -> None:
        while hold.exists():
            time.sleep(_LOOK_S)
        sync(fd)

    setattr(os, "fdatasync", held)  # noqa: B010 - a patch, not an assignment


def _loss_is_not_noticed() -> None:
    """After any loss the bookie comes back as the incarnation that it was (rule 15 taken out)."""

    def decided(found: Situation) -> tuple[LocalCookie, str]:
        cookie, _ = decide(replace(found, lost_unsynced=False, may_fix=True))
        if found.remote is None:
            return cookie, ""
        same = {
            "incarnation": found.remote.incarnation,
            "instance": found.remote.instance,
            "boots": found.remote.boots + 1,
        }
        return cookie.model_copy(update=same), ""

    setattr(registration, "decide", decided)  # noqa: B010 - a patch, not an assignment


def _nothing_waits_for_the_disk() -> None:
    """Fences, too, are told before they are on disk, and all that rests on them (rules 3 and 31)."""

    def at_once(_self: StoredLedger, _after: int, callback: Callable[[], None]) -> None:
        callback()

    setattr(StoredLedger, "when_synced", at_once)  # noqa: B010 - a patch, not an assignment


BUILDS: Final[dict[str, Callable[[], Any]]] = {
    "": lambda: None,
    "loss-is-not-noticed": _loss_is_not_noticed,
    "nothing-waits-for-the-disk": _nothing_waits_for_the_disk,
}

if __name__ == "__main__":
    config = Config.read(os.environ)
    _slow_disk(hold_path(config.data_dir))
    BUILDS[os.environ.get("BUILD", "")]()
    run_service("bookie", build, config)
