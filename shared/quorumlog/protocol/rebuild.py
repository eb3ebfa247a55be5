"""Which rows of a lost database are proven by what bookies hold (rule 18d). Pure decisions, no IO.

A bookie holds copies of rows (rule 18b), the ids of deleted ledgers (rule 16a), and nothing else that proves a row.
Each copy is of a committed row, so no copy is wrong; the question is whether a *later* row was committed that nobody
who answered holds.

- A CLOSED row is final but for its members, whoever else answers: one end (I4), and no later row has another.
- An OPEN row, a copy's or the database's own, is the latest one if fewer than Qa bookies are silent. An entry that was confirmed under a later
  row is on Qa of that row's members, each with a copy of that row or a later one, and one of these members answers.
- A deleted id rests on a tombstone, and ids are used once (rule 17). So does the copy that says so.

What is not proven is told, never written by guess.
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
    """What a rebuild does about one row."""

    SAME = "same"
    """The database's row has all that the copies tell."""
    WRITE = "write"
    TOMBSTONE = "tombstone"
    CONFLICT = "conflict"
    """The copies and the row contradict each other: an operator decides."""
    WAIT = "wait"
    """A bookie that is silent may hold the proof."""


@dataclass(frozen=True, slots=True)
class Held:
    """What one bookie holds of one ledger."""

    member: str
    """The bookie that answered, in its present incarnation."""
    ledger_key: bytes = b""
    """Empty where the bookie knows none."""
    is_deleted: bool = False
    rows: tuple[LedgerMetadata, ...] = ()
    """The rows that its copies are of."""
    is_limbo: bool = False
    """An older incarnation was a member by some row, and what it held may be lost."""


@dataclass(frozen=True, slots=True)
class Known:
    """What the database contains of one ledger."""

    row: LedgerMetadata | None = None
    is_deleted: bool = False
    attempts: frozenset[str] = frozenset()
    """The tokens of the copies' changes that the database contains."""


@dataclass(frozen=True, slots=True)
class Registered:
    """The directory that a bookie's name stands for in the database."""

    incarnation: int
    born_at: str = ""
    """When a new directory registered, in the form of a row's `created_at`; empty: its bookie told the rebuild of it."""


@dataclass(frozen=True, slots=True)
class Bookies:
    """Who answers, by name with the present incarnation; and the names of those who do not. `registered`: what the
    database's cookies say.
    """

    answering: Mapping[str, int]
    silent: frozenset[str] = frozenset()
    registered: Mapping[str, Registered] = field(default_factory=dict)
    holding: frozenset[str] = frozenset()
    """Who holds anything of the ledger that is judged."""
    copying: frozenset[str] = frozenset()
    """Who holds a copy of its metadata."""
    given_up: frozenset[str] = frozenset()
    """Names of which an operator says that what they held is gone for ever; one of them may answer with a new directory."""

    def lost_of(self, row: LedgerMetadata) -> frozenset[str]:
        """The bookies that may have held a later row and lost it, or do not answer."""
        # One that answers as an *older* incarnation than the row names is a new directory too (rule 15b).
        replaced = {
            name
            for name, incarnation in map(_parts, row.all_members)
            if self.answering.get(name, incarnation) != incarnation
        }
        # A bookie that is no member may have kept an end (rule 18b). Its directory is not its first one, and came later.
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
        """Why the registered directory of a member may never have been that member, or "" (rule 15b). A recovery of
        the ledger would believe the denials of this directory.
        """
        for name, incarnation in map(_parts, row.all_members):
            found, answers = self.registered.get(name), self.answering.get(name)
            if found is None or found.incarnation > incarnation:
                continue
            # A member that answers has its own cookie, which the rebuild writes last; the database's may be older.
            is_older = found.incarnation < incarnation and answers != incarnation
            is_later = found.incarnation == incarnation and "" != found.born_at >= row.created_at
            # A new directory may have a fence or entries of a recovery that began earlier. Who acknowledged an entry of a
            # writer has a copy (rule 18b).
            proven = self.holding if row.state is State.CLOSED else self.copying
            is_unproven = is_later and name not in proven
            if is_older or (is_unproven and answers is not None):
                return (
                    f"the row names {name}@{incarnation}, and {name} registered as {name}@{found.incarnation}"
                    " with a new directory since: stop it, move its DATA_DIR away, start it with"
                    " AUTO_FIX_COOKIES=1, so that it registers as a later incarnation, and rebuild again"
                )
            # A denial cannot shorten a CLOSED ledger, so its row waits for no bookie (rule 18d).
            if is_unproven and name in self.silent and row.state is not State.CLOSED:
                return (
                    f"the row names {name}@{incarnation}, which registered after the ledger was created, and is silent:"
                    " start it, so that it tells whether it holds the ledger, and rebuild again"
                )
        return ""

    def may_hide_later(self, row: LedgerMetadata) -> bool:
        """Whether all who know of a later row, or of the ledger's deletion, may be among those."""
        return len(self.lost_of(row)) >= row.quorum.ack_quorum


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do about a ledger's row. `row` is what is written; `why` is for people."""

    action: Action
    row: LedgerMetadata | None = None
    why: str = ""


def decide(known: Known, held: Sequence[Held], bookies: Bookies) -> Decision:
    """Judge one ledger that some bookies hold."""
    held = [replace(one, rows=_of_ledger(one)) for one in held]
    rows = _distinct(row for bookie in held for row in bookie.rows)
    if _is_deletion_proven(held):
        # A bookie that holds the copy of a change which the database lacks would keep the ledger for ever (rule 18c).
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
    """A copy's row with the keys of the database's row: but for an access key of an older password."""
    is_same = sealed_of(known.access_key) == sealed_of(newest.access_key)
    access_key = known.access_key if is_same or not newest.access_key else newest.access_key
    return replace(newest, mac_key=known.mac_key, access_key=access_key)


def _parts(member: str) -> tuple[str, int]:
    return member_name(member), member_incarnation(member)


def _is_deletion_proven(held: Iterable[Held]) -> bool:
    return any(one.is_deleted or any(row.deletion for row in one.rows) for one in held)


def stand_ins(named: Mapping[str, int], present: Mapping[str, int]) -> dict[str, int]:
    """The cookies to be written before the first row, by name with the incarnation: of bookies that copies name as later
    ones than anybody answers or is registered as. With such a cookie an empty directory of the name is a suspected loss
    and becomes the next incarnation (rule 15b).
    """
    return {name: one for name, one in named.items() if one > present.get(name, 0)}


def newest_of(held: Iterable[Held]) -> LedgerMetadata | None:
    """The latest row that copies tell of, whether it is proven or not."""
    rows = _distinct(row for bookie in held for row in _of_ledger(bookie))
    return rows[-1] if rows else None


def _of_ledger(held: Held) -> tuple[LedgerMetadata, ...]:
    """The rows that a bookie's copies are of, without those copies that tell of the deletion of the ledger's log alone."""
    return tuple(row for row in held.rows if row.deletion is not Deletion.OF_LOG)


def _distinct(rows: Iterable[LedgerMetadata]) -> list[LedgerMetadata]:
    """Each row once, ascending by version."""
    by_name = {(row.version, row.attempt): row for row in rows}
    return [by_name[name] for name in sorted(by_name)]


def _contradiction(
    known: LedgerMetadata | None, rows: Sequence[LedgerMetadata], keys: Collection[bytes]
) -> str:
    """Why these cannot be rows of one ledger and of one line of history, or ""."""
    if len({*keys, *(() if known is None else (known.ledger_key,))}) > 1:
        return "two ledgers have this id: their keys differ"
    everything = (*rows, *(() if known is None else (known,)))
    if len({_identity(row) for row in everything}) > 1:
        return "two ledgers have this id: their quorums, writers, logs or metadata differ"
    ends = {(row.last_entry, row.length) for row in everything if row.state is State.CLOSED}
    if len(ends) > 1:
        found = ", ".join(str(last) for last, _ in sorted(ends, key=str))
        return f"rows of several ends: {found}"
    if any(a.version == b.version for a, b in pairwise(rows)):
        return "two copies of one version: the database went back before, and both lines went on"
    if any(a.state is State.CLOSED and b.state is not State.CLOSED for a, b in pairwise(rows)):
        return "a copy of a later version than a CLOSED one is open"
    return ""


def _identity(row: LedgerMetadata) -> tuple[object, ...]:
    """What a ledger was created with and keeps."""
    return (row.quorum, row.digest, row.writer, row.log, row.custom, row.extra)


WITHOUT_COPIES = "no bookie that answers holds a copy of the row, only entries or a fence"


def _without_copies() -> Decision:
    return Decision(Action.WAIT, why=WITHOUT_COPIES)


def _placed(known: LedgerMetadata, rows: Sequence[LedgerMetadata]) -> LedgerMetadata:
    """The database's row with the place that copies tell. An open ledger's place is no version of its own: where the
    database has the row without it, the change of the log is lost that placed the ledger (rule 18f).
    """
    if known.first_offset is not None:
        return known
    places = [(row.first_offset, row.lineage) for row in rows if row.first_offset is not None]
    if not places:
        return known
    first_offset, lineage = places[-1]
    return replace(known, first_offset=first_offset, lineage=lineage)


def _contains(known: Known, row: LedgerMetadata) -> bool:
    """Whether the database has the change that made a row; one without a token is from before tokens were kept."""
    if row.attempt:
        return row.attempt in known.attempts
    return known.row is not None and known.row.version >= row.version


def _fork(
    known: LedgerMetadata,
    rows: Sequence[LedgerMetadata],
    unknown: Sequence[LedgerMetadata],
    keeping: Collection[str],
) -> str:
    """Why the copies do not descend from the database's row, or "". `keeping`: who holds a copy that the database lacks."""
    if unknown[0].version <= known.version:
        return (
            f"the database's row has version {known.version}, and bookies hold a version"
            f" {unknown[0].version} that the database lacks"
        )
    is_base = not known.attempt or any(row.attempt == known.attempt for row in rows)
    # An end is final whatever line the open row is of: no writer appends after it, and no recovery finds another.
    is_end = known.state is not State.CLOSED and rows[-1].state is State.CLOSED
    if is_base or is_end or _is_moved(known, rows[-1], keeping):
        return ""
    return (
        f"nothing tells that version {rows[-1].version} came of the database's version"
        f" {known.version}"
    )


def _is_moved(known: LedgerMetadata, newest: LedgerMetadata, keeping: Collection[str]) -> bool:
    """Whether two CLOSED rows say the same but for members and a later place, and all members of the later one have the
    entries still. No copy need tell of the steps between: nobody sends the rows that mark a repair and let a member
    go (rule 20b). `newest` may be of another line: a member drops its entries on account of the database's row only if
    that one does not name it, and if the database contains all copies that it holds (rule 18c).
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
    """The first ten of these, for people."""
    first = ", ".join(map(str, names[:10]))
    return first if len(names) <= 10 else f"{first} and {len(names) - 10} more"


def _but_members(row: LedgerMetadata) -> LedgerMetadata:
    """The row without what a repair changes, and without what no copy tells."""
    fragments = tuple(replace(fragment, bookies=()) for fragment in row.fragments)
    return replace(public(row), fragments=fragments, repairs=(), version=0, attempt="")


def _newest_or_wait(newest: LedgerMetadata, keys: Collection[bytes], bookies: Bookies) -> Decision:
    if not keys:
        return Decision(Action.WAIT, why="no bookie that answers knows the ledger's key")
    row = replace(newest, ledger_key=next(iter(keys)))
    if why := bookies.without_data_of(row) or _unproven(row, bookies):
        return Decision(Action.WAIT, why=why)
    return Decision(Action.WRITE, row)


def _unproven(row: LedgerMetadata, bookies: Bookies) -> str:
    """Why there may be a later row than the latest that anybody tells of, or ""."""
    if row.state is State.CLOSED or not bookies.may_hide_later(row):
        return ""
    lost = sorted(bookies.lost_of(row))
    return (
        f"the ledger is {row.state}, and {len(lost)} bookies that may hold a later row do not answer or lost their data"
        f" ({shown(lost)}); fewer than {row.quorum.ack_quorum} may: start them, or, if what they held is gone, name them as"
        " gone (`quorumlog metadata rebuild --without`)"
    )
