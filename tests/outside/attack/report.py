"""What the attack did, what it found, and the last line."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final

SHOWN: Final = 3
"""Findings of one kind that are printed with their request; the rest is counted."""


class Kind(StrEnum):
    """What a finding counts as."""

    SERVER_ERROR = "undocumented 5xx"
    HANG = "hang"
    LOST = "lost"
    ANSWER = "wrong answer"
    """A status that the operation does not have, or an error without its problem document."""
    LOG = "error in a log"
    COST = "cost"
    """Memory, descriptors or a bystander's time, beyond the bound."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that must not be, and how to see it again."""

    campaign: str
    kind: Kind
    what: str
    command: str = ""


@dataclass(frozen=True, slots=True)
class Figures:
    """What one campaign cost others."""

    requests: int
    p50_ms: float
    """Of the bystander's appends while the campaign ran."""
    p50_times: float
    """The same by the figure before the attack."""
    slowest_ms: float
    retried: int
    """The bystander's requests that were told to come again, and came through."""
    rss_peak_mib: dict[str, int]


@dataclass(slots=True)
class Report:
    """The books of one attack."""

    seed: int
    requests: int = 0
    peers: set[str] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)
    campaigns: dict[str, Figures] = field(default_factory=dict)
    statuses: Counter[str] = field(default_factory=Counter)
    bystander: dict[str, int] = field(default_factory=dict)
    rss_mib: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of each process: before, and at rest after the attack."""
    descriptors: dict[str, tuple[int, int]] = field(default_factory=dict)

    def find(self, campaign: str, kind: Kind, what: str, command: str = "") -> None:
        """Note what must not be."""
        self.findings.append(Finding(campaign, kind, what, command))

    def count(self, kind: Kind) -> int:
        """How many findings there are of a kind."""
        return sum(finding.kind is kind for finding in self.findings)

    @property
    def p50_times(self) -> float:
        """The bystander's slowest campaign by its own figure before."""
        return max((figures.p50_times for figures in self.campaigns.values()), default=1.0)

    @property
    def slowest_ms(self) -> float:
        """The bystander's slowest append in any campaign."""
        return max((figures.slowest_ms for figures in self.campaigns.values()), default=0.0)

    @property
    def rss_times(self) -> float:
        """The process that kept most memory, by its figure before."""
        return max((after / before for before, after in self.rss_mib.values()), default=1.0)

    def page(self) -> str:
        """All that is told before the last line."""
        lines = [f"statuses: {_counted(self.statuses)}"]
        lines += [
            f"{name}: {it.requests} requests; bystander p50 {it.p50_ms:.1f} ms"
            f" ({it.p50_times:.1f} times), slowest {it.slowest_ms:.0f} ms, {it.retried} retried;"
            f" most memory {_counted(it.rss_peak_mib)} MiB"
            for name, it in self.campaigns.items()
        ]
        for what, table in (("RSS in MiB", self.rss_mib), ("descriptors", self.descriptors)):
            shown = ", ".join(f"{name} {was} -> {now}" for name, (was, now) in table.items())
            lines.append(f"{what}, before and after: {shown}")
        lines.append(f"bystander: {_counted(self.bystander)}")
        return "\n".join([*lines, *self._found()])

    def _found(self) -> list[str]:
        lines, seen = [], Counter[tuple[str, Kind, str]]()
        for finding in self.findings:
            key = (finding.campaign, finding.kind, finding.what)
            seen[key] += 1
            if seen[key] <= SHOWN:
                lines.append(f"FOUND by {finding.campaign} ({finding.kind}): {finding.what}")
                if finding.command:
                    lines.append(f"    {finding.command}")
        lines += [
            f"FOUND {count} times: {what}" for (_, _, what), count in seen.items() if count > SHOWN
        ]
        return lines

    def last_line(self) -> str:
        """The one line that scripts read."""
        return (
            f"attack: {self.requests} requests, {len(self.peers)} peers,"
            f" {self.count(Kind.SERVER_ERROR)} undocumented 5xx, {self.count(Kind.HANG)} hangs,"
            f" {self.count(Kind.LOST)} lost, bystander p50 {self.p50_times:.1f} times,"
            f" slowest {self.slowest_ms:.0f} ms,"
            f" RSS {self.rss_times:.1f} times"
        )

    def document(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "seed": self.seed,
            "requests": self.requests,
            "peers": sorted(self.peers),
            "statuses": dict(self.statuses),
            "campaigns": {name: asdict(figures) for name, figures in self.campaigns.items()},
            "bystander": {
                **self.bystander,
                "p50_times": self.p50_times,
                "slowest_ms": self.slowest_ms,
            },
            "rss_mib": self.rss_mib,
            "rss_times": self.rss_times,
            "descriptors": self.descriptors,
            "findings": [asdict(finding) for finding in self.findings],
        }


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
