"""The mutants of the machines: one for each counterexample and rule whose part stands
(docs/protocol.md). Those of whole services are in services.py.
"""

from typing import Final

from quorumlog.protocol import changes, limbo, placement, rebuild, record, slots
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.recovery import Recovery
from quorumlog.protocol.repair import FragmentRepair
from quorumlog.protocol.replica import Replica
from quorumlog.protocol.slots import Slots
from quorumlog.protocol.tally import Tally
from quorumlog.protocol.window import Window
from quorumlog.protocol.writer import LedgerWriter
from tests.model.explore.scope import Scope
from tests.model.regressions.plans import OUTLIVED, RIVALS, drawn_like
from tests.model.scenarios import disks
from tests.model.sim import bookie as sim_bookie
from tests.model.sim.plan import draw_early, draw_forks, draw_moves, draw_repairs
from tests.model.sim.store import Store
from tests.mutation.mutants.guards import (
    always,
    any_answer_fences,
    asked,
    believed,
    by_version,
    change_in_recovery,
    change_in_the_head,
    conflict_is_ok,
    eager,
    early_commit,
    fenceless,
    forgetful_replay,
    forgotten,
    fragments_beyond_the_end,
    from_the_lac,
    hasty_negative,
    kept_acks,
    lac_of_the_pushed,
    less_coverage,
    let_go_at_once,
    limbo_by_name_only,
    made_anew,
    named_by_the_first,
    of_one_stay,
    one_ack_less,
    one_negative,
    read_of_the_head,
    remembered,
    repeats,
    silence_is_no,
    stores,
    tells_of_a_fence,
    told_early,
    unfenced_limbo,
    unfenced_read,
    unmarked,
    unmeasured,
    unnamed_is_no,
    unread,
    where,
    whoever_is_named,
    whole_runs,
)
from tests.mutation.mutants.hunt import Mutant, Patch
from tests.mutation.mutants.services import SERVICES

ONE: Final = Scope("one entry, one recoverer")
SPARE: Final = Scope("one entry, a spare, one timeout", recoverers=0, spares=1, timeouts=1)
CRASH: Final = Scope("one entry, one crash with full loss", crashes=1)

MACHINES: Final = (
    Patch(Recovery, "_send_read", fenceless).mutant(
        "a recovery reads without fencing the ledger", "X1, I15", ONE
    ),
    Patch(Replica, "_read", unfenced_read).mutant(
        "a bookie does not fence the ledger on a recovery read", "X1, I15", ONE
    ),
    Patch(Recovery, "_start", from_the_lac).mutant(
        "a recovery starts below the last fragment", "X2, I24"
    ),
    Patch(Replica, "_is_limbo_in_the_way", always(False)).mutant(
        "a bookie accepts normal adds that name its older incarnation", "X3, rule 15", CRASH
    ),
    Mutant(
        "a restarted bookie forgets the fence",
        "X3, I13",
        (Patch(sim_bookie, "replay", forgetful_replay), Patch(disks, "replay", forgetful_replay)),
    ),
    Patch(Replica, "_may_say_no", always(True)).mutant(
        "a bookie denies entries although it may have lost them", "X4, I27, rule 15", CRASH
    ),
    Patch(Replica, "_is_older", always(False)).mutant(
        "a bookie does not distinguish its incarnations", "X3, X4, X18", CRASH
    ),
    Patch(Replica, "enter_limbo", unmarked).mutant(
        "a new incarnation serves a ledger without putting it in limbo", "I27, rule 31, BP-46"
    ),
    Patch(Replica, "enter_limbo", unfenced_limbo).mutant(
        "a new incarnation puts a ledger in limbo without fencing it", "I27, rule 31, BP-46"
    ),
    Patch(Replica, "_may_say_no", limbo_by_name_only).mutant(
        "a new incarnation denies entries that it has not yet got back", "I27, rule 15"
    ),
    Patch(limbo, "lacking", always(())).mutant(
        "a ledger leaves limbo before the bookie has its entries again", "I27, rule 15"
    ),
    Patch(limbo, "older_members", always([])).mutant(
        "a ledger leaves limbo while its metadata names an older incarnation", "I27, rule 15"
    ),
    Patch(Recovery, "_change", early_commit).mutant(
        "a recovery writes its ensemble change before it closes the ledger", "X5, I24"
    ),
    Patch(Recovery, "_read_window", read_of_the_head).mutant(
        "a recovery reads from the bookies that it chose as replacements", "X6"
    ),
    Patch(Slots, "is_current", where(is_recovery=False, mutation=always(True))).mutant(
        "a writer counts acknowledgements of members that were replaced", "X7, I18, rule 7", SPARE
    ),
    Patch(Window, "ask", kept_acks).mutant(
        "an ensemble change keeps the acknowledgements of the replaced members",
        "BK#3005, rule 7",
        SPARE,
    ),
    Patch(LedgerWriter, "_update", change_in_the_head).mutant(
        "a writer changes its ensemble without a compare-and-swap", "X8, BK#1591", SPARE
    ),
    Patch(LedgerWriter, "_uncounted", always(0)).mutant(
        "a writer confirms entries while an ensemble change is in progress",
        "X8, X9, I19, rule 6",
        SPARE,
    ),
    Patch(Slots, "begin", eager).mutant(
        "a recovery closes the ledger before all entries are written back", "X10", ONE
    ),
    Patch(Tally, "_is_absent", one_negative).mutant(
        "a recovery takes one negative answer as proof of absence", "X11, I16", ONE
    ),
    Patch(Tally, "note", silence_is_no).mutant(
        "a recovery counts a timeout as a negative answer",
        "X11, I16",
        Scope("one entry, one recoverer, one timeout", timeouts=1),
    ),
    Patch(Recovery, "_fence_answered", any_answer_fences).mutant(
        "a recovery counts any answer to a fence for coverage", "X11, I14, rule 13"
    ),
    Patch(Quorum, "is_covered", less_coverage).mutant(
        "coverage is reached with one fenced bookie too few", "I14"
    ),
    Patch(Replica, "_is_fence_in_the_way", always(False)).mutant(
        "a bookie does not check the fence on an add", "X12, I12", ONE
    ),
    Patch(Recovery, "_metadata_answered", conflict_is_ok).mutant(
        "a recovery takes a compare-and-swap conflict for success", "X13, I4"
    ),
    Patch(LedgerWriter, "_metadata_answered", conflict_is_ok).mutant(
        "a writer takes a compare-and-swap conflict for success", "X13, rule 6"
    ),
    Patch(Quorum, "has_ack_quorum", one_ack_less).mutant(
        "an entry is confirmed with one acknowledgement too few", "X14, I2", ONE
    ),
    Patch(Replica, "step", told_early(tells_of_a_fence)).mutant(
        "a bookie reports a fence before the fence is on disk", "X20, I13, rule 3"
    ),
    Patch(Replica, "step", told_early(stores)).mutant(
        "a bookie acknowledges an add before the entries are on disk", "rule 3"
    ),
    Patch(Replica, "step", told_early(repeats)).mutant(
        "a bookie acknowledges a repeated add before the entries are on disk", "rule 3"
    ),
    Patch(Replica, "_kept_row", always(())).mutant(
        "a bookie stores no copy of the metadata with an add", "rule 18b"
    ),
    Patch(Slots, "_add", named_by_the_first).mutant(
        "a writer sends a new member metadata that predates the member", "rule 18b"
    ),
    Patch(Window, "forget_acks", always(None)).mutant(
        "a metadata change keeps the acknowledgements from before the change", "rule 18b"
    ),
    Patch(Slots, "is_current", of_one_stay).mutant(
        "a writer counts late acknowledgements from before a metadata change", "rule 18b"
    ),
    Patch(rebuild, "decide", asked(lambda _held: ())).mutant(
        "a rebuild decides without any bookie's copies", "rule 18d"
    ),
    Patch(rebuild, "decide", asked(lambda held: held[:1])).mutant(
        "a rebuild decides from the copies of one bookie", "rule 18d"
    ),
    Mutant(
        "a rebuild takes the highest version although copies contradict each other",
        "rule 18d",
        (
            Patch(rebuild, "_contradiction", always("")),
            Patch(rebuild, "_fork", always("")),
        ),
        draw=draw_forks,
    ),
    Patch(rebuild.Bookies, "lost_of", always(frozenset())).mutant(
        "a rebuild ignores that silent bookies may have a later version", "rule 18d"
    ),
    Mutant(
        "a wiped bookie gets an incarnation that metadata already names",
        "rule 15b",
        (
            Patch(rebuild, "stand_ins", always({})),
            Patch(changes, "check_new_incarnation", always(None)),
        ),
    ),
    Patch(rebuild.Bookies, "without_data_of", always("")).mutant(
        "a rebuild restores metadata of incarnations that were assigned again",
        "rules 15b and 18d",
        draw=draw_early,
    ),
    Patch(changes, "check_members", always(None)).mutant(
        "a metadata change adds members that are not registered", "rule 15b"
    ),
    Patch(Store, "_is_present", by_version).mutant(
        "a compare-and-swap compares the version but not the attempt token", "rules 6 and 18a"
    ),
    Patch(Replica, "_read", hasty_negative).mutant(
        "a bookie's negative answer does not wait for earlier adds",
        "rule 3, I17",
        is_equivalent="a recovery read waits for its fence, which follows the adds in the same log",
    ),
    Patch(Tally, "_invalid", always(set())).mutant(
        "a recovery accepts entries with a wrong digest", "overview 1.4"
    ),
    Patch(record, "make", lac_of_the_pushed).mutant(
        "entries carry the last assigned id instead of the LAC", "I10", ONE
    ),
    Patch(placement, "replacements", whoever_is_named).mutant(
        "an ensemble change picks a bookie that is already a member", "I22, I31"
    ),
    Patch(LedgerWriter, "_metadata_answered", change_in_recovery).mutant(
        "a writer takes the state IN_RECOVERY for OPEN", "I24, rule 10"
    ),
    Patch(LedgerMetadata, "closed", fragments_beyond_the_end).mutant(
        "a closed ledger keeps fragments beyond its end",
        "I23",
        is_equivalent="no fragment begins beyond the end that a writer or a recovery finds: a second belt",
    ),
    Patch(Recovery, "_measure", unmeasured).mutant(
        "a recovery closes a ledger without measuring its length", "I4"
    ),
    Patch(Slots, "is_current", where(is_recovery=True, mutation=always(True))).mutant(
        "a recovery counts acknowledgements of members that were replaced", "I18, rule 7"
    ),
    Patch(LedgerWriter, "_may_come_back", always(True)).mutant(
        "a writer uses a member again that refused its adds",
        "rule 15",
        is_equivalent="it refuses again, once a second: messages, no harm",
    ),
    Patch(Recovery, "_is_same_ledger", always(True)).mutant(
        "a recovery ignores concurrent changes of the metadata",
        "I24, rule 14",
        is_equivalent="only an operator who declares a member lost changes such a row: tests/unit/protocol",
    ),
    Patch(FragmentRepair, "_is_marked", always(True)).mutant(
        "a repair copies entries to a target that metadata does not name", "rule 20"
    ),
    Patch(LedgerMetadata, "is_closed_fragment", always(True)).mutant(
        "a repair copies a fragment that is still open", "I25"
    ),
    Patch(FragmentRepair, "_send", always(None)).mutant(
        "a repair replaces a bookie before the target has the entries", "I25"
    ),
    Patch(FragmentRepair, "_verify", believed).mutant(
        "a repair replaces a bookie without reading back the copies",
        "rule 20a, I25",
        draw=draw_repairs,
    ),
    Patch(Replica, "_read", remembered).mutant(
        "a repair reads back copies that are not on disk", "rule 20a, I25", draw=draw_repairs
    ),
    Patch(FragmentRepair, "_second_look", always(())).mutant(
        "a repair queues no second verification of the copies", "rule 20a"
    ),
    Patch(FragmentRepair, "_give_row", let_go_at_once).mutant(
        "a repair releases the replaced bookie before the target has the metadata", "rule 20b"
    ),
    Patch(FragmentRepair, "_is_same_place", always(True)).mutant(
        "a repair uses copies for another position than they were made for",
        "I25, I22",
        draw=draw_moves,
    ),
    Patch(FragmentRepair, "_ends_as_before", always(True)).mutant(
        "a repair replaces a bookie although the fragment's end has changed",
        "I25",
        draw=drawn_like(OUTLIVED),
    ),
    Patch(FragmentRepair, "_is_overtaken", always(False)).mutant(
        "a repair names its target again after a later repair replaced it",
        "rule 20, L6",
        draw=drawn_like(RIVALS),
    ),
    Patch(Slots, "take_missed", where(is_recovery=False, mutation=forgotten)).mutant(
        "a writer forgets which entries a member missed", "rule 8"
    ),
    Patch(Slots, "take_missed", where(is_recovery=True, mutation=forgotten)).mutant(
        "a recovery forgets which entries a member missed", "rule 12"
    ),
    Patch(Tally, "note", unnamed_is_no).mutant(
        "a recovery takes entries that an answer leaves out for absent", "rule 1, X15, BK#2908, I16"
    ),
    Patch(slots, "part_of", whole_runs).mutant(
        "members are sent entries that they do not store", "rule 1"
    ),
    Patch(Tally, "runs", made_anew).mutant(
        "a recovery encodes entries again with another LAC", "rule 2, I7, I11"
    ),
    Patch(Recovery, "_start_reading", unread).mutant(
        "a recovery closes the ledger at the LAC without reading further", "X19, pravega#1907", ONE
    ),
    Patch(Replica, "_has_other_bytes", always(False)).mutant(
        "a bookie acknowledges other bytes for an entry id that it stores",
        "rule 2",
        is_equivalent="nobody sends other bytes under an id while the other rules hold: a tripwire",
    ),
    Patch(Replica, "_is_foreign", always(False)).mutant(
        "a bookie answers requests that are meant for another bookie",
        "rule 4, I28",
        is_equivalent="links of these worlds end where they should: tests/unit/net and tests/unit/bookie",
    ),
    Patch(Replica, "_is_wrong_key", always(False)).mutant(
        "a bookie does not check the ledger key",
        "rules 17 and 30",
        is_equivalent="ids are used once and clients are honest in these worlds: tests/unit/bookie",
    ),
    Patch(LedgerWriter, "_is_refused", always(False)).mutant(
        "a writer keeps waiting although too many bookies refuse",
        "rule 9",
        is_equivalent="the quorum timeout ends the handle too, ten seconds later",
    ),
)

MUTANTS: Final = (*MACHINES, *SERVICES)
