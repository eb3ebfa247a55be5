"""Which changes of a ledger's row are legal, so that a client's bug can't break a ledger.

The rows themselves were checked when they were parsed (I21 to I23); this is about what one may
become of another. Pure.
"""

from quorumlog.errors import InvalidRequest
from quorumlog.protocol.metadata import State
from quorumlog.wire.bodies import LedgerDraft

_NEXT = {
    State.OPEN: {State.OPEN, State.IN_RECOVERY, State.CLOSED},
    State.IN_RECOVERY: {State.IN_RECOVERY, State.CLOSED},
    State.CLOSED: {State.CLOSED},
}

_FIXED = (
    "ensemble_size",
    "write_quorum",
    "ack_quorum",
    "digest",
    "writer",
    "ledger_key",
    "mac_key",
    "access_key",
    "metadata",
    "log",
    "extra",
)
"""What a ledger was created with and keeps."""


def check_new(row: LedgerDraft) -> None:
    """Raise InvalidRequest unless a ledger may begin so."""
    problems: list[tuple[str, str]] = []
    if row.state is not State.OPEN:
        problems.append(("/row/state", "a new ledger is OPEN"))
    if len(row.fragments) != 1:
        problems.append(("/row/fragments", "a new ledger has one fragment"))
    if row.may_lack_entries or row.declared_lost or row.lost_entries:
        problems.append(("/row/declared_lost", "a new ledger has lost nothing"))
    _raise(problems)


def check_change(old: LedgerDraft, new: LedgerDraft, *, ledger_id: int) -> None:
    """Raise InvalidRequest unless `old` may become `new` in one step."""
    problems = [
        (f"/row/{name}", "never changes")
        for name in _FIXED
        if getattr(old, name) != getattr(new, name)
    ]
    if new.state not in _NEXT[old.state]:
        problems.append(("/row/state", f"{old.state} does not become {new.state} (I21)"))
    if not set(old.declared_lost) <= set(new.declared_lost):
        problems.append(("/row/declared_lost", "what was declared lost stays so"))
    if old.may_lack_entries and not new.may_lack_entries:
        problems.append(("/row/may_lack_entries", "does not go back"))
    problems += _given_up(old, new)
    if old.state is State.CLOSED:
        problems += [
            (f"/row/{name}", "never changes after CLOSED (I4)")
            for name in ("last_entry", "length")
            if getattr(old, name) != getattr(new, name)
        ]
    problems += _fragments(old, new)
    _raise(problems, ledger_id=ledger_id)


def _given_up(old: LedgerDraft, new: LedgerDraft) -> list[tuple[str, str]]:
    """Rule 31: a reader was told that these are gone, so they stay so; and before the end is final
    nobody knows what there was to lose.
    """
    pointer = "/row/lost_entries"
    if old.state is not State.CLOSED and new.lost_entries:
        return [(pointer, "entries are given up once the ledger is CLOSED")]
    for first, last in old.lost_entries:
        if not any(low <= first and last <= high for low, high in new.lost_entries):
            return [(pointer, "what was given up stays so")]
    return []


def _fragments(old: LedgerDraft, new: LedgerDraft) -> list[tuple[str, str]]:
    """I22 and I24: borders stay where they are; only who holds a fragment may change.

    A fragment begins after what was acknowledged when it was made, so every border below the end
    is final, and no end lies below a border.
    """
    pointer = "/row/fragments"
    before = [fragment.first_entry for fragment in old.fragments]
    after = [fragment.first_entry for fragment in new.fragments]
    if after[: len(before)] != before:
        return [(pointer, f"fragments begin at {before}; these may only be added to (I22)")]
    if old.state is State.CLOSED and after != before:
        return [(pointer, "a CLOSED ledger gets no new fragment (I4)")]
    if new.state is State.IN_RECOVERY and (
        after != before or old.fragments[-1] != new.fragments[-1]
    ):
        return [(pointer, "a recovery's ensemble change is committed with CLOSED only (I24)")]
    return []


def _raise(problems: list[tuple[str, str]], ledger_id: int | None = None) -> None:
    if problems:
        raise InvalidRequest(
            "; ".join(f"{pointer}: {detail}" for pointer, detail in problems),
            ledger_id=ledger_id,
            errors=[{"pointer": pointer, "detail": detail} for pointer, detail in problems],
        )
