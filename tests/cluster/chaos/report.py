"""What a storm did and what was found: a line, a page for people, a file for programs."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.support.history import Violation

COUNTS: Final = (
    *("seconds", "kills", "pauses", "power_cuts", "partitions", "metadata_cuts", "failovers"),
    *("ledgers", "deleted", "logs", "remade", "acknowledged", "unknown", "read"),
)
"""What several storms have together."""
TABLES: Final = ("cut_on", "others", "sites", "skipped")


@dataclass(slots=True)
class Report:
    """What a storm did and what was found."""

    seed: int = 0
    durability: str = "synced"
    stage: str = "a cluster starts"
    """What goes on now."""
    broken_off: str = ""
    """Why it did not come to its end; then only what was seen until then is judged."""
    is_interrupted: bool = False
    """Somebody ended it before it was enough; what there was is judged whole."""
    seconds: float = 0.0
    kills: int = 0
    pauses: int = 0
    power_cuts: int = 0
    partitions: int = 0
    metadata_cuts: int = 0
    """How often one gateway lost metadata, and nothing else."""
    failovers: int = 0
    """How often Postgres's standby took over from its killed primary."""
    cut_on: Counter[str] = field(default_factory=Counter)
    """Power cuts, by the kind of file system."""
    others: Counter[str] = field(default_factory=Counter)
    """Faults of the stores, by what was done."""
    sites: Counter[str] = field(default_factory=Counter)
    """How often a call of the system failed, by the site."""
    known_sites: int = 0
    """How many sites a recording has shown; 0 before there is one."""
    not_made: set[str] = field(default_factory=set)
    """Sites whose call did not come, however often it was waited for."""
    skipped: Counter[str] = field(default_factory=Counter)
    """What this machine does not allow, by its reason."""
    ledgers: int = 0
    deleted: int = 0
    """Of them, in the storm."""
    logs: int = 0
    remade: int = 0
    """How often a log was deleted and its name given again."""
    acknowledged: int = 0
    unknown: int = 0
    read: int = 0
    stuck: list[str] = field(default_factory=list)
    """What did not go on, or could not be read at the end: nothing can be claimed of it."""
    violations: list[Violation] = field(default_factory=list)

    @property
    def faults(self) -> int:
        """All of them."""
        hurt = self.kills + self.pauses + self.power_cuts + self.partitions
        hurt += self.metadata_cuts + self.failovers
        return hurt + self.others.total() + self.sites.total()

    @property
    def has_failed(self) -> bool:
        """Whether the claim does not hold, or nothing can be claimed."""
        return bool(self.violations or self.stuck)

    def count(self, *kinds: str) -> int:
        """How many violations are of these kinds."""
        return sum(violation.kind in kinds for violation in self.violations)

    def add(self, other: "Report") -> None:
        """Take in what another storm did."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in TABLES:
            getattr(self, name).update(getattr(other, name))
        self.known_sites = max(self.known_sites, other.known_sites)
        self.not_made |= other.not_made
        self.stuck += other.stuck
        self.violations += other.violations
        self.durability = f"{self.durability} and {other.durability}"
        self.broken_off = self.broken_off or other.broken_off
        self.is_interrupted = self.is_interrupted or other.is_interrupted

    @property
    def has_every_site(self) -> bool:
        """Whether each call that a recording has shown has failed, or was waited for in vain."""
        return bool(self.known_sites) and (
            len(self.sites.keys() | self.not_made) >= self.known_sites
        )

    def progress(self) -> str:
        """How far it is, in a line."""
        return (
            f"{self.durability}, {self.stage}: {self.kills} kills, {self.power_cuts} power cuts,"
            f" {self.partitions} partitions, {self.metadata_cuts} metadata cuts,"
            f" {self.failovers} failovers, {self._failing()},"
            f" {self.acknowledged} acknowledged, {self.read} read"
        )

    def _failing(self) -> str:
        of = f" of {self.known_sites} recorded" if self.known_sites else ""
        return f"{len(self.sites)}{of} calls failed"

    def last_line(self) -> str:
        """The last line of `make chaos`."""
        return (
            f"chaos: {self.kills} kills, {self.power_cuts} power cuts, {self.partitions}"
            f" partitions, {self.metadata_cuts} metadata cuts, {self.failovers} failovers,"
            f" {self.acknowledged} acknowledged, {self.count('lost', 'gone')} lost,"
            f" {self.count('duplicate')} duplicated, {self.skipped.total()} skipped"
            + (", broken off" if self.broken_off else ", interrupted" * self.is_interrupted)
        )

    def page(self) -> str:
        """For people."""
        lines = [
            f"seed {self.seed}, {self.durability}, {self.seconds:.0f} s, {self.faults} faults",
            (
                f"  killed {self.kills}, paused {self.pauses}, power cut {self.power_cuts},"
                f" partitioned {self.partitions}, cut off from metadata {self.metadata_cuts},"
                f" failed over {self.failovers}"
            ),
            *_listed("power cut on", self.cut_on),
            *_listed("stores", self.others),
            f"  {self._failing()}, {self.sites.total()} times",
            *_listed("calls that failed", self.sites),
            *_listed("skipped", self.skipped),
            (
                f"  {self.ledgers} ledgers ({self.deleted} deleted) and {self.logs} logs,"
                f" {self.remade} logs made again:"
                f" {self.acknowledged} acknowledged,"
                f" {self.unknown} unknown, {self.read} read"
            ),
            *([f"  BROKEN OFF while {self.stage}: {self.broken_off}"] if self.broken_off else []),
            *(f"  STUCK {what}" for what in self.stuck),
            *(f"  VIOLATION {violation}" for violation in self.violations),
        ]
        return "\n".join(lines)

    def document(self) -> dict[str, Any]:
        """For programs."""
        names = ("seed", "durability", *COUNTS, "known_sites", "stuck", "broken_off")
        return (
            {name: getattr(self, name) for name in names}
            | {name: dict(getattr(self, name)) for name in TABLES}
            | {"violations": [str(violation) for violation in self.violations]}
        )

    def write(self, folder: Path) -> Path:
        """Write both; returns the page's file."""
        folder.mkdir(parents=True, exist_ok=True)
        page = folder / f"chaos-{self.seed}.txt"
        page.write_text(f"{self.page()}\n{self.last_line()}\n")
        document = json.dumps(self.document(), indent=2)
        page.with_suffix(".json").write_text(document + "\n")
        return page


def _listed(title: str, counts: Counter[str]) -> list[str]:
    parts = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    return [f"  {title}: {parts}"] if parts else []


IsEnough = Callable[[Report], bool]
