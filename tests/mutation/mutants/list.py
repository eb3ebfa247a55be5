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
    Patch(Recovery, "_send_read", fenceless).mutant("recovery reads do not fence", "X1, I15", ONE),
    Patch(Replica, "_read", unfenced_read).mutant(
        "bookies do not fence on a recovery read", "X1, I15", ONE
    ),
    Patch(Recovery, "_start", from_the_lac).mutant(
        "recovery starts below the last fragment", "X2, I24"
    ),
    Patch(Replica, "_is_limbo_in_the_way", always(False)).mutant(
        "an older incarnation takes normal adds", "X3, rule 15", CRASH
    ),
    Mutant(
        "a restart forgets the fence",
        "X3, I13",
        (Patch(sim_bookie, "replay", forgetful_replay), Patch(disks, "replay", forgetful_replay)),
    ),
    Patch(Replica, "_may_say_no", always(True)).mutant(
        "an older incarnation says no", "X4, I27, rule 15", CRASH
    ),
    Patch(Replica, "_is_older", always(False)).mutant(
        "incarnations are not told apart", "X3, X4, X18", CRASH
    ),
    Patch(Replica, "enter_limbo", unmarked).mutant(
        "a new incarnation serves before phase one", "I27, rule 31, BP-46"
    ),
    Patch(Replica, "enter_limbo", unfenced_limbo).mutant(
        "phase one does not fence", "I27, rule 31, BP-46"
    ),
    Patch(Replica, "_may_say_no", limbo_by_name_only).mutant(
        "a new incarnation denies what it has not got back", "I27, rule 15"
    ),
    Patch(limbo, "lacking", always(())).mutant(
        "limbo ends before the copies are there", "I27, rule 15"
    ),
    Patch(limbo, "older_members", always([])).mutant(
        "limbo ends while an older incarnation is named", "I27, rule 15"
    ),
    Patch(Recovery, "_change", early_commit).mutant(
        "recovery commits its ensemble early", "X5, I24"
    ),
    Patch(Recovery, "_read_window", read_of_the_head).mutant(
        "recovery reads from the ensemble as it is now", "X6"
    ),
    Patch(Slots, "is_current", where(is_recovery=False, mutation=always(True))).mutant(
        "answers of replaced members count", "X7, I18, rule 7", SPARE
    ),
    Patch(Window, "ask", kept_acks).mutant(
        "acks of replaced members are kept", "BK#3005, rule 7", SPARE
    ),
    Patch(LedgerWriter, "_update", change_in_the_head).mutant(
        "the ensemble changes without compare-and-swap", "X8, BK#1591", SPARE
    ),
    Patch(LedgerWriter, "_uncounted", always(0)).mutant(
        "entries are confirmed while a change is under way", "X8, X9, I19, rule 6", SPARE
    ),
    Patch(Slots, "begin", eager).mutant("recovery closes before all is written back", "X10", ONE),
    Patch(Tally, "_is_absent", one_negative).mutant("one negative is enough", "X11, I16", ONE),
    Patch(Tally, "note", silence_is_no).mutant(
        "silence counts as negative",
        "X11, I16",
        Scope("one entry, one recoverer, one timeout", timeouts=1),
    ),
    Patch(Recovery, "_fence_answered", any_answer_fences).mutant(
        "any answer counts for coverage", "X11, I14, rule 13"
    ),
    Patch(Quorum, "is_covered", less_coverage).mutant("coverage is one bookie short", "I14"),
    Patch(Replica, "_is_fence_in_the_way", always(False)).mutant(
        "the fence is not checked on add", "X12, I12", ONE
    ),
    Patch(Recovery, "_metadata_answered", conflict_is_ok).mutant(
        "recovery takes a conflict for success", "X13, I4"
    ),
    Patch(LedgerWriter, "_metadata_answered", conflict_is_ok).mutant(
        "the writer takes a conflict for success", "X13, rule 6"
    ),
    Patch(Quorum, "has_ack_quorum", one_ack_less).mutant("an ack fewer confirms", "X14, I2", ONE),
    Patch(Replica, "step", told_early(tells_of_a_fence)).mutant(
        "a fence is told before it is on disk", "X20, I13, rule 3"
    ),
    Patch(Replica, "step", told_early(stores)).mutant(
        "an add is ok before it is on disk", "rule 3"
    ),
    Patch(Replica, "step", told_early(repeats)).mutant(
        "a repeated add is ok before it is on disk", "rule 3"
    ),
    Patch(Replica, "_kept_row", always(())).mutant("a bookie keeps no copy of its row", "rule 18b"),
    Patch(Slots, "_add", named_by_the_first).mutant(
        "a new member is sent the row from before it came", "rule 18b"
    ),
    Patch(Window, "forget_acks", always(None)).mutant(
        "an acknowledgement from before a change of the row counts", "rule 18b"
    ),
    Patch(Slots, "is_current", of_one_stay).mutant(
        "an acknowledgement that a change of the row overtook counts", "rule 18b"
    ),
    Patch(rebuild, "decide", asked(lambda _held: ())).mutant("a rebuild asks nobody", "rule 18d"),
    Patch(rebuild, "decide", asked(lambda held: held[:1])).mutant(
        "a rebuild asks one bookie", "rule 18d"
    ),
    Mutant(
        "a rebuild takes the highest version, whatever line it is of",
        "rule 18d",
        (
            Patch(rebuild, "_contradiction", always("")),
            Patch(rebuild, "_fork", always("")),
        ),
        draw=draw_forks,
    ),
    Patch(rebuild.Bookies, "lost_of", always(frozenset())).mutant(
        "a rebuild takes silent bookies for none", "rule 18d"
    ),
    Mutant(
        "a wiped bookie is the incarnation that rows name",
        "rule 15b",
        (
            Patch(rebuild, "stand_ins", always({})),
            Patch(changes, "check_new_incarnation", always(None)),
        ),
    ),
    Patch(rebuild.Bookies, "without_data_of", always("")).mutant(
        "a rebuild writes rows of incarnations that were given out again",
        "rules 15b and 18d",
        draw=draw_early,
    ),
    Patch(changes, "check_members", always(None)).mutant(
        "a change adds members that nobody is registered as", "rule 15b"
    ),
    Patch(Store, "_is_present", by_version).mutant(
        "a row is compared and swapped by its version alone", "rules 6 and 18a"
    ),
    Patch(Replica, "_read", hasty_negative).mutant(
        "a negative does not wait for the adds before it",
        "rule 3, I17",
        is_equivalent="a recovery read waits for its fence, which follows the adds in the same log",
    ),
    Patch(Tally, "_invalid", always(set())).mutant(
        "entries with a bad code are taken", "overview 1.4"
    ),
    Patch(record, "make", lac_of_the_pushed).mutant(
        "entries carry the last id given out as LAC", "I10", ONE
    ),
    Patch(placement, "replacements", whoever_is_named).mutant(
        "whoever is named takes a place", "I22, I31"
    ),
    Patch(LedgerWriter, "_metadata_answered", change_in_recovery).mutant(
        "IN_RECOVERY is taken for OPEN", "I24, rule 10"
    ),
    Patch(LedgerMetadata, "closed", fragments_beyond_the_end).mutant(
        "fragments beyond the end stay",
        "I23",
        is_equivalent="no fragment begins beyond the end that a writer or a recovery finds: a second belt",
    ),
    Patch(Recovery, "_measure", unmeasured).mutant("the length is not measured", "I4"),
    Patch(Slots, "is_current", where(is_recovery=True, mutation=always(True))).mutant(
        "late acks count in recovery", "I18, rule 7"
    ),
    Patch(LedgerWriter, "_may_come_back", always(True)).mutant(
        "a member that refused is used again",
        "rule 15",
        is_equivalent="it refuses again, once a second: messages, no harm",
    ),
    Patch(Recovery, "_is_same_ledger", always(True)).mutant(
        "a change of rows during recovery does not matter",
        "I24, rule 14",
        is_equivalent="only an operator who declares a member lost changes such a row: tests/unit/protocol",
    ),
    Patch(FragmentRepair, "_is_marked", always(True)).mutant(
        "a repair fills a target that metadata does not name", "rule 20"
    ),
    Patch(LedgerMetadata, "is_closed_fragment", always(True)).mutant(
        "an open fragment is repaired", "I25"
    ),
    Patch(FragmentRepair, "_send", always(None)).mutant(
        "a repair replaces before the copies are there", "I25"
    ),
    Patch(FragmentRepair, "_verify", believed).mutant(
        "a repair does not read back what it gives a place for", "rule 20a, I25", draw=draw_repairs
    ),
    Patch(Replica, "_read", remembered).mutant(
        "what a repair reads back need not be on disk", "rule 20a, I25", draw=draw_repairs
    ),
    Patch(FragmentRepair, "_second_look", always(())).mutant(
        "a change of place queues no second look", "rule 20a"
    ),
    Patch(FragmentRepair, "_give_row", let_go_at_once).mutant(
        "a repair lets go of the member before the target has its row", "rule 20b"
    ),
    Patch(FragmentRepair, "_is_same_place", always(True)).mutant(
        "a repair gives a place what was copied for another one", "I25, I22", draw=draw_moves
    ),
    Patch(FragmentRepair, "_ends_as_before", always(True)).mutant(
        "a repair that outlived a restore gives a place in a fragment of another end",
        "I25",
        draw=drawn_like(OUTLIVED),
    ),
    Patch(FragmentRepair, "_is_overtaken", always(False)).mutant(
        "a repair whose mark was replaced marks the place again",
        "rule 20, L6",
        draw=drawn_like(RIVALS),
    ),
    Patch(Slots, "take_missed", where(is_recovery=False, mutation=forgotten)).mutant(
        "the writer forgets what a member missed", "rule 8"
    ),
    Patch(Slots, "take_missed", where(is_recovery=True, mutation=forgotten)).mutant(
        "a recovery forgets what a member missed", "rule 12"
    ),
    Patch(Tally, "note", unnamed_is_no).mutant(
        "what an answer does not name is absent", "rule 1, X15, BK#2908, I16"
    ),
    Patch(slots, "part_of", whole_runs).mutant("members are sent what they do not store", "rule 1"),
    Patch(Tally, "runs", made_anew).mutant("recovery makes entries anew", "rule 2, I7, I11"),
    Patch(Recovery, "_start_reading", unread).mutant(
        "a ledger is complete up to the LAC that was found", "X19, pravega#1907", ONE
    ),
    Patch(Replica, "_has_other_bytes", always(False)).mutant(
        "other bytes under a stored id are taken for the same",
        "rule 2",
        is_equivalent="nobody sends other bytes under an id while the other rules hold: a tripwire",
    ),
    Patch(Replica, "_is_foreign", always(False)).mutant(
        "a bookie answers for another one",
        "rule 4, I28",
        is_equivalent="links of these worlds end where they should: tests/unit/net and tests/unit/bookie",
    ),
    Patch(Replica, "_is_wrong_key", always(False)).mutant(
        "a ledger's key is not checked",
        "rules 17 and 30",
        is_equivalent="ids are used once and clients are honest in these worlds: tests/unit/bookie",
    ),
    Patch(LedgerWriter, "_is_refused", always(False)).mutant(
        "a quorum that refuses is waited for",
        "rule 9",
        is_equivalent="the quorum timeout ends the handle too, ten seconds later",
    ),
)

MUTANTS: Final = (*MACHINES, *SERVICES)
