"""Which role may call which route of the metadata service (`net/roles.py`).

Gateways and autorecovery run the protocol's machines, so they change rows and read keys. A bookie registers itself,
reads which ledgers are its own, without the keys that make and check authentication codes (`handlers.py`), and asks for
repairs of its own entries. An operator decides what no process may: losses, rebuilds, cookies.
"""

from typing import Final

from quorumlog.net.identity import Role
from quorumlog.net.roles import Table

_GATEWAY: Final = frozenset({Role.GATEWAY})
_BOOKIE: Final = frozenset({Role.BOOKIE})
_HEALER: Final = frozenset({Role.AUTORECOVERY})
_OPERATOR: Final = frozenset({Role.OPERATOR})
_WRITERS: Final = _GATEWAY | _HEALER
_SERVICES: Final = _WRITERS | _BOOKIE
_ALL: Final = _SERVICES | _OPERATOR

ROLES: Final[Table] = {
    "POST /v1/ledgers": _GATEWAY,
    "GET /v1/ledgers": _ALL,
    "GET /v1/ledgers/{ledger_id}": _ALL,
    "PUT /v1/ledgers/{ledger_id}": _WRITERS,
    "DELETE /v1/ledgers/{ledger_id}": _GATEWAY,
    "POST /v1/ledger-heads": _GATEWAY,
    "POST /v1/ledger-proofs": _BOOKIE,
    "GET /v1/changes": _SERVICES,
    "GET /v1/cluster-id": _ALL,
    "GET /v1/bookies": _ALL,
    "GET /v1/bookies/{name}/cookie": _BOOKIE | _OPERATOR,
    "PUT /v1/bookies/{name}/cookie": _BOOKIE | _OPERATOR,
    "DELETE /v1/bookies/{name}/cookie": _HEALER | _OPERATOR,
    "GET /v1/bookies/{name}/uses": _HEALER | _OPERATOR,
    "GET /v1/bookies/{name}/ledgers": _BOOKIE,
    "PUT /v1/bookies/{name}/log-end": _BOOKIE,
    "PUT /v1/bookies/{name}/heartbeat": _BOOKIE,
    "GET /v1/services": _WRITERS | _OPERATOR,
    "PUT /v1/services/{kind}/{id}/heartbeat": _SERVICES,
    "POST /v1/logs": _GATEWAY,
    "GET /v1/logs": _GATEWAY,
    "GET /v1/requests/{token}": _GATEWAY,
    "GET /v1/logs/{name}": _GATEWAY,
    "PUT /v1/logs/{name}": _GATEWAY,
    "DELETE /v1/logs/{name}": _GATEWAY,
    "POST /v1/log-heads": _GATEWAY,
    "GET /v1/orphans": _GATEWAY,
    "POST /v1/shared-ledgers": _GATEWAY,
    "DELETE /v1/orphans/{ledger_id}": _GATEWAY,
    "POST /v1/tokens": _GATEWAY | _OPERATOR,
    "GET /v1/tokens": _GATEWAY,
    "DELETE /v1/tokens/{id}": _GATEWAY,
    "POST /v1/transactions": _GATEWAY,
    "GET /v1/transactions/{id}": _GATEWAY,
    "POST /v1/transactions/{id}/commit": _GATEWAY,
    "POST /v1/transactions/{id}/abort": _GATEWAY,
    "POST /v1/transactions/{id}/renew": _GATEWAY,
    "GET /v1/repairs": _WRITERS | _OPERATOR,
    "POST /v1/repairs": _SERVICES,
    "POST /v1/repairs/claim": _HEALER,
    "POST /v1/repairs/{ledger_id}/{member}/progress": _HEALER,
    "POST /v1/repairs/{ledger_id}/{member}/fail": _HEALER,
    "GET /v1/repairs/summary": _WRITERS | _OPERATOR,
    "POST /v1/repairs/hurry": _HEALER,
    "POST /v1/repairs/trigger": _HEALER,
    "GET /v1/repair-settings": _HEALER | _OPERATOR,
    "PATCH /v1/repair-settings": _HEALER,
    "PUT /v1/leases/{name}": _HEALER,
    "DELETE /v1/leases/{name}": _HEALER,
    "GET /v1/rebuild": _BOOKIE | _OPERATOR,
    "POST /v1/rebuild": _OPERATOR,
    "POST /v1/witnesses": _SERVICES,
    "POST /v1/witnesses/copies": _BOOKIE,
    "GET /v1/kept-ledgers": _GATEWAY | _OPERATOR,
    "GET /v1/witnesses": _GATEWAY | _OPERATOR,
    "POST /v1/witnesses/accept": _OPERATOR,
    "GET /v1/audit": _GATEWAY | _OPERATOR,
    "POST /v1/keys/reseal": _OPERATOR,
}

AUDITED: Final = frozenset(
    {
        "DELETE /v1/ledgers/{ledger_id}",
        "POST /v1/logs",
        "DELETE /v1/logs/{name}",
        "POST /v1/tokens",
        "DELETE /v1/tokens/{id}",
        "PUT /v1/bookies/{name}/cookie",
        "DELETE /v1/bookies/{name}/cookie",
        "PATCH /v1/repair-settings",
        "POST /v1/rebuild",
        "POST /v1/witnesses/accept",
        "POST /v1/keys/reseal",
    }
)
"""What is noted in the audit log, whoever asks."""

FOR_OTHERS: Final = AUDITED | {
    "PUT /v1/ledgers/{ledger_id}",
    "PUT /v1/logs/{name}",
    "POST /v1/transactions/{id}/commit",
    "POST /v1/transactions/{id}/abort",
}
"""What is kept with the request of a client for which another service asks for it."""
