"""The audit log, which records requests, callers and results (docs/adr/0022-audit-log.md).

The edge of each service logs requests to its audited operations: one line of the logger `audit`
when the answer is known. A service that handles such a request describes it in a header of the
requests that it sends, so that the metadata service stores it and the change in one transaction.
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

from quorumlog import header
from quorumlog.net.identity import Identity, Role, caller_of
from quorumlog.net.parameters import Parameter, invalid, query_integer, query_text, time_of
from quorumlog.net.responses import CODE
from quorumlog.protocol.ids import ID_MAX
from quorumlog.wire.token_bodies import TARGET_CHARS_MAX, AuditedRequest

log = logging.getLogger("audit")
log.setLevel(logging.INFO)  # independent of the level of other loggers

AUDITED: Final = web.AppKey("audited", Mapping[tuple[str, str], str])
"""The name of each audited operation, by its method and path."""

_SPEAKERS: Final = (None, Role.GATEWAY, Role.AUTORECOVERY)
"""Roles whose processes forward requests of clients or operators, and may name the requester."""

ANONYMOUS: Final = "anonymous"
WHO: Final = ContextVar("who", default=ANONYMOUS)
"""The caller of the current request, if known; inherited by tasks that the request starts."""


def _time(text: str, pointer: str) -> datetime:
    try:
        return time_of(text)
    except ValueError as error:
        raise invalid(pointer, "must be an RFC 3339 time, such as 2026-01-02T03:04:05Z") from error


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
    """An audited request that is being handled."""

    operation: str
    target: str
    remote: str
    id: str = field(default_factory=lambda: str(uuid4()))
    who: str = ANONYMOUS
    asked: AuditedRequest | None = None
    """The client's request that caused another service to send this request, if any."""
    is_over: bool = False

    @property
    def body(self) -> AuditedRequest:
        """The description of the request for other services."""
        return self.asked or AuditedRequest(
            id=self.id,
            who=self.who[:TARGET_CHARS_MAX],
            remote=self.remote,
            operation=self.operation,
            target=self.target,
        )

    def end(self, response: web.StreamResponse | None) -> None:
        """Record the answer's status; None if the client disconnected before the answer."""
        if self.is_over:
            return
        self.is_over = True
        status = None if response is None else response.status
        code = "" if response is None else response.get(CODE, "")
        note(self.operation, self.target, status, code, who=self.who, remote=self.remote)


_CURRENT: Final[ContextVar[Audited | None]] = ContextVar("audited", default=None)


def begin(request: web.Request, path: str) -> Audited | None:
    """Begin to audit a request if its operation, declared at `path`, is audited."""
    name = request.app.get(AUDITED, {}).get((request.method, path))
    if name is None:
        return None
    audited = Audited(name, target_of(path, request.match_info), request.remote or "")
    _CURRENT.set(audited)
    return audited


def identified(who: str) -> None:
    """Set the caller of the request that is being handled."""
    WHO.set(who)
    if (found := current()) is not None:
        found.who = who


def called_by(audited: Audited, request: web.Request) -> None:
    """Set the caller of an audited request at an internal listener: the client for which a gateway
    forwarded the request, or the process that sent it.
    """
    audited.who = who_is(caller_of(request))
    if (asked := asked_by(request)) is not None:
        audited.asked, audited.who, audited.remote = asked, asked.who, asked.remote


def asked_by(request: web.Request) -> AuditedRequest | None:
    """The audited request that an internal caller names as the cause of its request. None if the
    caller names no cause, or its role is not allowed to name one.
    """
    reported = request.headers.get(header.AUDITED)
    if reported is None or caller_of(request).role not in _SPEAKERS:
        return None
    return AuditedRequest.from_header(reported)


def current() -> Audited | None:
    """The audited request that the current task belongs to; None if there is none."""
    # A task may outlive the request that started it. Its work then belongs to no request.
    found = _CURRENT.get()
    return None if found is None or found.is_over else found


def name_target(target: str) -> None:
    """Set the target of the request that is being handled, if the path does not name the target."""
    if (found := current()) is not None:
        found.target = target


def leave_out() -> None:
    """Don't audit the request that is being handled, because it changes nothing of interest."""
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
    """A request's target, such as `ledgers/5` for `/v1/ledgers/{ledger_id}/recover`. `path` is the
    declared path, whose first parameter names the target; `given` has the parameters. Names are
    quoted as in URLs, so that each has one spelling, in printable ASCII.
    """
    named, brace, _ = path.removeprefix("/v1/").partition("}")
    shown = {name: quote(text, errors="backslashreplace") for name, text in given.items()}
    return (named + brace).format_map(shown)[:TARGET_CHARS_MAX]


def who_is(caller: Identity) -> str:
    """An internal listener's caller, as text for the audit log."""
    return caller.name if caller.role is None else f"{caller.role} {caller.name}"
