"""The secret of a cluster, as its services show and check it.

Two lines in its file are two secrets, for as long as one takes the other's place: the first is shown, both are
accepted (docs/guides/operations.md, "A new secret"). A changed file is taken within seconds.
"""

import asyncio
import hmac
import logging
from pathlib import Path
from typing import Final, Never

from aiohttp import hdrs, web

from quorumlog.errors import Unauthenticated
from quorumlog.net.files import LOOK_S, Followed
from quorumlog.net.identity import Credentials, Identity
from quorumlog.wire.secret import SecretUnusable, checked_secrets, headers_of, read_secrets

log = logging.getLogger(__name__)

_OF_THE_CLUSTER: Final = Identity(None, "cluster")


class ClusterSecret:
    """A secret that all services of a cluster share, sent as `Authorization: Bearer`. Implements `Authenticator`.

    Invariant: no text of an object or of an error has the secret.
    """

    def __init__(self, text: str, file: Path | None = None) -> None:
        """`file`: where the text was read. Raises: SecretUnusable."""
        self._headers: dict[str, str] = {}
        self.credentials = Credentials(self._headers)
        self._take(checked_secrets(text))
        self._file = file
        self._followed = Followed(() if file is None else (file,))

    def _take(self, tokens: tuple[str, ...]) -> None:
        # In place: sessions have the credentials.
        self._headers.update(headers_of(tokens[0]))
        self._tokens = tuple(token.encode() for token in tokens)

    def identify(self, request: web.BaseRequest) -> Identity:
        """Any service of the cluster. Raises: Unauthenticated."""
        scheme, _, token = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthenticated(
                "only the cluster's services and operators may ask this, with its secret as"
                " Authorization: Bearer (CLUSTER_SECRET_FILE; of the command line also --secret-file)"
            )
        given = token.encode("utf-8", "surrogateescape")
        # Constant time: the time of an answer says nothing of the secret.
        if not any(hmac.compare_digest(given, token) for token in self._tokens):
            raise Unauthenticated("this is not the cluster's secret")
        return _OF_THE_CLUSTER

    async def follow(self) -> Never:
        """Take a new file, for ever. One that can't be used changes nothing."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Take the file if it has changed, and has not changed since the last look."""
        if self._file is None or not self._followed.have_changed():
            return
        try:
            self._take(read_secrets(self._file))
        except SecretUnusable as error:
            log.error("secret-unusable", extra={"why": str(error)})  # noqa: TRY400  (the error says all)
        else:
            log.info("secret-loaded", extra={"accepted": len(self._tokens)})
