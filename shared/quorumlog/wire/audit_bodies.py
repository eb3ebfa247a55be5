"""Bodies of the audit log: what was asked for on whose behalf (docs/adr/0022-audit-log.md)."""

import json
from typing import Annotated, Final

from pydantic import StringConstraints, ValidationError

from quorumlog.protocol.values import Attempt
from quorumlog.wire.bodies import Body, received

TARGET_CHARS_MAX: Final = 300
"""A longer target is cut: it names nothing that exists."""

_Text = Annotated[str, StringConstraints(max_length=TARGET_CHARS_MAX)]


class AuditedRequest(Body):
    """A request that is audited, as services tell each other of it."""

    id: Attempt
    who: _Text
    remote: _Text
    operation: _Text
    target: _Text

    def to_header(self) -> str:
        """The value of the header, in ASCII."""
        return json.dumps(self.model_dump())

    @classmethod
    def from_header(cls, text: str) -> "AuditedRequest | None":
        """What a header tells, or None. It may be a later release's."""
        try:
            return received(cls, text)
        except ValidationError:
            return None


class AuditRow(AuditedRequest):
    """A change that was made: its row is of the same transaction."""

    number: int
    at: str
    via: _Text
    """The service that asked for the change; empty where that is who asked."""


class AuditList(Body):
    """A page of changes, in the order of their numbers."""

    audit: tuple[AuditRow, ...]
    next: int | None
