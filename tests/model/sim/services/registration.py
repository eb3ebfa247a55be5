"""How a simulated bookie becomes the one that its name stands for: by the registration that ships, on a directory of ours.

A start that is refused is tried again, and where the disk was lost an operator permits a new incarnation then
(`AUTO_FIX_COOKIES=1`).
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from quorumlog.net.identity import ANONYMOUS
from quorumlog.net.metadata_client import MetadataClient
from services.bookie import registration
from services.bookie.cookie import CookieRefused, Identity, LocalCookie
from services.bookie.registration import Presence, Registration

_SOUND = SimpleNamespace(was_clean=True, position=SimpleNamespace(sequence=0))
"""What the replay of a log found: the registration looks at no more of it."""


class Directory:
    """A bookie's data directory, as far as its registration looks at it."""

    def __init__(self, name: str, cluster_id: str) -> None:
        """The bookie is registered as incarnation 1."""
        self.name, self.url = name, f"http://{name}:1"
        self.witnesses: tuple[str, ...] = ()
        """The file of witnesses (services/bookie/witnesses.py)."""
        self.is_emptied = False
        """Whether the disk was lost since the last registration."""
        self.refusal = ""
        """Why the last start was refused; empty while none is."""
        self._disks = self._starts = 1
        self.cookie: LocalCookie | None = LocalCookie(
            name=name,
            incarnation=1,
            cluster_id=cluster_id,
            instance=f"{name}, first disk",
            directories=(self.as_posix(),),
            boots=1,
            registered=True,
            identity=self.identity,
            processes=(f"{name}, first start",),
        )

    @property
    def identity(self) -> Identity:
        """That of the file `marker`."""
        return Identity(self._disks)

    def resolve(self) -> "Directory":
        """As `Path.resolve`."""
        return self

    def as_posix(self) -> str:
        """As `Path.as_posix`."""
        return f"/{self.name}"

    def load(self, _cluster_id: str) -> tuple[str, ...]:
        """As `WitnessFile.load`."""
        return self.witnesses

    def write(self, cookie: LocalCookie) -> None:
        """As `write_cookie`."""
        self.cookie = cookie

    def empty(self) -> None:
        """The disk is lost: the next one is another one, and empty."""
        self.cookie, self.witnesses, self.is_emptied = None, (), True
        self._disks += 1

    async def register(self, metadata: MetadataClient, *, has_data: bool) -> int:
        """One start of the bookie; returns the incarnation that it is now. Raises: CookieRefused."""
        self._starts += 1
        config = SimpleNamespace(
            bookie_name=self.name,
            cluster_id="",
            data_dir=self,
            url=self.url,
            durability="fsync",
            credentials=ANONYMOUS,
            holder_s=0.0,
            auto_fix_cookies=self.is_emptied and bool(self.refusal),
        )
        starting = Registration(cast("Any", config), metadata, f"{self.name}, start {self._starts}")
        try:
            found = await starting.register(self.cookie, cast("Any", _SOUND), has_data=has_data)
        except CookieRefused as refused:
            self.refusal = str(refused)
            raise
        self.cookie = found.model_copy(update={"registered": True})
        self.is_emptied, self.refusal = False, ""
        return found.incarnation


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """Files and probes of the shipped registration are those of simulated directories, until the end of the block."""
    with (
        patch.object(registration, "WitnessFile", lambda directory: directory),
        patch.object(registration, "identity_of", lambda directory: directory.identity),
        patch.object(
            registration, "write_cookie", lambda directory, cookie: directory.write(cookie)
        ),
        patch.object(registration, "probe", _nobody),
    ):
        yield


async def _nobody(*_asked: object) -> Presence:
    """A name is one process here: who registers comes after the one before."""
    return Presence.GONE
