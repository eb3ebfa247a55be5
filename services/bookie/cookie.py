"""Which data a bookie's name stands for (rule 15).

The cookie is in the directory and in the metadata service. Where they disagree, the bookie might
deny entries that it once acknowledged, so it refuses to start; or, where it may fix that, it comes
back as a new incarnation, which denies nothing that older ones were asked to keep.

One process a member (rule 15a): whoever is registered and answers at its URL stays, and the newcomer
is refused. A copy of a directory is not that directory, whatever its files say: its marker is another
file (identity.py). And the row names the process that was registered last, which the directory must
know, and how far its log was on disk, which the log must reach: else it went back to a snapshot.

`decide` is pure: it looks at both cookies and says what to do. The local one is written first and
says `registered` only after the metadata service has it, so a crash in between is no mismatch.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, ValidationError

from quorumlog.wire.bodies import Cookie
from services.bookie.identity import Identity
from services.bookie.segments import write_durably

PROCESSES_MAX: Final = 32
"""Processes that a cookie remembers: a database that went back may name an older one."""


class CookieRefused(Exception):
    """Directory and metadata service do not agree on what this bookie is."""


class LocalCookie(BaseModel):
    """What stands in the directory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    incarnation: int
    cluster_id: str
    instance: str
    directories: tuple[str, ...]
    boots: int
    registered: bool = False
    durability: str = "fsync"
    salvaged: bool = False
    """What could be read of a damaged log was kept, by an operator's command."""
    identity: Identity | None = None
    """Of the directory that it was written for."""
    processes: tuple[str, ...] = ()
    """Who was started on this directory, the last one at the end; written before it is registered."""

    @property
    def cookie(self) -> Cookie:
        """As the metadata service keeps it."""
        return Cookie(
            incarnation=self.incarnation,
            cluster_id=self.cluster_id,
            instance=self.instance,
            directories=self.directories,
            boots=self.boots,
            process=self.processes[-1] if self.processes else "",
        )

    @property
    def member(self) -> str:
        """The bookie's name in ensembles."""
        return f"{self.name}@{self.incarnation}"


def read_cookie(directory: Path) -> LocalCookie | None:
    """The directory's cookie, or None. Raises CookieRefused where it can't be read."""
    try:
        data = (directory / "cookie.json").read_bytes()
    except FileNotFoundError:
        return None
    try:
        return LocalCookie.model_validate_json(data)
    except ValidationError as error:
        why = "; ".join(fault["msg"] for fault in error.errors())
        raise CookieRefused(
            f"{directory / 'cookie.json'} is damaged ({why}). Put a copy of it back; or move it away,"
            " and the bookie says at its next start how it can come back as a new incarnation."
        ) from None


def write_cookie(directory: Path, cookie: LocalCookie) -> None:
    """Make it the directory's cookie, durably."""
    write_durably(directory / "cookie.json", cookie.model_dump_json(indent=2).encode())


@dataclass(frozen=True, slots=True)
class Situation:
    """What a start finds."""

    name: str
    directory: str
    cluster_id: str
    durability: str
    local: LocalCookie | None
    remote: Cookie | None
    has_data: bool
    """The directory holds a log."""
    lost_unsynced: bool
    """The last run deferred syncs and did not end in order (rule 31)."""
    may_fix: bool
    identity: Identity
    process: str
    """Drawn by this start."""
    log_end: int
    """How far the log reaches, in batches."""
    log_end_told: int = 0
    """How far it reached on disk by the registered process's word; only of the same instance."""
    holder: str = ""
    """Where another process lives as this bookie, as far as can be seen, and how that is seen."""


def check_name(local: LocalCookie | None, name: str, directory: Path) -> None:
    """Raises: CookieRefused where a directory holds another bookie's data."""
    if local is not None and local.name != name:
        raise CookieRefused(
            f"{directory} holds the data of bookie {local.name!r}, and BOOKIE_NAME is {name!r}."
            " Give each bookie a directory of its own."
        )


def decide(found: Situation) -> tuple[LocalCookie, str]:
    """The cookie to start with, and why it is a new incarnation ("" where it is not).

    Raises: CookieRefused with what a person has to do.
    """
    local, remote = found.local, found.remote
    check_name(local, found.name, Path(found.directory))
    if local is not None and local.cluster_id != found.cluster_id:
        raise CookieRefused(
            f"{found.directory} belongs to cluster {local.cluster_id}, and METADATA_URLS lead to"
            f" cluster {found.cluster_id}. Point it to its own metadata service, or give it an"
            " empty DATA_DIR."
        )
    if found.holder:
        raise CookieRefused(
            f"{found.holder}. A name is for one process (rule 15a), and the one that is there stays."
            f" Stop it first, or give this bookie another BOOKIE_NAME and a directory of its own."
        )
    reason = _reason(found)
    if reason and not found.may_fix:
        raise CookieRefused(
            f"{reason}. Entries that this bookie acknowledged may be missing, so it does not"
            " start. Put the right directory back; or, if it is lost, say"
            f" `quorumlog bookie cookie fix {found.name}`, or start with AUTO_FIX_COOKIES=1: the"
            " bookie comes back as a new incarnation and is filled from its peers."
        )
    # What is known to be this directory's own loss needs nobody's leave.
    reason = reason or _known_loss(found)
    known = max(
        local.incarnation if local is not None else 0,
        remote.incarnation if remote is not None else 0,
    )
    if local is None or reason:
        # Other data is another instance.
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
            "identity": found.identity,
            "processes": (*local.processes, found.process)[-PROCESSES_MAX:],
        }
    )
    return again, ""


def is_displaced(mine: Cookie, registered: Cookie) -> bool:
    """Whether another process took this one's name later. A row that is older than this process is a
    database that went back, and takes nobody's name.
    """
    return registered.process != mine.process and (registered.incarnation, registered.boots) > (
        mine.incarnation,
        mine.boots,
    )


def _is_copy(found: Situation) -> bool:
    """Whether the directory is another one than its cookie was written for."""
    written_for = None if found.local is None else found.local.identity
    # Versions before rule 15a wrote none.
    return written_for is not None and not written_for.is_same(found.identity)


def _known_loss(found: Situation) -> str:
    """Why local state is lost, where the directory says so itself, or ""."""
    if found.local is not None and found.local.salvaged:
        return "a part of the log could not be read and was given up"
    return (
        "DURABILITY=deferred, and the bookie did not stop in order" if found.lost_unsynced else ""
    )


def _reason(found: Situation) -> str:
    """Why local state may be lost, or ""."""
    local, remote = found.local, found.remote
    name, directory = found.name, found.directory
    if local is None:
        if remote is not None:
            return f"{directory} has no cookie, but bookie {name} was registered before"
        return f"{directory} has no cookie, but a log" if found.has_data else ""
    if _is_copy(found):
        return (
            f"{directory} is a copy of the directory that {local.member} was started in: its file"
            " `marker` is another one"
        )
    if remote is None:
        if local.registered or local.boots > 1:
            return f"the metadata service does not know bookie {name}, which was registered"
        return ""
    if remote.incarnation > local.incarnation:
        return (
            f"{directory} holds incarnation {local.incarnation} of {name}, and incarnation"
            f" {remote.incarnation} is registered"
        )
    if remote.incarnation < local.incarnation:
        # The start that made it a new incarnation did not come to register it.
        return "" if not local.registered else f"an older incarnation of {name} is registered"
    if remote.instance != local.instance:
        return f"another directory is registered for {name}@{local.incarnation}"
    if local.boots + 1 <= remote.boots:
        return (
            f"{directory} is an old copy: it counts {local.boots} starts, and {remote.boots} are"
            " registered"
        )
    if remote.process and remote.process not in local.processes:
        return (
            f"another process was registered for {local.member}, which {directory} knows nothing of"
        )
    if found.log_end < found.log_end_told and not local.salvaged:
        return (
            f"{directory} went back: its log ends at batch {found.log_end}, and {found.log_end_told}"
            " was on its disk before"
        )
    return ""
