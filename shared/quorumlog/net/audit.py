"""The audit log: who asked a service for what, and what came of it (docs/adr/0022-audit-log.md).

The edge of each service notes the requests to its audited operations: one line of the logger `audit` when the answer
is known. While such a request is in work, requests to other services tell of it in a header, so that the metadata
service keeps the request beside the change, in one transaction.
"""

import logging
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final
from urllib.parse import quote
from uuid import uuid4

from aiohttp import web

from quorumlog.net.identity import Identity
from quorumlog.net.parameters import Parameter, invalid, query_integer, query_text, time_of
from quorumlog.net.responses import CODE
from quorumlog.protocol.ids import ID_MAX
from quorumlog.wire.token_bodies import TARGET_CHARS_MAX, AuditedRequest

log = logging.getLogger("audit")
log.setLevel(logging.INFO)  # whatever the level of the other lines is

AUDITED: Final = web.AppKey("audited", Mapping[tuple[str, str], str])
"""The name of each audited operation, by its method and path."""

ANONYMOUS: Final = "anonymous"
WHO: Final = ContextVar("who", default=ANONYMOUS)
"""Who sent the request in work to a listener that knows its callers; tasks that the request starts inherit it."""


def _time(text: str, pointer: str) -> datetime:
    try:
        return time_of(text)
    except ValueError as error:
        raise invalid(pointer, "must be a time like 2026-01-02T03:04:05Z") from error


SINCE: Final[Parameter[datetime | None]] = Parameter(
    "since",
    "query",
    _time,
    {"type": "string", "format": "date-time"},
    "Only what was done at this time or later.",
    None,
)
TARGET: Final = query_text(
    "target",
    rf"[^\x00]{{1,{TARGET_CHARS_MAX}}}",
    "Only what was done to this: `logs/NAME`, `ledgers/ID`, `tokens/ID`, `bookies/NAME`.",
)
AFTER: Final = query_integer("after", 0, ID_MAX, "Only rows with numbers above this one.", 0)
LIMIT: Final = query_integer("limit", 1, 1000, "Rows of a page.", 100)


@dataclass(slots=True, eq=False)
class Audited:
    """An audited request, while it is in work."""

    operation: str
    target: str
    remote: str
    id: str = field(default_factory=lambda: str(uuid4()))
    who: str = ANONYMOUS
    is_over: bool = False

    @property
    def body(self) -> AuditedRequest:
        """What other services are told."""
        return AuditedRequest(
            id=self.id,
            who=self.who[:TARGET_CHARS_MAX],
            remote=self.remote,
            operation=self.operation,
            target=self.target,
        )

    def end(self, response: web.StreamResponse | None) -> None:
        """Note the answer; None: the client left before."""
        if self.is_over:
            return
        self.is_over = True
        status = None if response is None else response.status
        code = "" if response is None else response.get(CODE, "")
        note(self.operation, self.target, status, code, who=self.who, remote=self.remote)


_CURRENT: Final[ContextVar[Audited | None]] = ContextVar("audited", default=None)


def begin(request: web.Request, path: str) -> Audited | None:
    """Note that a request to a route (its path as declared) begins, if its operation is audited."""
    name = request.app.get(AUDITED, {}).get((request.method, path))
    if name is None:
        return None
    audited = Audited(name, target_of(path, request.match_info), request.remote or "")
    _CURRENT.set(audited)
    return audited


def identified(who: str) -> None:
    """Say who sent the request in work."""
    WHO.set(who)
    if (found := current()) is not None:
        found.who = who


def current() -> Audited | None:
    """The audited request in work, if this is work for one."""
    # Tasks that a request started may outlive it: what they do then is nobody's request.
    found = _CURRENT.get()
    return None if found is None or found.is_over else found


def name_target(target: str) -> None:
    """Say what the request in work is about, where its path does not."""
    if (found := current()) is not None:
        found.target = target


def leave_out() -> None:
    """Don't audit the request in work: it asks for nothing that is audited."""
    if (found := current()) is not None:
        found.is_over = True


def note(
    operation: str, target: str, status: int | None, code: str = "", *, who: str, remote: str
) -> None:
    """Write one line of the audit log."""
    log.info(
        operation,
        extra={"who": who, "remote": remote, "target": target, "status": status, "code": code},
    )


def target_of(path: str, given: Mapping[str, str]) -> str:
    """What a request is about: `ledgers/5` for `/v1/ledgers/{ledger_id}/recover`. `path` is as declared, `given` has its
    parameters; the first one names the target. Each name has one spelling, in printable ASCII, as a URL has it.
    """
    named, brace, _ = path.removeprefix("/v1/").partition("}")
    shown = {name: quote(text, errors="backslashreplace") for name, text in given.items()}
    return (named + brace).format_map(shown)[:TARGET_CHARS_MAX]


def who_is(caller: Identity) -> str:
    """A caller of an internal listener, for people."""
    return caller.name if caller.role is None else f"{caller.role} {caller.name}"
