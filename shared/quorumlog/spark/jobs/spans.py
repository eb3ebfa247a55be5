"""The tasks of the job `scrub`: compare replicas of spans of entries by their digests.

A span is some entries of one fragment that share a write set. The job requests a digest of the span
from each member. Equal digests prove that the replicas are equal. If the digests differ, the span
is halved until it is clear which entries of which member are missing, damaged or different.
Executors load this module, so it imports only what executors have.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any, Final

from quorumlog.errors import QuorumLogError
from quorumlog.protocol.ids import member_name
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.ranges import complement, ids_of_residue, union
from quorumlog.spark.http import Gateways

MISSING: Final = "missing"
CORRUPT: Final = "corrupt"
DIVERGENT: Final = "divergent"
EXTRA: Final = "extra"
UNREACHABLE: Final = "unreachable"

DAMAGE: Final = (MISSING, CORRUPT, DIVERGENT)
"""The kinds that mean a damaged copy. `extra` only costs space; `unreachable` proves nothing."""

SCHEMA: Final = (
    "ledger long, first long, last long, bookie string, kind string, survivors int, detail string"
)
"""The schema of findings."""

BOOKIE_S: Final = 30.0
"""The deadline of a request to a bookie, with retries."""


@dataclass(frozen=True, slots=True)
class Span:
    """Entries `first` to `last` that are `residue` modulo `modulus`, and their write set."""

    ledger_id: int
    first: int
    last: int
    modulus: int
    residue: int
    members: Sequence[str]
    is_complete: bool
    """Whether every member should have every entry, because no writer works on the fragment."""
    strangers: Sequence[str] = ()
    """Bookies that store entries of the ledger, but are not in the write set."""

    @property
    def count(self) -> int:
        """The number of entries."""
        return len(self.ids)

    @property
    def ids(self) -> range:
        """The ids of the entries."""
        return ids_of_residue(self.first, self.last, self.modulus, self.residue)


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """A problem with some entries of one ledger on one bookie."""

    ledger: int
    first: int
    last: int
    bookie: str
    kind: str
    survivors: int
    """How many good copies each of the entries still has."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class MemberDigest:
    """A member's digest of a span."""

    entry_count: int
    """The number of entries that the member has and can read."""
    digest: str
    is_damaged: bool
    """Whether the member has entries that it can't read."""


Ask = Callable[[str, Span], MemberDigest | str]
"""Requests a member's digest of a span; returns the digest, or the reason for its absence."""


def spans_of(row: Mapping[str, Any], confirmed: int, most: int) -> Iterator[Span]:
    """The spans of a ledger as the API shows it, of at most `most` entries each.

    `confirmed`: the end of a CLOSED ledger, or the LAC of any other ledger.
    """
    quorum = Quorum(row["ensemble_size"], row["write_quorum"], row["ack_quorum"])
    is_closed = row["state"] == "CLOSED"
    fragments = row["fragments"]
    modulus = quorum.modulus
    for index, fragment in enumerate(fragments):
        is_last = index + 1 == len(fragments)
        end = confirmed if is_last else min(confirmed, fragments[index + 1]["first_entry"] - 1)
        bookies = fragment["bookies"]
        for low, high in _pieces(row, fragment["first_entry"], end, most * modulus):
            for residue in range(modulus):
                places = quorum.write_set(residue) if quorum.is_striped else range(len(bookies))
                span = Span(
                    row["ledger_id"],
                    low,
                    high,
                    modulus,
                    residue,
                    tuple(bookies[place] for place in places),
                    is_complete=is_closed or not is_last,
                )
                if span.count:
                    yield span


def _pieces(row: Mapping[str, Any], first: int, last: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut first..last, except given-up entries (rule 31), into ranges of at most `most` ids."""
    lost = tuple((part["first"], part["last"]) for part in row.get("lost_entries", ()))
    for begin, end in complement(lost, first, last):
        for low in range(begin, end + 1, most):
            yield low, min(end, low + most - 1)


def judge(span: Span, ask: Ask) -> list[Finding]:
    """The findings of a span, in order; neighbouring entries make one finding."""
    return merged(chain(_judge(span, ask, span.members), _extra(span, ask)), span.modulus)


def merged(findings: Iterable[Finding], modulus: int) -> list[Finding]:
    """Merge neighbouring findings: consecutive entries of one span are `modulus` apart."""
    ranges: dict[Finding, list[tuple[int, int]]] = {}
    for found in findings:
        ranges.setdefault(replace(found, first=0, last=0), []).append((found.first, found.last))
    return sorted(
        replace(alike, first=first, last=last)
        for alike, places in ranges.items()
        for first, last in union(places, modulus)
    )


def _judge(span: Span, ask: Ask, members: Collection[str]) -> Iterator[Finding]:
    """Compare the members' copies of a span. If they differ, compare the halves, until in each part
    every member has all entries or none, and all copies have the same bytes.
    """
    answers: dict[str, MemberDigest] = {}
    for member in members:
        held = ask(member, span)
        if isinstance(held, str):
            survivors = len(members) - 1
            yield Finding(
                span.ledger_id, span.first, span.last, member, UNREACHABLE, survivors, held
            )
        else:
            answers[member] = held
    digests = Counter(held.digest for held in answers.values() if held.entry_count)
    # In an open fragment, a smaller number of entries proves nothing yet.
    is_whole = {held.entry_count for held in answers.values()} <= {0, span.count}
    is_alike = len(digests) <= 1 and not any(held.is_damaged for held in answers.values())
    is_clear = is_alike and (is_whole or not span.is_complete)
    if span.count > 1 and not is_clear:
        for half in _halves(span):
            yield from _judge(half, ask, answers)
        return
    (best, votes), (_, others) = [*digests.most_common(2), ("", 0), ("", 0)][:2]
    good = votes if votes > others else 0  # without a majority no copy is known to be right
    for member, held in answers.items():
        if held.is_damaged:
            kind = CORRUPT
        elif not held.entry_count:
            kind = MISSING
        elif held.digest != best or not good:
            kind = DIVERGENT
        else:
            continue
        if span.is_complete or kind != MISSING:
            yield Finding(span.ledger_id, span.ids[0], span.ids[-1], member, kind, good)


def _extra(span: Span, ask: Ask) -> Iterator[Finding]:
    """Find copies of a span's entries on bookies that should not store them."""
    for member in span.strangers:
        held = ask(member, span)
        if isinstance(held, str) or not (held.entry_count or held.is_damaged):
            continue
        if span.count in (held.entry_count, 1):
            first, last = span.ids[0], span.ids[-1]
            yield Finding(span.ledger_id, first, last, member, EXTRA, len(span.members))
        else:
            for half in _halves(replace(span, strangers=(member,))):
                yield from _extra(half, ask)


def _halves(span: Span) -> tuple[Span, Span]:
    ids = span.ids
    middle = len(ids) // 2
    return (
        replace(span, first=ids[0], last=ids[middle - 1]),
        replace(span, first=ids[middle], last=ids[-1]),
    )


# --- the tasks -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BookieUrls:
    """How to reach bookies. Plain values only, because the object is sent to executors."""

    urls: dict[str, str]
    """The URL of each bookie that is not lost, by name."""
    current: dict[str, str]
    """The current incarnation of each bookie, by name."""
    rate: float
    """Entries per second that one task may ask bookies to digest; 0: no limit."""
    headers: dict[str, str] = field(repr=False)
    """The headers that authenticate the job to bookies."""


def judging(cluster: BookieUrls) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Make a function for `mapInPandas` that checks a task's spans, each a JSON text, in order."""

    def judge_all(batches: Iterator[Any]) -> Iterator[Any]:
        import pandas as pd  # noqa: PLC0415 - on executors only

        with ExitStack() as stack:
            asking = _Asking(cluster, stack)
            for batch in batches:
                for text in batch["work"]:
                    span = Span(**json.loads(text))
                    found = judge(span, asking)
                    if found:
                        yield pd.DataFrame([asdict(finding) for finding in found])

    return judge_all


class _Asking:
    """Requests digests from members over HTTP, within the rate limit."""

    def __init__(self, cluster: BookieUrls, stack: ExitStack) -> None:
        """`stack` closes the connections."""
        self._cluster, self._stack = cluster, stack
        self._allowed = time.monotonic()
        self._bookies: dict[str, Gateways] = {}

    def __call__(self, member: str, span: Span) -> MemberDigest | str:
        name = member_name(member)
        url, current = self._cluster.urls.get(name), self._cluster.current.get(name)
        if url is None:
            return "the bookie is lost"
        if current != member:
            return f"the bookie is {current} now"
        self._pace(span.count)
        if name not in self._bookies:
            self._bookies[name] = self._stack.enter_context(
                Gateways(url, deadline_s=BOOKIE_S, headers=self._cluster.headers)
            )
        asked: dict[str, Any] = {"ranges": [[span.first, span.last]]}
        asked |= {"modulus": span.modulus, "residue": span.residue}
        path = f"/v1/ledgers/{span.ledger_id}/digests"
        try:
            answer = self._bookies[name].post(path, asked)
        except QuorumLogError as error:
            return f"{error.code}: {error.detail}"
        (found,) = answer["digests"]
        if answer["bookie"] != member:
            return f"the bookie is {answer['bookie']} now"
        if answer["limbo"] and found["entries"] < span.count:
            return "the bookie is in limbo: its missing entries are unknown"
        return MemberDigest(found["entries"], found["digest"], bool(found["damaged"]))

    def _pace(self, entry_count: int) -> None:
        if self._cluster.rate <= 0:
            return
        time.sleep(max(0.0, self._allowed - time.monotonic()))
        self._allowed = max(self._allowed, time.monotonic()) + entry_count / self._cluster.rate
