"""The cookie, which identifies the data that belongs to a bookie's name (rules 15 and 15b).

One cookie is in the directory, one in the metadata service. If the two cookies disagree, the bookie
might deny entries that it once acknowledged, so it refuses to start. With an operator's permission
the bookie starts as a new incarnation, which denies no entry that it may have stored.

Each member is one process (rule 15a). While the registered process answers at its URL, any other
process is refused. A copied directory is recognized because its marker is a different file
(`Identity`). The metadata service stores the process that registered last and the last reported end
of the log. If a directory does not list that process, or its log ends earlier, the directory went
back to a snapshot.

The pure function `decide` compares both cookies. The local cookie is written first and gets
`registered` only once the metadata service has it, so a crash in between causes no mismatch.
"""

import ctypes
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, ValidationError

from quorumlog.wire.bodies import STAND_IN, Cookie
from services.bookie.segments import sync_directory, write_all, write_durably

MARKER: Final = "marker"

_TEXT: Final = (
    b"This file's inode and birth time say which directory this is: a copy has others.\n"
    b"See docs/internals/bookie.md, Who am I.\n"
)
_AT_FDCWD: Final = -100
_STATX_BTIME: Final = 0x800
_STATX_BYTES: Final = 256
_BORN_AT: Final = 80
"""Offset of the birth time in the structure that statx(2) fills in."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Inode and birth time of a directory's marker file, which a copy can't preserve (rule 15a).

    A copied directory has the same bytes, so no token in a file distinguishes the copy. Its inode
    and birth time differ: both survive restarts, renames and mounts, and no system call sets them.
    The device number is not used, since it changes with boots and mounts.

    Without birth times, a copy on another file system may have the same inode by chance. On a file
    system that changes inodes at each mount, every start looks like a loss, which is safe but
    useless (docs/internals/bookie.md).
    """

    inode: int
    born_ns: int | None = None
    """None if the file system does not record birth times."""

    def is_same(self, other: "Identity") -> bool:
        """Whether both identities belong to one file. Birth times count only if both are known."""
        if self.inode != other.inode:
            return False
        return None in (self.born_ns, other.born_ns) or self.born_ns == other.born_ns


class CookieRefused(Exception):
    """The bookie must not start: its directory is damaged or shared, or contradicts metadata."""


def identity_of(directory: Path) -> Identity:
    """The directory's identity; creates the marker durably if there is none. Raises CookieRefused
    if another directory shares the marker, and thus the log's files, by hard links.
    """
    path = directory / MARKER
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
    except FileExistsError:
        pass
    else:
        try:
            write_all(fd, [_TEXT], 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_directory(directory)
    found = path.stat()
    if found.st_nlink > 1:
        raise CookieRefused(
            f"{path} has a second hard link: {directory} was copied by hard links, so that two"
            " directories share the files of one log. Remove the copy."
        )
    return Identity(found.st_ino, _born_ns(path))


def _born_ns(path: Path) -> int | None:
    """A file's birth time, from the C library, because `os.stat` lacks it on Linux."""
    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    if statx is None:
        return None
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_BTIME, answer) != 0:
        # The kernel or a sandbox does not support the call.
        return None
    (mask,) = struct.unpack_from("=I", answer)
    if not mask & _STATX_BTIME:
        return None
    seconds, nanoseconds = struct.unpack_from("=qI", answer, _BORN_AT)
    return int(seconds) * 10**9 + int(nanoseconds)


PROCESSES_MAX: Final = 32
"""Maximum number of processes that a cookie lists, since a database that went back in time may name
an older process. If the named process is no longer listed, the bookie does not start.
"""


class LocalCookie(BaseModel):
    """The cookie in the directory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    incarnation: int
    cluster_id: str
    instance: str
    directories: tuple[str, ...]
    boots: int
    registered: bool = False
    """Whether the process that started last has registered."""
    ever_registered: bool = False
    """Whether an earlier start of this incarnation registered."""
    durability: str = "fsync"
    salvaged: bool = False
    """Whether a salvage kept only the readable part of a damaged log."""
    identity: Identity | None = None
    """Identity of the directory that the cookie was written for."""
    processes: tuple[str, ...] = ()
    """Processes started on this directory, latest last; stored before each registers."""

    @property
    def cookie(self) -> Cookie:
        """The cookie in the form that the metadata service stores."""
        return Cookie(
            incarnation=self.incarnation,
            cluster_id=self.cluster_id,
            instance=self.instance,
            directories=self.directories,
            boots=self.boots,
            process=self.processes[-1] if self.processes else "",
        )

    @property
    def was_registered(self) -> bool:
        """Whether the directory ever registered as this incarnation. If not, the directory
        acknowledged nothing, and the member that ledgers name may be another directory (rule 15b).
        """
        return self.registered or self.ever_registered

    @property
    def member(self) -> str:
        """The bookie's name in ensembles, `name@incarnation`."""
        return f"{self.name}@{self.incarnation}"


def read_cookie(directory: Path) -> LocalCookie | None:
    """The directory's cookie, or None. Raises CookieRefused if the cookie is unreadable."""
    try:
        data = (directory / "cookie.json").read_bytes()
    except FileNotFoundError:
        return None
    try:
        return LocalCookie.model_validate_json(data)
    except ValidationError as error:
        faults = error.errors()
        if all(fault["type"] == "extra_forbidden" for fault in faults):
            names = ", ".join(str(fault["loc"][0]) for fault in faults)
            raise CookieRefused(
                f"{directory / 'cookie.json'} has fields that this release does not know: {names}. Nothing was changed."
                " Start the release that wrote it, or a later one."
            ) from None
        why = "; ".join(fault["msg"] for fault in faults)
        raise CookieRefused(
            f"{directory / 'cookie.json'} is damaged ({why}). Restore the file from a copy; or move it away,"
            " and the next start explains how the bookie can continue as a new incarnation."
        ) from None


def write_cookie(directory: Path, cookie: LocalCookie) -> None:
    """Store the directory's cookie durably."""
    write_durably(directory / "cookie.json", cookie.model_dump_json(indent=2).encode())


@dataclass(frozen=True, slots=True)
class Situation:
    """The facts on which `decide` bases its decision."""

    name: str
    directory: str
    cluster_id: str
    durability: str
    local: LocalCookie | None
    remote: Cookie | None
    has_data: bool
    """Whether the directory contains a log."""
    lost_unsynced: bool
    """Whether the last process deferred syncs and ended uncleanly (rule 31)."""
    may_fix: bool
    identity: Identity
    process: str
    """The token of the starting process."""
    log_end: int
    """The end of the log, as the sequence number of its next batch."""
    log_end_reported: int = 0
    """The last log end reported for this instance; 0 if another instance is registered."""
    named: int = -1
    """The highest incarnation that ledgers name, if metadata refused a lower one (rule 15b)."""
    holder: str = ""
    """Evidence that another process runs as this bookie, with its URL; "" if there is none."""


def check_name(local: LocalCookie | None, name: str, directory: Path) -> None:
    """Raises: CookieRefused if the directory contains another bookie's data."""
    if local is not None and local.name != name:
        raise CookieRefused(
            f"{directory} contains the data of bookie {local.name!r}, but BOOKIE_NAME is {name!r}."
            " Give each bookie a directory of its own."
        )


def decide(found: Situation) -> tuple[LocalCookie, str]:
    """The cookie to start with, and the reason for a new incarnation ("" if there is none).

    Raises: CookieRefused with instructions for the operator.
    """
    local, remote = found.local, found.remote
    check_name(local, found.name, Path(found.directory))
    if local is not None and local.cluster_id != found.cluster_id:
        raise CookieRefused(
            f"{found.directory} belongs to cluster {local.cluster_id}, but METADATA_URLS lead to"
            f" cluster {found.cluster_id}. Correct METADATA_URLS, or give the bookie an"
            " empty DATA_DIR."
        )
    if found.holder:
        raise CookieRefused(
            f"{found.holder}. Only one process may use a name (rule 15a), and the running process stays."
            f" Stop it first, or give this bookie another BOOKIE_NAME and a directory of its own."
        )
    reason = _suspected_loss(found)
    if reason and not found.may_fix:
        raise CookieRefused(
            f"{reason}. Entries that this bookie acknowledged may be missing, so it does not"
            " start. Restore the right directory. If it is lost, run"
            f" `quorumlog bookie cookie fix {found.name}`, or start with AUTO_FIX_COOKIES=1: the"
            " bookie then continues as a new incarnation and is filled from its peers."
        )
    # A loss that the directory itself records needs no permission.
    reason = reason or _known_loss(found)
    known = max(
        local.incarnation if local is not None else 0,
        remote.incarnation if remote is not None else 0,
        found.named,
    )
    if local is None or reason:
        # A new incarnation has other data, so it gets another instance id.
        made = LocalCookie(
            name=found.name,
            incarnation=known + 1,
            cluster_id=found.cluster_id,
            instance=str(uuid4()),
            directories=(found.directory,),
            boots=1,
            durability=found.durability,
            identity=found.identity,
            processes=(found.process,),
        )
        return made, reason
    again = local.model_copy(
        update={
            "boots": local.boots + 1,
            "directories": (found.directory,),
            "durability": found.durability,
            "registered": False,
            "ever_registered": local.was_registered,
            "identity": found.identity,
            "processes": (*local.processes, found.process)[-PROCESSES_MAX:],
        }
    )
    return again, ""


def awaits_rebuild(local: LocalCookie, registered: Cookie | None) -> bool:
    """Whether a rebuild may register this directory again: its cookie is missing from the database,
    or replaced by a stand-in (rule 15b).
    """
    if registered is None:
        return True
    return registered.instance == STAND_IN and local.incarnation >= registered.incarnation


def is_displaced(mine: Cookie, registered: Cookie) -> bool:
    """Whether another process registered under this name later. If an older process is registered,
    the database went back in time, and this process is not displaced.
    """
    return registered.process != mine.process and (registered.incarnation, registered.boots) > (
        mine.incarnation,
        mine.boots,
    )


def is_copy(local: LocalCookie, identity: Identity) -> bool:
    """Whether the directory's cookie was written for another directory."""
    # Versions before rule 15a stored no identity.
    return local.identity is not None and not local.identity.is_same(identity)


def _known_loss(found: Situation) -> str:
    """The loss of local state that the directory itself records, or ""."""
    if found.local is not None and found.local.salvaged:
        return "a part of the log was unreadable, and a salvage dropped it"
    return (
        "DURABILITY=deferred, and the bookie was not stopped cleanly" if found.lost_unsynced else ""
    )


def _suspected_loss(found: Situation) -> str:
    """The evidence that local state may be lost, or ""."""
    local, remote = found.local, found.remote
    name, directory = found.name, found.directory
    if local is not None and found.named >= local.incarnation:
        return f"ledgers name {name}@{found.named}, but {directory} never registered as that incarnation"
    if local is None:
        if remote is not None:
            return f"{directory} has no cookie, but bookie {name} was registered before"
        return f"{directory} has no cookie, but a log" if found.has_data else ""
    if is_copy(local, found.identity):
        return (
            f"{directory} is a copy of the directory that {local.member} was started in: the"
            " file `marker` differs"
        )
    if remote is None:
        if local.was_registered:
            return f"the metadata service has no cookie of bookie {name}, which was registered"
        return ""
    if remote.incarnation > local.incarnation:
        return (
            f"{directory} contains incarnation {local.incarnation} of {name}, but incarnation"
            f" {remote.incarnation} is registered"
        )
    if remote.incarnation < local.incarnation:
        # The start that began this incarnation ended before it registered.
        return "" if not local.was_registered else f"an older incarnation of {name} is registered"
    if remote.instance != local.instance:
        return f"another directory is registered for {name}@{local.incarnation}"
    if local.boots + 1 <= remote.boots:
        return (
            f"{directory} is an old copy: it has counted {local.boots} starts, but {remote.boots} are"
            " registered"
        )
    if remote.process and remote.process not in local.processes:
        return (
            f"the process that is registered for {local.member} is not among the last {len(local.processes)}"
            f" processes that {directory} lists"
        )
    if found.log_end < found.log_end_reported and not local.salvaged:
        return (
            f"{directory} went back in time: its log ends at batch {found.log_end}, but batch"
            f" {found.log_end_reported} was on its disk before"
        )
    return ""
