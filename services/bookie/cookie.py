"""Which data a bookie's name stands for (rule 15).

The cookie is in the directory and in the metadata service. Where they disagree, the bookie might
deny entries that it once acknowledged, so it refuses to start; or, where it may fix that, it comes
back as a new incarnation, which denies nothing that older ones were asked to keep.

`decide` is pure: it looks at both cookies and says what to do. The local one is written first and
says `registered` only after the metadata service has it, so a crash in between is no mismatch.
"""

from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, ValidationError

from quorumlog.wire.bodies import Cookie
from services.bookie.segments import write_durably


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

    @property
    def cookie(self) -> Cookie:
        """As the metadata service keeps it."""
        return Cookie(
            incarnation=self.incarnation,
            cluster_id=self.cluster_id,
            instance=self.instance,
            directories=self.directories,
            boots=self.boots,
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


def decide(found: Situation) -> tuple[LocalCookie, str]:
    """The cookie to start with, and why it is a new incarnation ("" where it is not).

    Raises: CookieRefused with what a person has to do.
    """
    local, remote = found.local, found.remote
    if local is not None and local.name != found.name:
        raise CookieRefused(
            f"{found.directory} holds the data of bookie {local.name!r}, and BOOKIE_NAME is"
            f" {found.name!r}. Give each bookie a directory of its own."
        )
    if local is not None and local.cluster_id != found.cluster_id:
        raise CookieRefused(
            f"{found.directory} belongs to cluster {local.cluster_id}, and METADATA_URLS lead to"
            f" cluster {found.cluster_id}. Point it to its own metadata service, or give it an"
            " empty DATA_DIR."
        )
    reason = _reason(found)
    is_salvaged = local is not None and local.salvaged
    if reason and not (found.may_fix or found.lost_unsynced or is_salvaged):
        raise CookieRefused(
            f"{reason}. Entries that this bookie acknowledged may be missing, so it does not"
            " start. Put the right directory back; or, if it is lost, say"
            f" `quorumlog bookie cookie fix {found.name}`, or start with AUTO_FIX_COOKIES=1: the"
            " bookie comes back as a new incarnation and is filled from its peers."
        )
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
        )
        return made, reason
    again = local.model_copy(
        update={
            "boots": local.boots + 1,
            "directories": (found.directory,),
            "durability": found.durability,
            "registered": False,
        }
    )
    return again, ""


def _reason(found: Situation) -> str:
    """Why local state may be lost, or ""."""
    local, remote = found.local, found.remote
    name, directory = found.name, found.directory
    if local is None:
        if remote is not None:
            return f"{directory} has no cookie, but bookie {name} was registered before"
        return f"{directory} has no cookie, but a log" if found.has_data else ""
    if local.salvaged:
        return "a part of the log could not be read and was given up"
    if found.lost_unsynced:
        return "DURABILITY=deferred, and the bookie did not stop in order"
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
    return ""
