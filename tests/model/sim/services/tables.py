"""What the database of a simulated metadata service holds."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from quorumlog.protocol.ids import ASSIGNED_ID_END
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.wire.bodies import CookieRow
from quorumlog.wire.repair_bodies import RepairSettings
from services.metadata.attempts import ACCEPTED


def highest_assigned(ledger_ids: Iterable[int]) -> int:
    """The highest of these ids that the database assigned, no caller chose; -1: none."""
    return max((i for i in ledger_ids if i < ASSIGNED_ID_END), default=-1)


@dataclass(slots=True)
class Item:
    """One item of the repair queue."""

    ranges: list[tuple[int, int]]
    version: int = 1
    survivors: int | None = None
    moves: bool = False
    failures: int = 0
    detail: str = ""
    worker: str | None = None
    next_try_at: int = 0
    created_at: int = 0


@dataclass(slots=True)
class Held:
    """A lease."""

    holder: str
    token: int
    expires_at: int


@dataclass(frozen=True, slots=True)
class Registration:
    """A bookie's cookie."""

    row: CookieRow
    born_at: str = ""
    """When a new directory registered; empty where a rebuild wrote the cookie."""
    is_retired: bool = False


@dataclass(slots=True)
class Tables:
    """What the database holds; it survives the service."""

    rows: dict[int, LedgerMetadata | None] = field(default_factory=dict)
    """None is a tombstone."""
    versions: dict[int, int] = field(default_factory=dict)
    attempts: dict[str, str] = field(default_factory=dict)
    accepted: set[str] = field(default_factory=set)
    """Tokens of changes whose loss was accepted."""
    once: dict[str, int] = field(default_factory=dict)
    """Names of clients' requests, and the ledgers that these created."""
    repairs: dict[tuple[int, str], Item] = field(default_factory=dict)
    leases: dict[str, Held] = field(default_factory=dict)
    repair_version: int = 0
    """The last one that an item of the queue got: none is given twice."""
    settings: RepairSettings = field(default_factory=RepairSettings)
    last_id: int = 0
    """The last one of the sequence of ledger ids."""
    cookies: dict[str, Registration] = field(default_factory=dict)
    """By the bookie's name."""
    is_rebuilt: bool = False

    def record(self, attempt: str, target: str) -> None:
        """A change is made by this attempt (rule 6): it is the last one."""
        self.attempts.pop(attempt, None)
        self.attempts[attempt] = target

    def contains(self, tokens: Iterable[str]) -> bool:
        """Whether these changes were made here, and none of them is only accepted as lost."""
        return all(self.attempts.get(token, ACCEPTED) != ACCEPTED for token in tokens)

    def cores(self) -> dict[int, LedgerMetadata | None]:
        """The rows as the protocol has them."""
        return dict(self.rows)

    def accept(self, tokens: Iterable[str]) -> None:
        """Go on without these changes, as an operator decided."""
        self.attempts |= dict.fromkeys(sorted(tokens), ACCEPTED)
        self.accepted.update(tokens)

    def copy(self) -> "Tables":
        """What a backup keeps: later changes are not in it."""
        return Tables(
            dict(self.rows),
            dict(self.versions),
            dict(self.attempts),
            set(self.accepted),
            dict(self.once),
            {key: replace(item, ranges=list(item.ranges)) for key, item in self.repairs.items()},
            {name: replace(held) for name, held in self.leases.items()},
            self.repair_version,
            self.settings,
            self.last_id,
            dict(self.cookies),
            self.is_rebuilt,
        )
