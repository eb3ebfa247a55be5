"""Which role may call which route of autorecovery (`net/roles.py`): an operator, and nobody else."""

from typing import Final

from quorumlog.net.identity import Role
from quorumlog.net.roles import Table

_OPERATOR: Final = frozenset({Role.OPERATOR})

ROLES: Final[Table] = {
    "GET /v1/status": _OPERATOR,
    "GET /v1/repairs": _OPERATOR,
    "POST /v1/checks": _OPERATOR,
    "GET /v1/checks/{ledger_id}": _OPERATOR,
    "POST /v1/checks/{ledger_id}": _OPERATOR,
    "GET /v1/drains/{bookie}": _OPERATOR,
    "DELETE /v1/bookies/{bookie}": _OPERATOR,
    "POST /v1/audits": _OPERATOR,
    "PUT /v1/lost-bookie-delay": _OPERATOR,
    "PATCH /v1/settings": _OPERATOR,
}

AUDITED: Final = frozenset(
    {"DELETE /v1/bookies/{bookie}", "PUT /v1/lost-bookie-delay", "PATCH /v1/settings"}
)
"""What is noted in the audit log."""
