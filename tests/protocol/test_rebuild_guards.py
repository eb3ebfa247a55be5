"""Guards of rule 18d, each taken out once: a claim of `test_rebuild` must miss it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import pytest

from quorumlog.protocol import rebuild, rebuild_log
from quorumlog.protocol.ids import member_incarnation, member_name
from quorumlog.protocol.log import LogMetadata, LogSettings
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.rebuild import Bookies
from quorumlog.protocol.rebuild_log import LedgerPlace
from tests.mutants.hunt import Guard, applied, swap
from tests.protocol import test_rebuild as claims

Found: Final = rebuild_log._Found


def silent_bookies_are_none() -> Callable[..., int]:
    return lambda _bookies, _row: 0


def nothing_wrong(*_given: object) -> str:
    return ""


def forks() -> None:
    copies = [claims.FIRST, claims.later(claims.MOVED)]
    known = claims.known(claims.later(claims.FIRST, "z"), "a1")
    claims.test_copies_that_contradict_each_other_or_the_row_are_told(
        known, copies, "nothing tells"
    )


def two_ends() -> None:
    copies = [claims.CLOSED, claims.closed(claims.FIRST, 3, "z")]
    claims.test_copies_that_contradict_each_other_or_the_row_are_told(None, copies, "several ends")


def overlaps() -> None:
    ledgers = [claims.ledger(1, 0, 4), claims.ledger(2, 4)]
    claims.test_an_end_beyond_the_next_beginning_is_told(
        ledgers, "ledger 1 ends at 5, and ledger 2 begins at 4"
    )


WITH_ITEMS: Final = rebuild_log._with_items


def knowing_producers(row: LogMetadata, *given: Any, **named: Any) -> LogMetadata:
    return replace(WITH_ITEMS(row, *given, **named), forgotten_end=row.forgotten_end)


GUARDS: Final = (
    swap(Bookies, "lost_of", silent_bookies_are_none()).guard(
        "an open row is written whoever is silent",
        "rule 18d",
        claims.test_an_open_row_waits_where_as_many_bookies_are_silent_as_may_have_confirmed_more,
    ),
    swap(Bookies, "lost_of", lambda bookies, _row: len(bookies.silent)).guard(
        "a bookie that lost its data is asked as any other",
        "rule 18d",
        claims.test_a_bookie_that_lost_its_data_counts_as_silent,
    ),
    swap(
        Bookies,
        "lost_of",
        lambda bookies, row: len(
            bookies.silent
            | {
                member_name(m)
                for m in row.all_members
                if member_incarnation(m) < bookies.answering.get(member_name(m), 0)
            }
        ),
    ).guard(
        "a bookie that answers as an older incarnation has its data",
        "rule 18d",
        partial(claims.test_a_bookie_that_answers_as_another_incarnation_lost_its_data, 1),
    ),
    swap(Bookies, "without_data_of", lambda _bookies, _row: "").guard(
        "a row is written though a new directory is registered as its member",
        "rule 18d",
        partial(
            claims.test_no_row_is_written_whose_member_a_new_directory_is_registered_as,
            2,
            "2026-02-01",
            is_written=False,
        ),
    ),
    swap(claims, "stand_ins", lambda _named, _present: {}).guard(
        "no cookie stands in for a bookie that did not answer",
        "rule 18d",
        claims.test_a_cookie_stands_in_for_each_later_incarnation_that_copies_name,
    ),
    swap(
        rebuild, "_is_deletion_proven", lambda held: any(bookie.is_deleted for bookie in held)
    ).guard(
        "only an id that was dropped is one of a deleted ledger",
        "rule 18d",
        claims.test_a_copy_of_a_tombstone_is_one_whatever_other_bookies_hold,
    ),
    swap(LedgerMetadata, "deleted", lambda row, attempt="": claims.later(row, attempt)).guard(
        "what members hear of a deletion is the last row",
        "rule 18d",
        claims.test_a_copy_of_a_tombstone_is_one_whatever_other_bookies_hold,
    ),
    swap(rebuild, "_fork", nothing_wrong).guard(
        "a higher version comes of any lower one", "rule 18d", forks
    ),
    swap(rebuild, "_is_moved", lambda _known, _newest, _keeping: False).guard(
        "a CLOSED row stays where no copy tells the steps of its repairs",
        "rule 18d",
        claims.test_a_closed_row_is_moved_by_a_later_copy_though_nobody_tells_the_steps_between,
    ),
    swap(rebuild, "_but_members", lambda row: row.last_entry).guard(
        "a CLOSED row is moved though more than its members differs",
        "rule 18d",
        claims.test_a_closed_row_is_moved_by_a_later_copy_though_nobody_tells_the_steps_between,
    ),
    swap(
        rebuild,
        "_is_moved",
        lambda known, newest, _keeping: rebuild._but_members(known) == rebuild._but_members(newest),
    ).guard(
        "a CLOSED row is moved to members that may have dropped their entries",
        "rule 18d",
        claims.test_a_closed_row_is_not_moved_to_members_that_may_have_dropped_their_entries,
    ),
    swap(rebuild, "_placed", lambda known, _rows: known).guard(
        "a place that the database lacks is no change",
        "rule 18d",
        claims.test_a_row_gets_the_place_in_its_log_that_its_copies_tell,
    ),
    swap(rebuild, "_contradiction", nothing_wrong).guard(
        "one of two ends is written", "rule 18d", two_ends
    ),
    swap(Found, "misplaced", nothing_wrong).guard(
        "places of a log may overlap", "rule 18d", overlaps
    ),
    swap(Found, "without_empty", lambda _found, items: items).guard(
        "an empty ledger takes the place of the one behind it",
        "rule 18d",
        claims.test_an_empty_ledger_has_no_place_but_at_the_end,
    ),
    swap(Found, "_is_passed_over", lambda *_given: False).guard(
        "a ledger that was passed over takes the place of the one behind it",
        "rule 18d",
        claims.test_a_ledger_that_got_no_record_before_the_database_went_back_gives_its_place_to_another,
    ),
    swap(Found, "missing", property(lambda _found: [])).guard(
        "a ledger ends where the next one that is held begins",
        "rule 18d",
        claims.test_a_ledger_that_nobody_holds_keeps_its_place_and_is_told,
    ),
    swap(Found, "gap", nothing_wrong).guard(
        "a hole of which nobody knows the beginning is closed",
        "rule 18d",
        claims.test_a_hole_of_which_only_the_end_is_known_is_told_and_not_closed,
    ),
    swap(Found, "not_let_go", lambda _found, items, _deleted: items).guard(
        "what a log let go of comes back",
        "rule 18d",
        claims.test_what_the_log_let_go_of_before_a_ledger_was_placed_does_not_come_back,
    ),
    swap(LedgerPlace, "log_created_at", "").guard(
        "a log's name is the log",
        "rule 18d",
        claims.test_a_ledger_of_an_earlier_log_of_the_name_is_not_in_a_later_one,
    ),
    swap(Found, "hides_next", lambda _found, _items: False).guard(
        "a lost log ends where those who answer know no further ledger",
        "rule 18d",
        claims.test_a_lost_log_whose_next_ledger_may_be_on_silent_bookies_waits,
    ),
    swap(Found, "unexplained", nothing_wrong).guard(
        "a ledger that is deleted in the middle of a log is none of it, whoever tells",
        "rule 18d",
        claims.test_a_deleted_ledger_that_had_no_records_was_only_passed_over,
    ),
    swap(rebuild_log, "_with_items", knowing_producers).guard(
        "a rebuilt log knows its producers",
        "rule 18d",
        claims.test_a_lost_log_is_its_ledgers_by_place_and_has_forgotten_every_producer,
    ),
    swap(
        rebuild_log,
        "LogSettings",
        lambda quorum, digest, **_more: LogSettings(quorum=quorum, digest=digest),
    ).guard(
        "a lost log has no metadata",
        "rule 18d",
        claims.test_a_lost_log_has_the_settings_that_its_owner_gave_to_its_ledgers,
    ),
    swap(LedgerPlace, "published_ms", 0).guard(
        "what was published has the times of its writing",
        "rule 18d",
        claims.test_what_a_transaction_published_keeps_the_time_of_its_publication,
    ),
    swap(rebuild_log, "_stream_seq", lambda row, _ledgers: row.stream_seq).guard(
        "a lost log has no stream sequence",
        "rule 18d",
        claims.test_a_stream_sequence_comes_back_as_it_was_before_the_last_ledger,
    ),
    swap(rebuild_log, "NEW_LOG_VERSION", 1).guard(
        "a log begins anew at a version that somebody may name",
        "rule 18d",
        claims.test_a_lost_log_is_its_ledgers_by_place_and_has_forgotten_every_producer,
    ),
    swap(rebuild, "_contains", lambda known, row: row.attempt in known.attempts).guard(
        "a row without a token is never contained",
        "rule 18d",
        claims.test_a_row_of_before_tokens_is_compared_by_its_version,
    ),
)


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_a_guard_that_is_taken_out_is_missed(guard: Guard) -> None:
    guard.claim()

    with applied(guard), pytest.raises(AssertionError):
        guard.claim()
