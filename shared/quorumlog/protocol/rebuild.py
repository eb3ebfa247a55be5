"""Decides which lost metadata is proven by bookies' copies (rule 18d), without IO.

Only bookies' copies of metadata (rule 18b) and ids of deleted ledgers (rule 16a) prove metadata.
Each copy is of a committed version, so no copy is wrong. A *later* version may have been committed,
if only bookies that do not answer have copies of it.

- CLOSED metadata is final except for its members, because a ledger has one end (I4).

- OPEN metadata, from a copy or the database, is the latest version if fewer than Qa bookies are
  silent. An entry confirmed under a later version is on Qa members of that version, each with a
  copy of that version or a later one. At least one of these members answers.

- A deleted id or a tombstone's copy proves a tombstone, because ids are used once (rule 17).

Metadata that is not proven is reported, and never guessed.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Final

from quorumlog.protocol.access_key import sealed_of
from quorumlog.protocol.ids import member_incarnation, member_name
from quorumlog.protocol.metadata import Deletion, LedgerMetadata, State
from quorumlog.protocol.row_copy import public

_FIRST_INCARNATION: Final = 1


class Action(StrEnum):
    """A rebuild's treatment of one ledger's or log's metadata."""

    SAME = "same"
    """The database's metadata contains everything that the copies prove."""
    WRITE = "write"
    TOMBSTONE = "tombstone"
    CONFLICT = "conflict"
    """The copies and the database contradict each other, so an operator must decide."""
    WAIT = "wait"
    """A silent bookie may hold a proof that the decision needs."""


@dataclass(frozen=True, slots=True)
class Held:
    """One bookie's data about one ledger."""

    member: str
    """The bookie that answered, in its present incarnation."""
    ledger_key: bytes = b""
    """The ledger's key; empty if the bookie has no key."""
    is_deleted: bool = False
    rows: tuple[LedgerMetadata, ...] = ()
    """The bookie's copies of the ledger's metadata, one for each version."""
    is_limbo: bool = False
    """Whether a copy names an older incarnation of the bookie, whose entries may be lost."""


@dataclass(frozen=True, slots=True)
class Known:
    """The database's data about one ledger."""

    row: LedgerMetadata | None = None
    is_deleted: bool = False
    attempts: frozenset[str] = frozenset()
    """The tokens of the copies' changes that the database contains."""


@dataclass(frozen=True, slots=True)
class Registered:
    """The directory that is registered under a bookie's name in the database."""

    incarnation: int
    born_at: str = ""
    """The directory's registration time, as `created_at`; "" if only the bookie reported it."""


@dataclass(frozen=True, slots=True)
class Bookies:
    """The bookies that answer, by name with their current incarnation, and the names of silent
    bookies. `registered`: the directories in the database's cookies, by name.
    """

    answering: Mapping[str, int]
    silent: frozenset[str] = frozenset()
    registered: Mapping[str, Registered] = field(default_factory=dict)
    holding: frozenset[str] = frozenset()
    """Names of bookies that hold anything of the ledger in question."""
    copying: frozenset[str] = frozenset()
    """Names of bookies that hold a copy of the ledger's metadata."""
    given_up: frozenset[str] = frozenset()
    """Names of bookies whose earlier data an operator declared lost for ever."""

    def lost_of(self, row: LedgerMetadata) -> frozenset[str]:
        """The bookies that may have a later version, but are silent or may have lost their data."""
        # A bookie that answers as an *older* incarnation has another directory too (rule 15b).
        replaced = {
            name
            for name, incarnation in map(_parts, row.all_members)
            if self.answering.get(name, incarnation) != incarnation
        }
        # A bookie that is not a member may have lost an end with its directory (rule 18b).
        named = set(map(member_name, row.all_members))
        emptied = {
            name
            for name, found in self.registered.items()
            if name in self.answering.keys() - named
            and found.incarnation > _FIRST_INCARNATION
            and "" != found.born_at >= row.created_at
        }
        return (self.silent | replaced | emptied) - self.given_up

    def without_data_of(self, row: LedgerMetadata) -> str:
        """The reason to doubt that each member's registered directory held the ledger; "" if there
        is none (rule 15b). A recovery of the ledger would rely on denials by that directory.
        """
        for name, incarnation in map(_parts, row.all_members):
            found, answers = self.registered.get(name), self.answering.get(name)
            if found is None or found.incarnation > incarnation:
                continue
            # The member's own cookie counts, because the database's cookie may be outdated during a
            # rebuild.
            is_older = found.incarnation < incarnation and answers != incarnation
            is_later = found.incarnation == incarnation and "" != found.born_at >= row.created_at
            # A new directory may hold a fence, or entries from an earlier recovery. Only a copy
            # shows that the member acknowledged entries of the writer (rule 18b).
            proven = self.holding if row.state is State.CLOSED else self.copying
            is_unproven = is_later and name not in proven
            if is_older or (is_unproven and answers is not None):
                return (
                    f"the ledger names {name}@{incarnation}, but {name} has registered as {name}@{found.incarnation}"
                    f" with a new directory: stop {name}, move its DATA_DIR away, start it with"
                    " AUTO_FIX_COOKIES=1 to register it as a later incarnation, and rebuild again"
                )
            # Denials can't shorten a CLOSED ledger, so a rebuild writes it at once (rule 18d).
            if is_unproven and name in self.silent and row.state is not State.CLOSED:
                return (
                    f"the ledger names {name}@{incarnation}, which registered after the ledger's creation and does"
                    f" not answer: start {name}, so that it reports its data, and rebuild again"
                )
        return ""

    def may_hide_later(self, row: LedgerMetadata) -> bool:
        """Whether every bookie that has a later version may be silent or have lost its data."""
        return len(self.lost_of(row)) >= row.quorum.ack_quorum


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about a ledger, with the metadata to write, and the reason for an operator."""

    action: Action
    row: LedgerMetadata | None = None
    why: str = ""


def decide(known: Known, held: Sequence[Held], bookies: Bookies) -> Decision:
    """Decide how a rebuild treats a ledger. At least one bookie stores something of the ledger."""
    held = [replace(one, rows=_of_ledger(one)) for one in held]
    rows = _distinct(row for bookie in held for row in bookie.rows)
    if _is_deletion_proven(held):
        # Bookies keep the ledger while they have a copy that the database lacks (rule 18c).
        lacking = any(row.attempt and row.attempt not in known.attempts for row in rows)
        return Decision(Action.SAME if known.is_deleted and not lacking else Action.TOMBSTONE)
    if known.is_deleted:
        return Decision(Action.SAME)
    keys = {bookie.ledger_key for bookie in held if bookie.ledger_key}
    in_limbo = {member_name(bookie.member) for bookie in held if bookie.is_limbo}
    bookies = replace(
        bookies,
        silent=bookies.silent | (in_limbo & bookies.answering.keys()),
        holding=frozenset(member_name(bookie.member) for bookie in held),
        copying=frozenset(member_name(bookie.member) for bookie in held if bookie.rows),
    )
    if problem := _contradiction(known.row, rows, keys):
        return Decision(Action.CONFLICT, why=problem)
    if known.row is None:
        if problem := _fork_among(rows):
            return Decision(Action.CONFLICT, why=problem)
        return _newest_or_wait(rows[-1], keys, bookies) if rows else _without_copies()
    unknown = [row for row in rows if not _contains(known, row)]
    if not unknown:
        placed = _placed(known.row, rows)
        if placed != known.row:
            return _newest_or_wait(placed, keys | {placed.ledger_key}, bookies)
        why = _unproven(known.row, bookies)
        return Decision(Action.WAIT if why else Action.SAME, why=why)
    keeping = {one.member for one in held if not all(_contains(known, row) for row in one.rows)}
    if problem := _fork(known.row, rows, unknown, keeping):
        return Decision(Action.CONFLICT, why=problem)
    newest = rows[-1]
    newest = _with_known_keys(newest, known.row)
    return _newest_or_wait(newest, keys | {known.row.ledger_key}, bookies)


def _with_known_keys(newest: LedgerMetadata, known: LedgerMetadata) -> LedgerMetadata:
    """Add the database's keys to a copy's metadata, except an access key of another password."""
    is_same = sealed_of(known.access_key) == sealed_of(newest.access_key)
    access_key = known.access_key if is_same or not newest.access_key else newest.access_key
    return replace(newest, mac_key=known.mac_key, access_key=access_key)


def _parts(member: str) -> tuple[str, int]:
    return member_name(member), member_incarnation(member)


def _is_deletion_proven(held: Iterable[Held]) -> bool:
    return any(one.is_deleted or any(row.deletion for row in one.rows) for one in held)


def stand_ins(named: Mapping[str, int], present: Mapping[str, int]) -> dict[str, int]:
    """The stand-in cookies to write before any metadata, by name. A bookie gets a stand-in if
    copies name a later incarnation of the bookie than any incarnation that answers or is
    registered. An empty directory of that name then counts as a suspected loss, and becomes the
    next incarnation (rule 15b).
    """
    return {name: one for name, one in named.items() if one > present.get(name, 0)}


def newest_of(held: Iterable[Held]) -> LedgerMetadata | None:
    """The latest version among the copies, even if it is unproven; None without copies."""
    rows = _distinct(row for bookie in held for row in _of_ledger(bookie))
    return rows[-1] if rows else None


def _of_ledger(held: Held) -> tuple[LedgerMetadata, ...]:
    """A bookie's copies of the metadata, except those that report a deletion of the log alone."""
    return tuple(row for row in held.rows if row.deletion is not Deletion.OF_LOG)


def _distinct(rows: Iterable[LedgerMetadata]) -> list[LedgerMetadata]:
    """The distinct versions, sorted by number, then by token."""
    by_name = {(row.version, row.attempt): row for row in rows}
    return [by_name[name] for name in sorted(by_name)]


def _contradiction(
    known: LedgerMetadata | None, rows: Sequence[LedgerMetadata], keys: Collection[bytes]
) -> str:
    """The error if the copies and the database can't contain versions of one ledger from one
    history; else "".
    """
    if len({*keys, *(() if known is None else (known.ledger_key,))}) > 1:
        return "two ledgers have this id: their keys differ"
    everything = (*rows, *(() if known is None else (known,)))
    if len({_identity(row) for row in everything}) > 1:
        return "two ledgers have this id: their quorums, writers, logs or metadata differ"
    ends = {(row.last_entry, row.length) for row in everything if row.state is State.CLOSED}
    if len(ends) > 1:
        found = ", ".join(str(last) for last, _ in sorted(ends, key=str))
        return f"the copies and the database have different last entries: {found}"
    if any(a.version == b.version for a, b in pairwise(rows)):
        return "two copies of one version differ: the database was restored before, and both histories continued"
    if any(a.state is State.CLOSED and b.state is not State.CLOSED for a, b in pairwise(rows)):
        return "a copy of a later version is not CLOSED, although an earlier version is"
    return ""


def _identity(row: LedgerMetadata) -> tuple[object, ...]:
    """The fields that never change after a ledger's creation."""
    return (row.quorum, row.digest, row.writer, row.log, row.custom, row.extra)


WITHOUT_COPIES = "the bookies that answer hold only entries or a fence, but no copy of the metadata"


def _without_copies() -> Decision:
    return Decision(Action.WAIT, why=WITHOUT_COPIES)


def _placed(known: LedgerMetadata, rows: Sequence[LedgerMetadata]) -> LedgerMetadata:
    """Add the ledger's place in its log, from the copies, to the database's metadata. A missing
    place shows that the log's change that placed the ledger is lost (rule 18f).
    """
    if known.first_offset is not None:
        return known
    places = [(row.first_offset, row.lineage) for row in rows if row.first_offset is not None]
    if not places:
        return known
    first_offset, lineage = places[-1]
    return replace(known, first_offset=first_offset, lineage=lineage)


def _contains(known: Known, row: LedgerMetadata) -> bool:
    """Whether the database contains a version. Without a token, the version number decides."""
    if row.attempt:
        return row.attempt in known.attempts
    return known.row is not None and known.row.version >= row.version


def _fork(
    known: LedgerMetadata,
    rows: Sequence[LedgerMetadata],
    unknown: Sequence[LedgerMetadata],
    keeping: Collection[str],
) -> str:
    """The reason to doubt that the newest copy descends from the database's metadata and from all
    copies that the database lacks; "" if there is none. `keeping`: the members with such a copy.
    """
    if unknown[0].version <= known.version:
        return (
            f"the database has version {known.version} of the metadata, but bookies hold a version"
            f" {unknown[0].version} that the database lacks"
        )
    history = _history(rows)
    is_one = all(history.get(row.version) == row.attempt for row in (known, *unknown))
    # An end is final in each history, because no append and no recovery changes it. But a writer of
    # the database's own history may have confirmed entries in a fragment that the copies lack.
    is_other = history.get(known.version, known.attempt) != known.attempt
    is_end = (
        known.state is not State.CLOSED
        and rows[-1].state is State.CLOSED
        and (not is_other or known.last_fragment in rows[-1].fragments)
    )
    if not known.attempt or is_one or is_end or _is_moved(known, rows[-1], keeping):
        return ""
    return (
        f"the copies do not show that version {rows[-1].version} descends from the database's version"
        f" {known.version}, and from all versions that the database lacks"
    )


def _fork_among(rows: Sequence[LedgerMetadata]) -> str:
    """The error if a copy is of another history than the newest copy, whose end is not final, and
    the database has no metadata of the ledger; else "".
    """
    if not rows or rows[-1].state is State.CLOSED:
        return ""
    history = _history(rows)
    if all(history.get(row.version, row.attempt) == row.attempt for row in rows):
        return ""
    return f"some copies are of another history than the copy of version {rows[-1].version}"


def _history(rows: Sequence[LedgerMetadata]) -> dict[int, str]:
    """The tokens, by version, of the newest copy and of the versions that it descends from, without
    gaps. Older tokens are unknown if no copy lists them.
    """
    tokens = {rows[-1].version: rows[-1].attempt}
    for row in reversed(rows):
        if tokens.get(row.version) == row.attempt:
            earlier = range(row.version - len(row.ancestors), row.version)
            tokens.update(zip(earlier, row.ancestors, strict=True))
    return tokens


def _is_moved(known: LedgerMetadata, newest: LedgerMetadata, keeping: Collection[str]) -> bool:
    """Whether two CLOSED versions differ only in members and place, and the newest version's
    members must still have the entries.

    Copies of versions in between may be missing, because a repair does not send copies of all
    versions (rule 20b). `newest` may be of another history. A bookie drops entries only if the
    database does not name the bookie and contains the versions of all its copies (rule 18c). So the
    database must name each member, or the member must be in `keeping`.
    """
    placed = replace(known, first_offset=newest.first_offset, lineage=newest.lineage)
    members = {member for fragment in newest.fragments for member in fragment.bookies}
    return (
        known.state is State.CLOSED
        and known.first_offset in {None, newest.first_offset}
        and _but_members(placed) == _but_members(newest)
        and members <= {*known.all_members, *keeping}
    )


def shown(names: Sequence[object]) -> str:
    """The first ten names as text for the operator, and the number of further names."""
    first = ", ".join(map(str, names[:10]))
    return first if len(names) <= 10 else f"{first} and {len(names) - 10} more"


def _but_members(row: LedgerMetadata) -> LedgerMetadata:
    """The metadata without fields that repairs change, and without fields that copies lack."""
    fragments = tuple(replace(fragment, bookies=()) for fragment in row.fragments)
    return replace(
        public(row), fragments=fragments, repairs=(), version=0, attempt="", ancestors=()
    )


def _newest_or_wait(newest: LedgerMetadata, keys: Collection[bytes], bookies: Bookies) -> Decision:
    if not keys:
        return Decision(Action.WAIT, why="no bookie that answers has the ledger's key")
    row = replace(newest, ledger_key=next(iter(keys)))
    if why := bookies.without_data_of(row) or _unproven(row, bookies):
        return Decision(Action.WAIT, why=why)
    return Decision(Action.WRITE, row)


def _unproven(row: LedgerMetadata, bookies: Bookies) -> str:
    """The reason why a version above the latest known version may exist; "" if there is none."""
    if row.state is State.CLOSED or not bookies.may_hide_later(row):
        return ""
    lost = sorted(bookies.lost_of(row))
    return (
        f"the ledger is {row.state}, and {len(lost)} bookies that may hold a later version do not answer or lost their data"
        f" ({shown(lost)}; at most {row.quorum.ack_quorum - 1} are allowed): start them, or, if their data is gone, name"
        " them as gone (`quorumlog metadata rebuild --without`)"
    )
