"""The invariants of ledgers as named checks, each over values that the caller's own books give.

Explorer, simulator and whole services judge by these; what clients saw is judged by `history.py`
and `log_history.py`, and the list of a log by `tests/model/logs/judge.py`. A check returns what is wrong,
or None. It asks no machine anything, so that a fault of one cannot hide itself.

Sources: TLA is the public specification Vanlightly/bookkeeper-tlaplus; BK#n is an issue or pull
request of apache/bookkeeper; BP-46 is BookKeeper's proposal "Running without the journal".
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from inspect import isfunction
from typing import Final

from quorumlog.protocol.ids import member_name
from quorumlog.protocol.metadata import LedgerMetadata, Repair, State
from quorumlog.protocol.quorum import Quorum

Wrong = str | None
Held = Callable[[str, int], bool]
"""Whether an entry was durable at a member, copies that a fault destroyed included."""

_NEXT: Final = {
    State.OPEN: (State.OPEN, State.IN_RECOVERY, State.CLOSED),
    State.IN_RECOVERY: (State.IN_RECOVERY, State.CLOSED),
    State.CLOSED: (State.CLOSED,),
}

# --- durability and agreement ---------------------------------------------------------------------


def closed_covers_acked(acked: int, last_entry: int | None) -> Wrong:
    """I1: nothing acknowledged is beyond the end of a CLOSED ledger.

    Source: TLA NoDivergenceBetweenClientAndMetaData; BK#2614 broke it until 2021.
    """
    if last_entry is not None and acked > last_entry:
        return f"I1: {acked} is acknowledged, the ledger ended at {last_entry}"
    return None


def deleted_takes_nothing(ledger_id: int, entry_id: int, *, was_deleted: bool) -> Wrong:
    """I1, I12: nothing is appended to a ledger after its deletion (rule 16a).

    Source: BK#870: what was given up must not be written again; rule 17: ids are used once.
    """
    if was_deleted:
        return f"I1: {entry_id} is acknowledged, ledger {ledger_id} was deleted before it was sent"
    return None


def acked_reaches_quorum(row: LedgerMetadata, ids: Iterable[int], has_held: Held) -> Wrong:
    """I2: each acknowledged entry is always durable on Qa members of the fragment that owns it.

    Source: TLA AllCommittedEntriesReachAckQuorum asks it of CLOSED ledgers; BK#1591, BK#4651 and
    BK#4194 show why it must hold before.
    """
    for entry_id in ids:
        holders = sum(has_held(member, entry_id) for _, member in row.members_of(entry_id))
        if holders < row.quorum.ack_quorum:
            return f"I2: entry {entry_id} is acknowledged, {holders} of its members hold it"
    return None


def acked_keeps_its_row(
    row: LedgerMetadata, ids: Iterable[int], has_held: Held, has_copy: Held
) -> Wrong:
    """rule 18b: each entry that a writer acknowledges is on an ack quorum of members that keep a copy of a
    row that names them for it. `has_copy` tells of a member and an entry.

    Source: issue 16, D3: a row that lost its ensemble changes was recovered at its old members' end.
    """
    for entry_id in ids:
        keepers = sum(
            has_held(member, entry_id) and has_copy(member, entry_id)
            for _, member in row.members_of(entry_id)
        )
        if keepers < row.quorum.ack_quorum:
            return f"rule 18b: entry {entry_id} is acknowledged, {keepers} keep its row"
    return None


def end_is_kept(
    row: LedgerMetadata,
    has_copy: Callable[[str], bool],
    is_down: Callable[[str], bool],
    others: Collection[str] = (),
) -> Wrong:
    """rule 18b: when a client hears of an end, or of another change that no append follows, at most Qw - Qa members of the
    last fragment have no copy of it, or only members that are down. In the place of these, Qa bookies have a copy, or
    all of `others`: the bookies that are no members, if none of them is down.

    Source: issue 16: a database that lost its newest rows knew ledgers without the ends that clients had heard of.
    """
    lacking = [member for member in row.last_fragment.bookies if not has_copy(member)]
    if len(lacking) <= row.quorum.write_quorum - row.quorum.ack_quorum:
        return None
    if not all(map(is_down, lacking)):
        return (
            f"rule 18b: the end of ledger {row.ledger_id} is told, and {lacking} have no copy of it"
        )
    kept = sum(map(has_copy, {*row.all_members, *others}))
    if kept >= row.quorum.ack_quorum or all(map(has_copy, others)):
        return None
    return f"rule 18b: the end of ledger {row.ledger_id} is told, and only {kept} bookies have a copy of it"


def one_payload(entry_id: int, payloads: Collection[bytes]) -> Wrong:
    """I3: an entry of a closed ledger can be read, and all its copies are the same.

    Source: TLA AllAckedEntriesAreReadable.
    """
    if len(payloads) != 1:
        return f"I3: entry {entry_id} of the closed ledger has {len(payloads)} payloads"
    return None


def end_never_moves(before: LedgerMetadata, after: LedgerMetadata) -> Wrong:
    """I4: a ledger ends once: after CLOSED neither state, end nor length change.

    Source: the ledgers' protocol: the last entry is immutable once it is agreed on; TLA, CLOSED
    is final.
    """
    if before.state is not State.CLOSED:
        return None
    if (after.state, after.last_entry, after.length) != (
        before.state,
        before.last_entry,
        before.length,
    ):
        return f"I4: the end moved from {before.last_entry} to {after.last_entry}"
    return None


def same_bytes(where: str, entry_id: int, known: object, stored: object) -> Wrong:
    """I7: equal ids mean equal bytes, across bookies and time.

    Source: TLA NoOutOfOrderEntries, where the id is the data.
    """
    return None if known == stored else f"I7: {where} holds other bytes of entry {entry_id}"


def in_order(first: int, last: int, acked: int) -> Wrong:
    """I8: acknowledgements come in the order of ids, without a gap.

    Source: TLA ClientReceivesAddConfirmedResponse: the LAC moves over confirmed entries only.
    """
    if first != acked + 1 or last < first:
        return f"I8: {first}..{last} confirmed after {acked}"
    return None


def was_appended(last: int, appended: int) -> Wrong:
    """I9: no answer has an entry that no client appended.

    Source: Jepsen's kafka workload, "aborted read".
    """
    return f"I9: {last} is told, {appended} were appended" if last >= appended else None


def lac_is_bounded(lac: int, acked: int, who: str) -> Wrong:
    """I10: a LAC that is sent, stored or shown is not beyond what was acknowledged.

    Source: TLA NoDirtyReads.
    """
    return f"I10: {who} tells LAC {lac}, acknowledged is {acked}" if lac > acked else None


# --- quorums and fences ---------------------------------------------------------------------------


def fenced_rejects(member: str, *, was_fenced: bool) -> Wrong:
    """I12: a fenced bookie stores no normal add. Call it for each that was stored.

    Source: TLA BookieSendsAddFencedResponse; BookKeeper's ledger protocol, "fencing".
    """
    return f"I12: {member} is fenced and stored a normal add" if was_fenced else None


def fence_is_kept(member: str, *, reported: bool, is_kept: bool) -> Wrong:
    """I13: a fence that a bookie reported is durable by then, and stays whatever happens to the bookie.

    Source: BP-46, scenario 1.
    """
    return f"I13: {member} told a fence and has none" if reported and not is_kept else None


def deleted_is_for_ever(member: str, *, reported: bool, is_kept: bool, says: bool) -> Wrong:
    """I13, rule 16a: a bookie knows for ever which ledgers its log reports as deleted, and its answers
    about them prove nothing.

    Source: issue 13: an append to a deleted ledger, whose fence went with it, was acknowledged.
    """
    if reported and not is_kept:
        return f"rule 16a: {member} has forgotten that the ledger was deleted"
    return f"rule 16a: {member} answers for a deleted ledger" if reported and says else None


def covers_before_reading(quorum: Quorum, fenced: Collection[int]) -> Wrong:
    """I14: recovery reads only when each write set has fewer than Qa members that are not fenced.

    Source: TLA QuorumCoverage.
    """
    for start in range(quorum.ensemble_size):
        silent = [p for p in quorum.write_set(start) if p not in fenced]
        if len(silent) >= quorum.ack_quorum:
            return f"I14: read before coverage, silent are {silent}"
    return None


def reads_fence(member: str, *, is_fenced: bool) -> Wrong:
    """I15: a bookie that answers a recovery read is durably fenced at that moment.

    Source: TLA, its defect "recovery reads without fencing" (X1), BK#2614.
    """
    return None if is_fenced else f"I15: {member} answers a recovery read unfenced"


def absence_is_proven(quorum: Quorum, end: int, negatives: Collection[int]) -> Wrong:
    """I16: a recovery ends a ledger before an entry only with enough explicit negatives for it.

    Source: TLA ClientReceivesRecoveryReadResponse; BK#2612, BK#2908: silence and damage are no negatives.
    """
    if len(negatives) < quorum.negatives_needed:
        return f"I16: closed at {end} with negatives of {sorted(negatives)} for the next"
    return None


def negative_sticks(member: str, ids: Iterable[int], denied: Collection[tuple[int, int]]) -> Wrong:
    """I17: a bookie that denied an entry to a recovery never stores it by a normal add later.

    Source: BK#2614, the add that comes after the read.
    """
    again = [e for e in ids if any(low <= e <= high for low, high in denied)]
    return f"I17: {member} stored {again} after it said no" if again else None


# --- metadata -------------------------------------------------------------------------------------


def version_grows_by_one(before: LedgerMetadata, after: LedgerMetadata) -> Wrong:
    """I20: each change of a row makes one new version, and no version is used twice.

    Source: TLA, meta_version in ClientChangesEnsemble and the closes.
    """
    if after.version != before.version + 1:
        return f"I20: version {before.version} became {after.version}"
    return None


def state_goes_on(before: LedgerMetadata, after: LedgerMetadata) -> Wrong:
    """I21: states go from OPEN to IN_RECOVERY to CLOSED, or from OPEN to CLOSED, and never back.

    Source: TLA, meta_status.
    """
    if after.state not in _NEXT[before.state]:
        return f"I21: {before.state} became {after.state}"
    return None


def row_is_legal(after: LedgerMetadata) -> Wrong:
    """I21, I22 and I23 of one row: an end only where CLOSED, fragments from 0 upwards with E bookies
    each, none beyond the end.

    Source: TLA, its defect "invalid ensemble sequence"; BK#4551 for the empty last fragment.
    """
    try:
        after.check()
    except AssertionError as broken:
        return f"{broken}"
    for fragment in after.fragments:
        names = [member_name(member) for member in fragment.bookies]
        if len(set(names)) != len(names):
            return f"I22: one bookie twice in {fragment.bookies}"
    return None


def borders_stay(before: LedgerMetadata, after: LedgerMetadata) -> Wrong:
    """I22: fragments are appended, and their first entries never change.

    Source: TLA, its defect "invalid ensemble sequence" (X2).
    """
    firsts = [fragment.first_entry for fragment in before.fragments]
    kept = [fragment.first_entry for fragment in after.fragments]
    if after.state is not State.CLOSED and kept[: len(firsts)] != firsts:
        return f"I22: fragments {firsts} became {kept}"
    return None


def begins_after_acked(first: int, acked: int) -> Wrong:
    """I22: the fragment of an ensemble change begins after what is acknowledged.

    Source: TLA ClientChangesEnsemble.
    """
    if first != acked + 1:
        return f"I22: a fragment at {first}, acknowledged is {acked}"
    return None


def recovery_changes_at_the_close(before: LedgerMetadata, after: LedgerMetadata) -> Wrong:
    """I24: a recoverer's ensemble is committed with the close. Don't check a repair's change.

    Source: TLA RecoveryClientChangesEnsemble, with its two reasons.
    """
    if before.state is after.state is State.IN_RECOVERY and before.fragments != after.fragments:
        return "I24: the ensemble changed in recovery, before the close"
    return None


def writer_changes_the_last(before: LedgerMetadata, after: LedgerMetadata) -> Wrong:
    """I24: a writer leaves earlier fragments as they are.

    Source: TLA ClientChangesEnsemble.
    """
    if after.fragments[: len(before.fragments) - 1] != before.fragments[:-1]:
        return "I24: the writer changed an earlier fragment"
    return None


def repair_copies_first(before: LedgerMetadata, after: LedgerMetadata, has_held: Held) -> Wrong:
    """I25: a repair changes members of closed fragments only, once all their entries are there, but
    for what an operator gave up (rule 31).

    Source: BK#4163; BookKeeper's LedgerFragmentReplicator, which leaves the last fragment of an
    open ledger alone.
    """
    if (before.state, before.last_entry) != (after.state, after.last_entry):
        return "I25: a repair changed the ledger's state"
    if [f.first_entry for f in before.fragments] != [f.first_entry for f in after.fragments]:
        return "I25: a repair changed the fragments"
    for index, fragment in enumerate(after.fragments):
        old, end = before.fragments[index].bookies, after.fragment_last(index)
        new = [p for p, member in enumerate(fragment.bookies) if member != old[p]]
        if new and end is None:
            return "I25: a repair changed an open fragment"
        for position in new:
            member = fragment.bookies[position]
            lacking = [
                entry_id
                for entry_id in range(fragment.first_entry, (end or 0) + 1)
                if end is not None
                and entry_id <= end
                and after.quorum.is_member(position, entry_id)
                and after.lost_at(entry_id) is None
                and not has_held(member, entry_id)
            ]
            if lacking:
                return f"I25: {member} lacks {lacking}"
    return None


def repair_reads_back(before: LedgerMetadata, after: LedgerMetadata, is_bad: Held) -> Wrong:
    """Rule 20a: no bookie becomes a member with a copy that was damaged (`is_bad`) when the repair began
    and still is: a worker that reads copies back before the change notices the damage.

    Source: docs/protocol.md, rule 20a: the only healthy copy lost its place to one with a flipped byte.
    """
    for member, position, first, end in _newcomers(before, after):
        bad = [
            entry_id
            for entry_id in range(first, end + 1)
            if after.quorum.is_member(position, entry_id)
            and after.lost_at(entry_id) is None
            and is_bad(member, entry_id)
        ]
        if bad:
            return f"rule 20a: {member} got a place with damaged copies of {bad}"
    return None


def repair_looks_again(
    before: LedgerMetadata,
    after: LedgerMetadata,
    missed: Collection[tuple[str, int, int]],
) -> Wrong:
    """Rule 20a: the change that replaces a member queues a second check (`missed`: member, first,
    last) of all its entries.

    Source: docs/protocol.md, rule 20a: a worker that died between change and check left it unverified.
    """
    for member, _, first, end in _newcomers(before, after):
        if first <= end and not any(m == member and a <= first and end <= b for m, a, b in missed):
            return f"rule 20a: nobody looks again at what {member} has of {first}..{end}"
    return None


def repair_keeps_who_leaves(
    before: LedgerMetadata, after: LedgerMetadata, has_copy: Callable[[str, int], bool]
) -> Wrong:
    """Rule 20b: a bookie that is replaced in a closed fragment stays a member until its successor keeps a
    copy (`has_copy`: member, version) of the row that is changed.

    Source: docs/protocol.md, rule 20b: a database went back behind a repair, and the new members dropped.
    """
    for index, fragment in enumerate(before.fragments):
        gone = set(fragment.bookies) - set(after.all_members)
        if gone and before.is_closed_fragment(index):
            return f"rule 20b: {sorted(gone)} lost a place and membership at once"
    for repair in set(_placed(before)) - set(after.repairs):
        fragment = after.fragment_of(repair.first_entry)
        if repair.target in fragment.bookies:
            is_let_go_early = not has_copy(repair.target, before.version)
        else:
            # The member that replaced the target now keeps the members that the target kept.
            named = {*fragment.bookies, *(r.leaving for r in _placed(after))}
            is_let_go_early = repair.leaving not in named
        if is_let_go_early:
            return f"rule 20b: {repair.leaving} was let go, {repair.target} lacks v{before.version}"
    return None


def _placed(row: LedgerMetadata) -> Iterator[Repair]:
    """The repairs whose target has replaced the former member."""
    for repair in row.repairs:
        if repair.target in row.fragment_of(repair.first_entry).bookies:
            yield repair


def _newcomers(
    before: LedgerMetadata, after: LedgerMetadata
) -> Iterator[tuple[str, int, int, int]]:
    """Member, position, and first and last entry of each place that a repair gave away."""
    for index, fragment in enumerate(after.fragments):
        old, end = before.fragments[index].bookies, after.fragment_last(index)
        for position, member in enumerate(fragment.bookies):
            if member != old[position] and end is not None:
                yield member, position, fragment.first_entry, end


def garbage_is_proven(member: str, row: LedgerMetadata | None, *, keep_stub: bool) -> Wrong:
    """I26: a bookie gives a ledger up where the row is a tombstone (None), and drops entries, with
    a stub left, where it is CLOSED and names no incarnation of that bookie.

    Source: BK#870, YahooArchive/bookkeeper#15, NATS#7556: data collected as orphans.
    """
    if row is None:
        return f"rule 17: {member} keeps a stub of a deleted ledger" if keep_stub else None
    if not keep_stub:
        return f"I26: {member} forgets {row.ledger_id}, which is not deleted"
    if row.state is not State.CLOSED or member_name(member) in map(member_name, row.all_members):
        return f"I26: {member} drops {row.ledger_id}, {row.state} with {row.all_members}"
    return None


# --- limbo ----------------------------------------------------------------------------------------


def limbo_denies_nothing(member: str, asked_as: str, *, is_limbo: bool) -> Wrong:
    """I27: in limbo, or asked as another incarnation, a bookie gives no negative. Call it for each
    that was given.

    Source: BP-46, scenario 2.
    """
    if is_limbo or asked_as != member:
        return f"I27: {member} says no as {asked_as}"
    return None


def limbo_takes_no_adds(member: str, asked_as: str) -> Wrong:
    """I27: asked as another incarnation a bookie stores no normal add.

    Source: BP-46, scenario 1, and BK#2612: what is empty must not look like the one before.
    """
    return None if asked_as == member else f"I27: {member} stored a normal add as {asked_as}"


def limbo_is_marked(member: str, *, may_have_lost: bool, is_marked: bool) -> Wrong:
    """I27: a ledger that may have lost entries is in limbo, and fenced unless OPEN, before it is served.

    Source: BP-46, "boot sequence".
    """
    if may_have_lost and not is_marked:
        return f"I27: {member} serves, and has not marked what it may lack"
    return None


def limbo_ends_whole(member: str, lacking: Collection[int], *, is_older_named: bool) -> Wrong:
    """I27: limbo ends when no row names an older incarnation and every entry is back.

    Source: BP-46, phase two.
    """
    if is_older_named:
        return f"I27: {member} left limbo, and an older name is in metadata"
    return f"I27: {member} left limbo, and lacks {sorted(lacking)}" if lacking else None


# --- liveness: once the faults are over, within a bounded virtual time ----------------------------


def ledger_ends(ledger_id: int, state: State, why: object = "") -> Wrong:
    """L1: each ledger that its writer does not end is ended by a recovery.

    Source: TLA LedgerIsClosed, which its Liveness asks for.
    """
    if state is State.CLOSED:
        return None
    return f"L1: ledger {ledger_id} is still {state}" + (f": {why}" if why else "")


def appends_are_acked(asked: int, confirmed: int, refused: str = "") -> Wrong:
    """L2: a writer with E live bookies acknowledges what it is asked to append. `refused`: the code
    with which its handle ended.

    Source: TLA Liveness: there is no history in which a ledger gets stuck.
    """
    if refused:
        return f"L2: {refused} with all bookies alive"
    if confirmed < asked:
        return f"L2: {asked} appended, {confirmed} acknowledged, with all bookies alive"
    return None


def one_hung_blocks_nothing(hung: str, state: State) -> Wrong:
    """L3: a bookie that takes requests and never answers blocks neither fencing nor recovery reads.

    Source: BK#1067, a recovery that waited for all.
    """
    return None if state is State.CLOSED else f"L3: {hung} hangs, and the ledger is still {state}"


def copies_come_back(left: object) -> Wrong:
    """L4: under-replicated entries get copies; `left` is what is then queued, refused or lacking.

    Source: BookKeeper's ReplicationWorker: every ledger marked as underreplicated is unmarked.
    """
    return f"L4: not all copies came back: {left}" if left else None


def limbo_empties(members: Collection[str]) -> Wrong:
    """L5: limbo ends at every bookie.

    Source: BP-46, phase two.
    """
    return f"L5: still in limbo: {sorted(members)}" if members else None


def comes_to_rest(messages: int, calm: int) -> Wrong:
    """L6: no process retries without end: a world with nothing to do exchanges at most `calm` messages.

    Source: TigerBeetle's VOPR, in which a healed core must converge.
    """
    return f"L6: {messages} messages with nothing to do" if messages > calm else None


def first_wrong(*found: Wrong) -> Wrong:
    """The first violation that several checks found."""
    return next((wrong for wrong in found if wrong is not None), None)


CHECKS: Final[Sequence[Callable[..., Wrong]]] = tuple(
    check
    for name, check in dict(globals()).items()
    if isfunction(check)
    and check.__module__ == __name__
    and check.__annotations__["return"] == Wrong
    and not name.startswith("_")
    and check is not first_wrong
)
"""All of them, in the order of this file."""
