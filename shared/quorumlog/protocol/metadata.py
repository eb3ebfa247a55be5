"""A ledger's metadata, and the transforms by which it changes. All values are immutable.

A transform returns a new value with the *old* version, because a compare-and-swap names the version
that it changes, and assigns the new version itself (rule 6).

Invariants (checked by `check`):
  - I22: the fragments' `first_entry` grows strictly from 0; each ensemble has E distinct members;
  - I21: `last_entry` and `length` are None unless the state is CLOSED;
  - I23: in a CLOSED ledger no fragment starts beyond last_entry + 1;
  - rule 31: only a CLOSED ledger has lost entries, within its end and with `may_lack_entries`.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, ClassVar

from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.quorum import QUORUM_MAX, Quorum
from quorumlog.protocol.ranges import Ranges, complement, union
from quorumlog.protocol.values import (
    AttemptOrNone,
    Bounds,
    EntryId,
    IdOrNone,
    Key,
    LedgerId,
    LogName,
    Member,
    Number,
    Pairs,
    Text,
    Value,
    Version,
)

LOST_RANGES_MAX = 1000
"""Bound on the ranges of lost entries in one ledger's metadata. Chosen by judgement."""


class State(StrEnum):
    """A ledger's state: OPEN to IN_RECOVERY to CLOSED, or OPEN to CLOSED, never back (I21)."""

    OPEN = "OPEN"
    IN_RECOVERY = "IN_RECOVERY"
    CLOSED = "CLOSED"


class DigestKind(StrEnum):
    """The protection of each entry's bytes: a checksum, an authentication code (MAC), or none."""

    CRC32C = "crc32c"
    HMAC_SHA256 = "hmac-sha256"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Fragment:
    """The ensemble of the entries from `first_entry` up to the next fragment, by position."""

    first_entry: EntryId
    bookies: Annotated[tuple[Member, ...], Bounds(min_length=1, max_length=QUORUM_MAX)]


@dataclass(frozen=True, slots=True)
class Repair:
    """A repair of the fragment that begins at `first_entry`: `target` gets copies, and then
    replaces `leaving` in the fragment. Until the repair is over, neither member may drop the
    ledger (rules 18, 20 and 20b). Readers ask only the member that the fragment names.
    """

    first_entry: EntryId
    leaving: Member
    target: Member


@dataclass(frozen=True, slots=True)
class Writer:
    """The process that created the ledger. No other process ever appends to it (rule 11)."""

    id: Text
    url: Text
    """The process's URL for clients of the public API."""
    internal_url: Text = ""
    """The process's URL for other processes of the cluster; empty if they use `url`."""

    @property
    def url_inside(self) -> str:
        """The URL by which other processes of the cluster reach this process."""
        return self.internal_url or self.url


class Deletion(StrEnum):
    """The object of a deletion: a ledger, its log, or both."""

    ALONE = "ledger"
    WITH_LOG = "log"
    """The ledger and its log, with all ledgers that the log named earlier."""
    OF_LOG = "log-only"
    """Only the ledger's log. The ledger stays, because forks name it (rule 27a)."""


PREDECESSORS_KEPT = 4
"""Number of predecessors in a lineage, so that a rebuild can bridge up to 3 missing ledgers."""

ANCESTORS_KEPT = 32
"""Number of tokens of earlier versions in a ledger's metadata (rule 18d). Chosen by judgement."""

SHARED_KEPT = 64
"""Maximum shared ledgers in a fork's lineage, 16 GiB by default. Chosen by judgement."""


REPLACED_MAX = 1000
"""Maximum ledgers that one ledger replaces. Each copy of its metadata lists them (rule 27c)."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """A ledger's place in its log: the log, and the ledgers before this one (rule 18f)."""

    log_created_at: Text
    """The log's creation time, which distinguishes the log from earlier and later namesakes."""
    before: tuple[tuple[LedgerId, EntryId], ...] = ()
    """(id, first offset) of the nearest earlier ledgers with records, ascending."""
    published_ms: Number = 0
    """The time of the ledger's publication, in ms since 1970 (rule 26b); 0 if there was none."""
    stream_seq: Text | None = None
    """The log's last stream sequence before this ledger (rule 25a); None if there was none."""
    placed_by: AttemptOrNone = ""
    """The token of the log's change that placed the ledger, or of a later change (rule 18f). Empty
    in an open ledger's own metadata, and if the store has no tokens."""
    forked_at: Number | None = None
    """A fork's first own offset. Records with lower offsets are in ledgers of other logs."""
    shared: tuple[tuple[LedgerId, EntryId], ...] = ()
    """The nearest ledgers that a fork shares with other logs, in the form of `before`."""
    writer_token: Number = 0
    """The log's writer token; 0 if the log was never opened for one writer (rule 22a)."""
    replaced: Annotated[tuple[tuple[LedgerId, EntryId], ...], Bounds(max_length=REPLACED_MAX)] = ()
    """For a ledger made by a rewrite, the id and first offset of each ledger that it replaced,
    directly or indirectly, ascending (rule 27c)."""


@dataclass(frozen=True, slots=True)
class LedgerMetadata(Value):
    """One ledger's metadata. `version` grows by 1 with each successful CAS (I20)."""

    STORE_FIELDS: ClassVar = frozenset(
        ("ledger_id", "version", "attempt", "first_offset", "lineage", "created_at", "deletion")
    )
    """Fields that the store keeps apart from the others. It ignores their values, and the value of
    `ancestors`, in a requested change."""

    ledger_id: IdOrNone
    """The ledger's id; negative in a request to create a ledger with an assigned id."""
    quorum: Quorum
    digest: DigestKind
    fragments: Annotated[tuple[Fragment, ...], Bounds(min_length=1)]
    version: Version = 1
    attempt: AttemptOrNone = ""
    """The token of the change that made this version (rule 6). Versions of two histories may have
    equal numbers, but never equal tokens (rule 18a). Empty if the store has no tokens."""
    ancestors: Annotated[tuple[AttemptOrNone, ...], Bounds(max_length=ANCESTORS_KEPT)] = ()
    """The tokens of the versions just before this one, ascending. They show whether a version
    descends from another (rule 18d)."""
    state: State = State.OPEN
    last_entry: IdOrNone | None = None
    length: Number | None = None
    writer: Writer | None = None
    ledger_key: Key = b""
    """The key that bookies verify, derived from the access key and the ledger's nonce (rule 17)."""
    mac_key: Key = b""
    """The key of the authentication codes, only for hmac-sha256. Bookies never get this key."""
    access_key: Key = b""
    """The key derived from the password (rule 30); empty if the ledger has no password."""
    wrapped_mac_key: Key = b""
    """The MAC key, encrypted with a key derived from the password. Set after a change of the
    password, because the MAC key can't be derived from the new password."""
    custom: Pairs = ()
    log: LogName | None = None
    """The log that the ledger was created for, if any."""
    first_offset: Number | None = None
    """The offset of the ledger's first record in its log; None until it is placed (rule 23)."""
    lineage: Lineage | None = None
    """The ledger's place in its log, set together with `first_offset`."""
    created_at: Text = ""
    declared_lost: tuple[Member, ...] = ()
    """Members that an operator declared lost for ever, so that recovery can end (rule 14)."""
    may_lack_entries: bool = False
    lost_entries: Annotated[
        tuple[tuple[EntryId, EntryId], ...], Bounds(max_length=LOST_RANGES_MAX)
    ] = ()
    """Ascending, non-adjacent ranges of entries whose loss an operator accepted, because no bookie
    can serve them (rule 31). Readers get a final error, and no member has to hold these entries.
    """
    repairs: tuple[Repair, ...] = ()
    extra: Pairs = ()
    """Tags that services store with a ledger (transaction, partition, attempt)."""
    deletion: Deletion | None = None
    """The object of the deletion, set only in a copy (rule 18e). A tombstone in the store has only
    an id and a version."""

    def check(self) -> None:
        """Assert the invariants of this metadata."""
        firsts = [fragment.first_entry for fragment in self.fragments]
        assert firsts, "a ledger must have at least one fragment"
        assert firsts[0] == 0, "the first fragment must begin at entry 0 (I22)"
        assert all(a < b for a, b in itertools.pairwise(firsts)), "fragments must ascend (I22)"
        for fragment in self.fragments:
            size, members = self.quorum.ensemble_size, fragment.bookies
            assert len(members) == size, "a fragment must have ensemble_size members (I22)"
            assert len(set(members)) == size, "a fragment must have distinct members (I22)"
        if self.state is State.CLOSED:
            assert self.last_entry is not None, "a CLOSED ledger must have last_entry (I21)"
            assert self.length is not None, "a CLOSED ledger must have length (I21)"
            assert firsts[-1] <= self.last_entry + 1, "no fragment may begin after the end (I23)"
        else:
            assert self.last_entry is None, "only a CLOSED ledger may have last_entry (I21)"
            assert self.length is None, "only a CLOSED ledger may have length (I21)"
        if self.lost_entries:
            ids = [entry_id for lost in self.lost_entries for entry_id in lost]
            assert self.last_entry is not None, "lost_entries need a CLOSED ledger (rule 31)"
            assert ids[0] >= 0, "lost_entries must not be below 0 (rule 31)"
            assert ids[-1] <= self.last_entry, "lost_entries must not exceed last_entry (rule 31)"
            is_range = all(first <= last for first, last in self.lost_entries)
            assert is_range, "a range of lost_entries must not end before it begins"
            is_apart = all(a + 1 < b for a, b in zip(ids[1::2], ids[2::2], strict=False))
            assert is_apart, "ranges of lost_entries must ascend and not touch"
            assert self.may_lack_entries, "lost_entries need may_lack_entries (rule 31)"

    @property
    def last_fragment(self) -> Fragment:
        """The last fragment, which gets the entries that the writer appends."""
        return self.fragments[-1]

    def fragment_index(self, entry_id: int) -> int:
        """The index of the fragment that contains an entry id."""
        for index in range(len(self.fragments) - 1, -1, -1):
            if self.fragments[index].first_entry <= entry_id:
                return index
        raise ValueError(f"an entry id must be at least 0 (got {entry_id})")

    def fragment_of(self, entry_id: int) -> Fragment:
        """The fragment that contains an entry id."""
        return self.fragments[self.fragment_index(entry_id)]

    def fragment_last(self, index: int) -> int | None:
        """A fragment's last entry; None for the last fragment of a ledger that is not CLOSED."""
        if index + 1 < len(self.fragments):
            return self.fragments[index + 1].first_entry - 1
        return self.last_entry

    def members_of(self, entry_id: int) -> tuple[tuple[int, str], ...]:
        """(position, member) of each bookie that should store an entry, in write set order."""
        bookies = self.fragment_of(entry_id).bookies
        return tuple((p, bookies[p]) for p in self.quorum.write_set(entry_id))

    def lost_at(self, entry_id: int) -> tuple[int, int] | None:
        """The range of lost entries that contains an id, or None."""
        for first, last in self.lost_entries:
            if first <= entry_id <= last:
                return first, last
        return None

    def kept(self, first: int, last: int) -> Ranges:
        """The parts of first..last without lost entries (rule 31). Readers ask only for these
        parts, and members have to hold only these.
        """
        return complement(self.lost_entries, first, last)

    def given_up(self, first: int, last: int, members: tuple[str, ...]) -> "LedgerMetadata":
        """Return metadata with entries first..last accepted as lost, and `members` declared lost
        for ever (rule 14). Lost ranges only grow.
        """
        return replace(
            self,
            lost_entries=union((*self.lost_entries, (first, last))),
            may_lack_entries=True,
            declared_lost=tuple(dict.fromkeys(self.declared_lost + members)),
        )

    def changed_by(self, attempt: str, base: "LedgerMetadata") -> "LedgerMetadata":
        """Return this metadata as the version that the change `attempt` makes from `base`."""
        ancestors = (*base.ancestors, base.attempt)[-ANCESTORS_KEPT:]
        return replace(self, version=base.version + 1, attempt=attempt, ancestors=ancestors)

    def deleted(
        self, attempt: str = "", *, deletion: Deletion = Deletion.ALONE
    ) -> "LedgerMetadata":
        """Return metadata for the copies that inform members of a deletion (rule 18e).

        `attempt`: the deletion's token; empty if the store has no tokens. With OF_LOG, the version
        stays: the tombstone's copy, which members must still accept later, has the next version.
        """
        version = self.version if deletion is Deletion.OF_LOG else self.version + 1
        return replace(self, version=version, attempt=attempt, deletion=deletion)

    def with_ensemble(self, first_entry: int, bookies: tuple[str, ...]) -> "LedgerMetadata":
        """Return metadata with a new last fragment, after an ensemble change. The new fragment
        replaces the previous fragment if both begin at the same entry.

        Raises: ValueError if the fragment would begin below the last fragment (I22, X2).
        """
        last = self.last_fragment
        if first_entry < last.first_entry:
            raise ValueError(f"a fragment can't begin at {first_entry}, below {last.first_entry}")
        kept = self.fragments[:-1] if first_entry == last.first_entry else self.fragments
        return replace(self, fragments=(*kept, Fragment(first_entry, bookies)))

    def with_member_replaced(self, index: int, old: str, new: str) -> "LedgerMetadata":
        """Return metadata in which `new` replaces `old` in one fragment, after a repair (I25).
        `repairs` keeps `old` until `new` has a copy of the metadata (rule 20b).
        """
        fragment = self.fragments[index]
        first = fragment.first_entry
        if old not in fragment.bookies or new in fragment.bookies:
            raise ValueError(f"fragment {index} must name {old}, and must not name {new}")
        bookies = tuple(new if member == old else member for member in fragment.bookies)
        return replace(
            self,
            fragments=(
                *self.fragments[:index],
                Fragment(first, bookies),
                *self.fragments[index + 1 :],
            ),
            repairs=(*self._repairs_after(first, old, new), Repair(first, old, new)),
        )

    def _repairs_after(self, first: int, old: str, new: str) -> Iterator[Repair]:
        """The repairs that are still needed once `new` has replaced `old`."""
        placed = self.placed_repairs
        for repair in self.repairs:
            if repair.first_entry != first:
                yield repair
            elif repair.target == old:
                # `old` may be lost for ever, so a copy at `new` must release `leaving` (rule 20b).
                if repair.leaving != new:
                    yield replace(repair, target=new)
            elif repair.target != new and (repair.leaving != old or repair in placed):
                # Drops pending repairs of `old`, and repairs with `new` as their target.
                yield repair

    def with_leaving_released(self, first_entry: int, target: str) -> "LedgerMetadata":
        """Return metadata without the repair of this fragment to `target`. The members that the
        repair kept may then drop the ledger, because `target` has a copy (rule 20b).
        """
        repairs = tuple(
            r for r in self.repairs if (r.first_entry, r.target) != (first_entry, target)
        )
        return replace(self, repairs=repairs)

    def with_repair(self, repair: Repair) -> "LedgerMetadata":
        """Return metadata that names `repair.target`, before any entry is copied to it (rule 20).
        `repair` replaces an earlier worker's pending repair of the same member.
        """
        placed = self.placed_repairs
        others = tuple(
            other
            for other in self.repairs
            if (other.first_entry, other.leaving) != (repair.first_entry, repair.leaving)
            or other in placed
        )
        return replace(self, repairs=(*others, repair))

    def is_closed_fragment(self, index: int) -> bool:
        """Whether the fragment's end is final: no entry can be appended to it any longer."""
        return self.state is State.CLOSED or index + 1 < len(self.fragments)

    @property
    def placed_repairs(self) -> tuple[Repair, ...]:
        """The repairs whose target has joined the fragment. The replaced bookie (`leaving`) stays a
        member until the target has a copy of the metadata (rule 20b).
        """
        bookies = {fragment.first_entry: fragment.bookies for fragment in self.fragments}
        return tuple(r for r in self.repairs if r.target in bookies.get(r.first_entry, ()))

    @property
    def all_members(self) -> tuple[str, ...]:
        """All members of fragments and repairs, each once. No member may drop the ledger."""
        found = [member for fragment in self.fragments for member in fragment.bookies]
        found += [member for r in self.repairs for member in (r.leaving, r.target)]
        return tuple(dict.fromkeys(found))

    def in_recovery(self) -> "LedgerMetadata":
        """Return metadata in IN_RECOVERY: the writer can no longer change the ensemble."""
        assert self.state is not State.CLOSED, "a CLOSED ledger can't be recovered (I21)"
        return replace(self, state=State.IN_RECOVERY)

    def closed(self, *, last_entry: int, length: int) -> "LedgerMetadata":
        """Return metadata of the CLOSED ledger, with `length` payload bytes up to `last_entry`
        (NO_ENTRY: it is empty). Fragments beyond the end are dropped, except the first (I23).
        """
        assert self.state is not State.CLOSED, "a CLOSED ledger can't be closed again (I4)"
        assert last_entry >= NO_ENTRY
        kept = tuple(
            fragment
            for index, fragment in enumerate(self.fragments)
            if index == 0 or fragment.first_entry <= last_entry + 1
        )
        return replace(
            self, state=State.CLOSED, last_entry=last_entry, length=length, fragments=kept
        )
