"""The tasks of `scrub`. Executors load this module, so it needs only what executors have."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from quorumlog.errors import QuorumLogError
from quorumlog.protocol.ids import member_name
from quorumlog.spark.http import Gateways
from quorumlog.spark.jobs.spans import MemberDigest, Span, judge, strangers

SCHEMA: Final = (
    "ledger long, first long, last long, bookie string, kind string, survivors int, detail string"
)
"""The schema of findings."""

BOOKIE_S: Final = 30.0
"""The deadline of a bookie's answer, with retries."""


@dataclass(frozen=True, slots=True)
class BookieUrls:
    """Where bookies are. Plain values: it travels to executors."""

    urls: dict[str, str]
    """The URL of each bookie that is not lost, by name."""
    current: dict[str, str]
    """The current incarnation of each bookie, by name."""
    rate: float
    """Entries per second that one task may ask bookies to digest; 0: no limit."""
    headers: dict[str, str] = field(repr=False)
    """What bookies want to be shown."""


@dataclass(frozen=True, slots=True)
class SpanCheck:
    """A span, and the bookies outside of it that hold entries of its ledger."""

    span: Span
    strangers: tuple[str, ...]

    def to_text(self) -> str:
        """As text, for a row of a DataFrame."""
        return json.dumps([asdict(self.span), self.strangers])

    @classmethod
    def from_text(cls, text: str) -> "SpanCheck":
        """The work in a row's text."""
        fields, others = json.loads(text)
        return cls(Span(**{**fields, "members": tuple(fields["members"])}), tuple(others))


def judging(
    cluster: BookieUrls,
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """The function of a task, from DataFrames of pandas to such: judge its spans one after another."""

    def judge_all(batches: Iterator[Any]) -> Iterator[Any]:
        import pandas as pd  # noqa: PLC0415 - on executors only

        with ExitStack() as stack:
            asking = _Asking(cluster, stack)
            for batch in batches:
                for text in batch["work"]:
                    work = SpanCheck.from_text(text)
                    found = judge(work.span, asking)
                    found += strangers(work.span, work.strangers, asking)
                    if found:
                        yield pd.DataFrame([asdict(finding) for finding in found])

    return judge_all


class _Asking:
    """Asks members over HTTP, no faster than the rate allows."""

    def __init__(self, cluster: BookieUrls, stack: ExitStack) -> None:
        """`stack` closes the connections."""
        self._cluster, self._stack = cluster, stack
        self._allowed = time.monotonic()
        self._bookies: dict[str, Gateways] = {}

    def __call__(self, member: str, span: Span) -> MemberDigest | str:
        name = member_name(member)
        url, current = self._cluster.urls.get(name), self._cluster.current.get(name)
        if url is None:
            return "it is lost"
        if current != member:
            return f"it is {current} now"
        self._pace(span.count)
        if name not in self._bookies:
            self._bookies[name] = self._stack.enter_context(
                Gateways(url, deadline_s=BOOKIE_S, headers=self._cluster.headers)
            )
        body = {
            "ranges": [[span.first, span.last]],
            "modulus": span.modulus,
            "residue": span.residue,
        }
        path = f"/v1/ledgers/{span.ledger_id}/digests"
        try:
            answer = (
                self._bookies[name].request("POST", path, value=body, is_repeatable=True).json()
            )
        except QuorumLogError as error:
            return f"{error.code}: {error.detail}"
        (found,) = answer["digests"]
        if answer["bookie"] != member:
            return f"it is {answer['bookie']} now"
        if answer["limbo"] and found["entries"] < span.count:
            return "it is in limbo: what it lacks is unknown"
        return MemberDigest(
            found["entries"],
            found["digest"],
            tuple(map(tuple, found["present"])),
            tuple(map(tuple, found["damaged"])),
        )

    def _pace(self, entry_count: int) -> None:
        if self._cluster.rate <= 0:
            return
        time.sleep(max(0.0, self._allowed - time.monotonic()))
        self._allowed = max(self._allowed, time.monotonic()) + entry_count / self._cluster.rate
