"""Which role may call which route of a bookie (`net/roles.py`).

Entries are added, read and fenced by the processes that run the protocol's machines. The metadata service asks what a
bookie has witnessed and which rows it holds, another process of the bookie's name who it is, an operator the rest.
"""

from typing import Final

from quorumlog.net.identity import Role
from quorumlog.net.roles import Table

_OPERATOR: Final = frozenset({Role.OPERATOR})
_HEALER: Final = frozenset({Role.AUTORECOVERY})
_WRITERS: Final = frozenset({Role.GATEWAY}) | _HEALER
_METADATA: Final = frozenset({Role.METADATA})

ROLES: Final[Table] = {
    "GET /v1/channel": _WRITERS,
    "GET /v1/info": _OPERATOR,
    "GET /v1/process": frozenset({Role.BOOKIE}) | _OPERATOR,
    "GET /v1/witnesses": _METADATA,
    "PUT /v1/state": _OPERATOR,
    "PUT /v1/maintenance": _OPERATOR,
    "GET /v1/damage": _HEALER | _OPERATOR,
    "GET /v1/ledgers": _HEALER | _OPERATOR,
    "GET /v1/rows": _METADATA | _OPERATOR,
    "GET /v1/ledgers/{ledger_id}": _WRITERS | _OPERATOR,
    "POST /v1/ledgers/{ledger_id}/entries": _WRITERS,
    "GET /v1/ledgers/{ledger_id}/entries": _WRITERS,
    # An accepted loss ends a ledger.
    "POST /v1/ledgers/{ledger_id}/fence": _WRITERS | _METADATA,
    "GET /v1/ledgers/{ledger_id}/last-add-confirmed": _WRITERS,
    "POST /v1/ledgers/{ledger_id}/digests": _WRITERS,
}

AUDITED: Final = frozenset({"PUT /v1/state", "PUT /v1/maintenance"})
"""What is noted in the audit log."""
