"""Which role may call which route of a gateway's internal listener (`net/roles.py`).

Other gateways forward what their clients asked. Autorecovery asks whether a writer lives, and to replace a bookie.
"""

from typing import Final

from quorumlog.net.identity import Role
from quorumlog.net.roles import Table

_GATEWAY: Final = frozenset({Role.GATEWAY})
_HEALER: Final = frozenset({Role.AUTORECOVERY})

ROLES: Final[Table] = {
    "GET /internal/instance": _GATEWAY | _HEALER,
    "GET /internal/ledgers/{ledger_id}/lac": _GATEWAY,
    "POST /internal/ledgers/{ledger_id}/append": _GATEWAY,
    "POST /internal/ledgers/{ledger_id}/records": _GATEWAY,
    "POST /internal/ledgers/{ledger_id}/close": _GATEWAY,
    "POST /internal/ledgers/{ledger_id}/replace": _HEALER,
    "POST /internal/log-ends": _GATEWAY,
    "POST /internal/logs/{name}/append": _GATEWAY,
    "POST /internal/logs/{name}/roll": _GATEWAY,
    "POST /internal/logs/{name}/publish": _GATEWAY,
    "POST /internal/logs/{name}/consult": _GATEWAY,
    "POST /internal/logs/{name}/access": _GATEWAY,
}
