"""Checks that a change of metadata is legal, so that a client's bug can't break a ledger or a log.

The metadata service runs these checks in the transaction of the change; the tests' models run them
too. The checks compare two versions of metadata. Parsing checks each single version
(`LedgerMetadata.check`, `LogMetadata.check`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, takewhile
from typing import Final

from quorumlog.errors import IncarnationUsed, InvalidRequest, LogProtected, StaleMember
from quorumlog.protocol.access_key import is_same, is_sealed
from quorumlog.protocol.ids import (
    ASSIGNED_ID_END,
    KEY_BYTES,
    member_incarnation,
    member_name,
)
from quorumlog.protocol.log import LogItem, LogMetadata, LogState
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.protocol.transaction import Sealed

_NEXT: Final = {
    State.OPEN: {State.OPEN, State.IN_RECOVERY, State.CLOSED},
    State.IN_RECOVERY: {State.IN_RECOVERY, State.CLOSED},
    State.CLOSED: {State.CLOSED},
}

_FIXED: Final = (
    "quorum", "digest", "writer", "ledger_key", "mac_key", "access_key", "wrapped_mac_key", "custom",
    "log", "extra",
)  # fmt: skip
"""Fields that never change after a ledger's creation."""

_KEYS: Final = {"access_key", "mac_key"}
"""Fields derived from the ledger's password."""

_OF_PASSWORD: Final = {"access_key", "wrapped_mac_key"}
"""Fields that change with the ledger's password."""

_Problems = list[tuple[str, str]]
"""The JSON pointer and detail of each problem."""


Row = LedgerMetadata | LogMetadata


def is_made_from(old: Row, new: Row) -> bool:
    """Whether a client made the changed metadata `new` from `old`. Equal version numbers alone
    don't prove this, because metadata of another history may have the same number (rule 18a).
    """
    return is_row(old, version=new.version, attempt=new.attempt)


def is_row(row: Row, *, version: int, attempt: str) -> bool:
    """Whether `row` has this version and attempt token. An empty token matches every token."""
    return row.version == version and ("" in (row.attempt, attempt) or row.attempt == attempt)


# --- ledgers --------------------------------------------------------------------------------------


def check_new_ledger(row: LedgerMetadata) -> None:
    """Raise InvalidRequest unless `row` may be created. A negative id requests an assigned id."""
    problems: _Problems = []
    if 0 <= row.ledger_id < ASSIGNED_ID_END:
        detail = f"must be {ASSIGNED_ID_END} or higher, or be left out to have an id assigned"
        problems.append(("/row/ledger_id", detail))
    if len(row.ledger_key) != KEY_BYTES:
        detail = f"a ledger key must have {KEY_BYTES} bytes (got {len(row.ledger_key)})"
        problems.append(("/row/ledger_key", detail))
    if row.state is not State.OPEN:
        problems.append(("/row/state", "a new ledger must be OPEN"))
    if len(row.fragments) != 1:
        problems.append(("/row/fragments", "a new ledger must have one fragment"))
    if row.may_lack_entries or row.declared_lost or row.lost_entries:
        problems.append(("/row/declared_lost", "a new ledger can't have lost entries or members"))
    _raise(problems)


def check_ledger(old: LedgerMetadata, new: LedgerMetadata) -> None:
    """Raise InvalidRequest unless one change may turn `old` into `new`."""
    problems = [
        (f"/row/{name}", "can't be changed after the ledger's creation")
        for name in _FIXED
        if getattr(old, name) != getattr(new, name)
        and not (name in _KEYS and _learns_keys(old, new))
        and not (name in _OF_PASSWORD and _changes_password(old, new))
    ]
    if new.state not in _NEXT[old.state]:
        problems.append(("/row/state", f"can't change from {old.state} to {new.state} (I21)"))
    if not set(old.declared_lost) <= set(new.declared_lost):
        problems.append(("/row/declared_lost", "a member that was declared lost can't be removed"))
    if old.may_lack_entries and not new.may_lack_entries:
        problems.append(("/row/may_lack_entries", "can't be changed from true to false"))
    problems += _given_up(old, new)
    if old.state is State.CLOSED:
        problems += [
            (f"/row/{name}", "can't be changed once the ledger is CLOSED (I4)")
            for name in ("last_entry", "length")
            if getattr(old, name) != getattr(new, name)
        ]
    problems += _fragments(old, new) or _kept(old, new)
    _raise(problems, ledger_id=old.ledger_id)


def _learns_keys(old: LedgerMetadata, new: LedgerMetadata) -> bool:
    """Whether the change only restores keys of rebuilt metadata from the password (rule 18d)."""
    is_unknown = is_sealed(old.access_key) and old.mac_key in (b"", new.mac_key)
    return is_unknown and not is_sealed(new.access_key) and is_same(new.access_key, old.access_key)


def _changes_password(old: LedgerMetadata, new: LedgerMetadata) -> bool:
    """Whether only the password changes (rule 30). The MAC key must stay, and be wrapped with a
    key derived from the new password.
    """
    are_known = all(row.access_key and not is_sealed(row.access_key) for row in (old, new))
    is_wrapped = bool(new.wrapped_mac_key) == bool(old.mac_key)
    same = replace(
        new,
        access_key=old.access_key,
        wrapped_mac_key=old.wrapped_mac_key,
        ancestors=old.ancestors,
    )
    return are_known and is_wrapped and same == old


def _given_up(old: LedgerMetadata, new: LedgerMetadata) -> _Problems:
    """Check that lost entries stay lost, because readers got a final error (rule 31). Only a CLOSED
    ledger may have lost entries, because its end decides which entries exist.
    """
    pointer = "/row/lost_entries"
    if old.state is not State.CLOSED and new.lost_entries:
        return [(pointer, "can't be set before the ledger is CLOSED")]
    for first, last in old.lost_entries:
        if not any(low <= first and last <= high for low, high in new.lost_entries):
            return [(pointer, "an entry that was accepted as lost can't be removed")]
    return []


def _fragments(old: LedgerMetadata, new: LedgerMetadata) -> _Problems:
    """Check that a change keeps the borders of fragments, and changes only members (I22, I24).

    When a fragment is added, it begins after the last acknowledged entry. So a border never moves,
    and the ledger can't end below a border.
    """
    pointer = "/row/fragments"
    before = [fragment.first_entry for fragment in old.fragments]
    after = [fragment.first_entry for fragment in new.fragments]
    if after[: len(before)] != before:
        return [(pointer, f"the fragments at {before} must stay; only add fragments (I22)")]
    if old.state is State.CLOSED and after != before:
        return [(pointer, "can't be added to once the ledger is CLOSED (I4)")]
    if new.state is State.IN_RECOVERY and old.fragments[-1] != new.fragments[-1]:
        return [(pointer, "a recovery must change the ensemble together with CLOSED (I24)")]
    return []


def _kept(old: LedgerMetadata, new: LedgerMetadata) -> _Problems:
    """Check that a member that was replaced in a closed fragment stays in repairs (rule 20b)."""
    before, after = _named(old), _named(new)
    return [
        (
            f"/row/fragments/{index}",
            "a replaced member must be kept in repairs by the same change (rule 20b)",
        )
        for index, fragment in enumerate(old.fragments)
        if old.is_closed_fragment(index)
        and new.fragments[index] != fragment
        and not before[index] <= after[index]
    ]


def _named(row: LedgerMetadata) -> list[set[str]]:
    """For each fragment, its members and the former members that repairs still keep."""
    kept = row.placed_repairs
    return [
        {*f.bookies, *(r.leaving for r in kept if r.first_entry == f.first_entry)}
        for f in row.fragments
    ]


# --- members --------------------------------------------------------------------------------------


def added_members(old: LedgerMetadata | None, new: LedgerMetadata) -> set[str]:
    """The members that a change adds to a fragment or a repair, including members that other
    fragments already contain. Added members must be registered incarnations (rule 15b). `old` is
    None for a new ledger.
    """
    if old is None:
        return set(new.all_members)
    before = {fragment.first_entry: fragment.bookies for fragment in old.fragments}
    last = old.last_fragment.bookies
    added = {
        member
        for fragment in new.fragments
        for member in fragment.bookies
        if member not in before.get(fragment.first_entry, last)
    }
    return added | {repair.target for repair in new.repairs if repair not in old.repairs}


def check_members(
    added: Sequence[str], registered: Mapping[str, int], *, ledger_id: int | None = None
) -> None:
    """Raise StaleMember unless each member is its bookie's registered incarnation (rule 15b)."""
    stale = [one for one in added if registered.get(member_name(one)) != member_incarnation(one)]
    if not stale:
        return
    present = {member_name(one): registered.get(member_name(one)) for one in stale}
    known = ", ".join(
        f"{name}@{one}" if one is not None else f"no {name}"
        for name, one in sorted(present.items())
    )
    raise StaleMember(
        f"unregistered members {', '.join(sorted(stale))}; registered: {known}."
        " Choose registered bookies",
        ledger_id=ledger_id,
        present=present,
        is_final=all(member_incarnation(one) < (present[member_name(one)] or 0) for one in stale),
    )


def check_new_incarnation(name: str, incarnation: int, named: int) -> None:
    """Raise IncarnationUsed unless a new directory's incarnation is above `named`, the highest
    incarnation of the bookie that ledgers and repairs name (rule 15b).
    """
    if incarnation <= named:
        raise IncarnationUsed(
            f"{name}@{named} is in use by another directory: register this directory as"
            f" {name}@{named + 1} or higher",
            bookie=name,
            named=named,
        )


# --- logs -----------------------------------------------------------------------------------------


def check_log(old: LogMetadata, new: LogMetadata) -> dict[int, tuple[LogItem, ...]]:
    """Raise InvalidRequest unless one change may turn the log `old` into `new`. Returns the result
    of `rewritten_by`.
    """
    problems: _Problems = []
    if new.settings != old.settings.with_limits(new.settings.limits):
        problems.append(("/row/settings", "can't be changed, except for the limits"))
    if old.state is LogState.CLOSED and new.state is not LogState.CLOSED:
        problems.append(("/row/state", "can't be changed once the log is CLOSED"))
    for field in ("first_offset", "forgotten_end", "writer_token"):
        if getattr(new, field) < getattr(old, field):
            problems.append((f"/row/{field}", "must not decrease"))
    if (new.stream_seq or "").encode() < (old.stream_seq or "").encode():
        problems.append(("/row/stream_seq", "must not decrease"))
    if (old.expiry and old.expiry.idle_s) != (new.expiry and new.expiry.idle_s):
        problems.append(("/row/expiry", "idle_s can't be changed"))
    if new.forked_at != old.forked_at:
        problems.append(("/row/forked_at", "can't be changed"))
    was, now = old.archived_through, new.archived_through
    if was is not None and (now is None or now < was):
        problems.append(("/row/archived_through", "must not decrease"))
    kept = {item.ledger_id: item for item in old.items}
    for index, item in enumerate(new.items):
        before = kept.get(item.ledger_id)
        if before is None:
            if new.is_shared(item):
                problems.append(
                    (
                        f"/row/items/{index}",
                        "a shared ledger can't be added after the log's creation (rule 27a)",
                    )
                )
            continue
        if new.is_shared(item) and item.index not in (None, before.index):
            detail = "only the log that wrote the ledger may change its index (rule 27e)"
            problems.append((f"/row/items/{index}/index", detail))
        for field in ("first_offset", "last_offset"):
            known = getattr(before, field)
            if known is not None and getattr(item, field) != known:
                problems.append((f"/row/items/{index}/{field}", "can't be changed once it is set"))
    _raise(problems, log=old.name)
    return rewritten_by(old, new)


def rewritten_by(old: LogMetadata, new: LogMetadata) -> dict[int, tuple[LogItem, ...]]:
    """The items of `old` that each new ledger of `new` replaces (rule 27c). Raises InvalidRequest
    unless the replaced items are adjacent sealed ledgers with the new ledger's offsets, and no
    takeover replays them.
    """
    known_end, found = old.known_end, dict[int, tuple[LogItem, ...]]()
    before = {item.ledger_id for item in old.items}
    after = {item.ledger_id for item in new.items}
    starts: dict[int | None, int] = {}
    for at, item in enumerate(old.items):
        starts.setdefault(item.first_offset, at)  # an empty ledger follows
    for index, item in enumerate(new.items):
        first, last = item.first_offset, item.last_offset
        if first is None or first >= known_end or item.ledger_id in before:
            continue
        begin = starts.get(first, len(old.items))
        within = tuple(takewhile(partial(_is_within, last, after), islice(old.items, begin, None)))
        if not within or within[-1].last_offset != last or not old.may_rewrite(within):
            detail = "must replace adjacent sealed ledgers with the same offsets (rule 27c)"
            _raise([(f"/row/items/{index}", detail)], log=old.name)
        found[item.ledger_id] = within
    return found


def _is_within(last: int | None, after: Collection[int], item: LogItem) -> bool:
    """Whether a ledger is sealed at or below the offset `last`, and is not in `after`."""
    return (
        last is not None
        and item.last_offset is not None
        and item.last_offset <= last
        and item.ledger_id not in after
    )


def check_unprotected(log: LogMetadata) -> None:
    """Raise LogProtected if a log must not be deleted, truncated or overwritten."""
    if log.deletion_protection:
        raise LogProtected(
            f"the log {log.name} is protected: set deletion_protection to false", log=log.name
        )


def published_by(
    old: LogMetadata, new: LogMetadata, requested: Sequence[Sealed]
) -> tuple[LogItem, ...]:
    """The ledgers of a commit that `new` adds to the log, in order (rule 28).

    `requested`: the ledgers that the commit named. Ledgers without records are left out. The caller
    ensures that all ledgers of `new` but the last are CLOSED. Raises: InvalidRequest, LogProtected.
    """
    if new.first_offset > old.first_offset:
        check_unprotected(old)
    known = {item.ledger_id for item in old.items}
    added = tuple(item for item in new.items if item.ledger_id not in known)
    wanted = [sealed.ledger_id for sealed in requested]
    published = added[:-1]
    places = [wanted.index(item.ledger_id) for item in published if item.ledger_id in wanted]
    problem = ""
    if new.state is not LogState.OPEN or old.state is not LogState.OPEN:
        problem = "the log must be OPEN before and after the commit"
    elif not added:
        problem = "the last ledger must be new"
    elif added[-1].last_offset is not None or added[-1].ledger_id in wanted:
        problem = "the last ledger must be open, and must not be published by the commit"
    elif new.items[len(new.items) - len(added) :] != added:
        problem = "published ledgers must follow the existing ledgers"
    elif any(item.last_offset is None for item in new.items[:-1]):
        problem = "all ledgers except the last must have a last_offset"
    elif len(places) != len(published) or places != sorted(places):
        problem = "only requested ledgers may be published, in the requested order"
    if problem:
        raise InvalidRequest(f"/row: {problem}", log=old.name)
    return published


def _raise(problems: _Problems, *, ledger_id: int | None = None, log: str | None = None) -> None:
    if problems:
        raise InvalidRequest(
            "; ".join(f"{pointer}: {detail}" for pointer, detail in problems[:10]),
            ledger_id=ledger_id,
            log=log,
            errors=[{"pointer": pointer, "detail": detail} for pointer, detail in problems],
        )
