"""Ledger rows: ids, compare-and-swap, attempts, what a row may become, tombstones."""

import asyncio
from dataclasses import replace

import pytest

from quorumlog.errors import InvalidRequest, LedgerExists, NoSuchLedger, VersionConflict
from quorumlog.net.metadata_requests import new_attempt
from quorumlog.protocol.heads import LedgerHead
from quorumlog.protocol.ids import ASSIGNED_ID_END
from quorumlog.protocol.messages import CasStatus
from quorumlog.protocol.metadata import ANCESTORS_KEPT, Fragment, LedgerMetadata, State
from quorumlog.wire.bodies import HEADS_MAX, document_of
from tests.support.once import once
from tests.unit.metadata.support import DRAFT, Service, swapped


async def closed(service: Service, row: LedgerMetadata) -> LedgerMetadata:
    return await swapped(service.client, row.closed(last_entry=4, length=40))


async def test_a_created_row_is_read_back_as_it_was_sent(service: Service) -> None:
    created = await service.client.create(DRAFT)

    assert await service.client.get(created.ledger_id) == created
    assert replace(created, ledger_id=-1, attempt="", created_at="") == DRAFT
    assert created.created_at.endswith("Z")


@pytest.mark.parametrize("ledger_id", [0, 1, 77, ASSIGNED_ID_END - 1])
async def test_assigned_ids_are_not_chosen_by_callers(service: Service, ledger_id: int) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await service.client.create(replace(DRAFT, ledger_id=ledger_id))

    assert [error["pointer"] for error in refused.value.members["errors"]] == ["/row/ledger_id"]
    assert (await service.client.create(DRAFT)).ledger_id == 1


@pytest.mark.parametrize("length", [0, 16, 33])
async def test_a_ledger_key_of_a_wrong_length_is_refused(service: Service, length: int) -> None:
    with pytest.raises(InvalidRequest, match="a ledger key must have 32 bytes"):
        await service.client.create(replace(DRAFT, ledger_key=bytes(length)))


@pytest.mark.parametrize("ledger_id", [ASSIGNED_ID_END, 2**53, 2**63 - 1])
async def test_a_caller_may_choose_any_higher_id(service: Service, ledger_id: int) -> None:
    await service.client.create(replace(DRAFT, ledger_id=ledger_id))

    assert (await service.client.get(ledger_id)).ledger_id == ledger_id
    with pytest.raises(LedgerExists):
        await service.client.create(replace(DRAFT, ledger_id=ledger_id))


async def test_the_same_create_attempt_gets_the_same_ledger(service: Service) -> None:
    attempt = new_attempt()

    rows = await asyncio.gather(
        *(service.client.create(DRAFT, attempt=attempt) for _ in range(8)),
        *(service.client.create(DRAFT, once=once("key")) for _ in range(8)),
    )

    assert len({row.ledger_id for row in rows[:8]}) == 1
    assert len({row.ledger_id for row in rows[8:]}) == 1
    page, _ = await service.client.list()
    assert len(page) == 2


async def test_an_attempt_with_a_chosen_id_is_repeated_without_a_conflict(service: Service) -> None:
    attempt = new_attempt()
    draft = replace(DRAFT, ledger_id=ASSIGNED_ID_END)

    rows = await asyncio.gather(*(service.client.create(draft, attempt=attempt) for _ in range(8)))

    assert {row.ledger_id for row in rows} == {ASSIGNED_ID_END}


async def test_of_concurrent_changes_one_wins_and_the_others_see_it(service: Service) -> None:
    row = await service.client.create(DRAFT)
    wanted = [row.with_ensemble(n, ("b1@1", "b2@1", f"b{n}@1")) for n in range(10, 20)]

    answers = await asyncio.gather(*map(service.client.cas, wanted))

    winners = [now for status, now in answers if status is CasStatus.OK]
    assert len(winners) == 1
    assert {status for status, _ in answers} == {CasStatus.OK, CasStatus.CONFLICT}
    assert {now for _, now in answers} == {winners[0]}
    assert winners[0] is not None
    assert winners[0].version == 2
    assert await service.client.get(row.ledger_id) == winners[0]


async def test_a_repeated_attempt_is_applied_once(service: Service) -> None:
    row = await service.client.create(DRAFT)
    change = row.with_ensemble(5, ("b1@1", "b2@1", "b4@1"))
    attempt = new_attempt()

    answers = await asyncio.gather(*(service.client.cas(change, attempt=attempt) for _ in range(8)))

    assert answers == [answers[0]] * 8
    assert answers[0][0] is CasStatus.OK
    assert (await service.client.get(row.ledger_id)).version == 2


async def test_a_row_names_the_change_that_made_it(service: Service) -> None:
    made, changed = new_attempt(), new_attempt()

    row = await service.client.create(DRAFT, attempt=made)
    _, second = await service.client.cas(row.in_recovery(), attempt=changed)
    _, refused = await service.client.cas(row.in_recovery())
    (listed,), _ = await service.client.list()

    assert row.attempt == made
    assert second is not None
    assert second.attempt == changed
    assert second == refused == listed == await service.client.get(row.ledger_id)


async def test_a_row_lists_the_changes_that_made_the_versions_before_it(service: Service) -> None:
    attempts = [new_attempt() for _ in range(ANCESTORS_KEPT + 2)]
    claimed = (new_attempt(),)

    row = await service.client.create(replace(DRAFT, ancestors=claimed), attempt=attempts[0])
    assert row.ancestors == ()
    for number, attempt in enumerate(attempts[1:], 1):
        wanted = replace(row.in_recovery(), ancestors=claimed)
        _, changed = await service.client.cas(wanted, attempt=attempt)
        assert changed is not None
        row = changed
        assert row.ancestors == tuple(attempts[:number][-ANCESTORS_KEPT:])


async def test_a_change_of_a_row_places_no_ledger_in_a_log(service: Service) -> None:
    row = await service.client.create(replace(DRAFT, log="a-log"))

    second = await swapped(service.client, replace(row.in_recovery(), first_offset=7))
    assert second.first_offset is None


async def test_an_applied_attempt_is_answered_with_the_present_row(service: Service) -> None:
    row = await service.client.create(DRAFT)
    attempt = new_attempt()
    second = await swapped(service.client, row.in_recovery(), attempt=attempt)
    third = await closed(service, second)

    assert await service.client.cas(row.in_recovery(), attempt=attempt) == (CasStatus.OK, third)


async def test_a_repeated_conflict_is_a_conflict_again(service: Service) -> None:
    row = await service.client.create(DRAFT)
    attempt = new_attempt()
    await service.client.cas(row.in_recovery())

    first = await service.client.cas(row.in_recovery(), attempt=attempt)
    again = await service.client.cas(row.in_recovery(), attempt=attempt)

    assert first == again
    assert first[0] is CasStatus.CONFLICT


async def test_a_change_of_another_history_conflicts_by_any_version(service: Service) -> None:
    """Rule 18a: its client lived through a loss, and never saw the row that the database has."""
    row = await service.client.create(DRAFT)
    now = await swapped(service.client, row.with_ensemble(3, ("b1@1", "b2@1", "b4@1")))
    lost = replace(now, attempt=new_attempt())

    assert await service.client.cas(lost.closed(last_entry=2, length=9)) == (
        CasStatus.CONFLICT,
        now,
    )

    status, following = await service.client.cas(now.in_recovery())
    assert following is not None
    assert status is CasStatus.OK
    unknown = replace(following, attempt="")
    assert (await service.client.cas(unknown.closed(last_entry=2, length=9)))[0] is CasStatus.OK


async def test_a_deletion_by_a_row_of_another_history_conflicts(service: Service) -> None:
    """Rule 18a: what has the ledger's id and version now may be another ledger."""
    row = await closed(service, await service.client.create(DRAFT))

    with pytest.raises(VersionConflict):
        await service.client.delete(row.ledger_id, version=row.version, row_attempt=new_attempt())
    assert await service.client.get(row.ledger_id) == row

    await service.client.delete(row.ledger_id, version=row.version, row_attempt=row.attempt)
    assert (await service.client.read(row.ledger_id))[0] is CasStatus.MISSING


async def test_an_attempt_is_bound_to_its_change(service: Service) -> None:
    one, other = [await service.client.create(DRAFT) for _ in range(2)]
    attempt = new_attempt()
    await service.client.cas(one.in_recovery(), attempt=attempt)

    with pytest.raises(InvalidRequest):
        await service.client.cas(other.in_recovery(), attempt=attempt)

    assert await service.client.get(other.ledger_id) == other


THREE = DRAFT.with_ensemble(10, ("b1@1", "b2@1", "b4@1")).with_ensemble(
    20, ("b1@1", "b2@1", "b5@1")
)
CLOSED = THREE.closed(last_entry=25, length=250)
RECOVERY = THREE.in_recovery()
ILLEGAL = [
    (THREE, replace(THREE, ledger_key=b"\x02" * 32), "the key changes"),
    (THREE, replace(THREE, custom=()), "the metadata changes"),
    (THREE, replace(THREE, writer=None), "the writer changes"),
    (THREE, replace(THREE, fragments=THREE.fragments[:2]), "a border goes"),
    (THREE, replace(THREE, fragments=THREE.fragments[::2]), "a border goes in the middle"),
    (
        THREE,
        replace(
            THREE,
            fragments=(*THREE.fragments[:1], Fragment(9, ("b1@1", "b2@1", "b4@1"))),
        ),
        "a border moves",
    ),
    (THREE, replace(THREE, fragments=THREE.fragments[:2]).closed(last_entry=15, length=1), "I22"),
    (RECOVERY, replace(RECOVERY, state=State.OPEN), "recovery goes back"),
    (RECOVERY, RECOVERY.with_ensemble(30, ("b1@1", "b2@1", "b6@1")), "I24: appended"),
    (RECOVERY, RECOVERY.with_ensemble(20, ("b1@1", "b2@1", "b6@1")), "I24: replaced"),
    (THREE, RECOVERY.with_ensemble(20, ("b1@1", "b2@1", "b6@1")), "I24: on the way"),
    (CLOSED, THREE, "closed is opened"),
    (CLOSED, RECOVERY, "closed is recovered"),
    (CLOSED, replace(CLOSED, last_entry=24), "I4: the end moves down"),
    (CLOSED, replace(CLOSED, last_entry=26), "I4: the end moves up"),
    (CLOSED, replace(CLOSED, length=251), "I4: the length changes"),
    (CLOSED, CLOSED.with_ensemble(26, ("b1@1", "b2@1", "b6@1")), "I4: a fragment is added"),
    (
        replace(THREE, declared_lost=("b1@1",), may_lack_entries=True),
        replace(THREE, may_lack_entries=True),
        "the lost are forgotten",
    ),
    (replace(THREE, may_lack_entries=True), THREE, "what may lack is forgotten"),
    (THREE, CLOSED.given_up(3, 4, ()), "rule 31: given up with the close"),
    (CLOSED.given_up(3, 4, ()), replace(CLOSED, may_lack_entries=True), "rule 31: taken back"),
    (CLOSED.given_up(3, 4, ()), CLOSED.given_up(4, 9, ()), "rule 31: a part is taken back"),
    (
        CLOSED,
        replace(CLOSED.with_member_replaced(1, "b4@1", "b9@1"), repairs=()),
        "rule 20b: let go with the change of the place",
    ),
]


async def test_an_illegal_change_is_refused_and_changes_nothing(service: Service) -> None:
    for before, after, why in ILLEGAL:
        row = await _stepwise(service, before)

        with pytest.raises(InvalidRequest):
            await service.client.cas(replace(after, ledger_id=row.ledger_id, version=row.version))

        assert await service.client.get(row.ledger_id) == row, why


async def _stepwise(service: Service, wanted: LedgerMetadata) -> LedgerMetadata:
    """A row that became `wanted` in legal steps."""
    row = await service.client.create(
        replace(wanted, fragments=wanted.fragments[:1], state=State.OPEN, last_entry=None,
                length=None, declared_lost=(), may_lack_entries=False, lost_entries=())
    )  # fmt: skip
    closed = replace(wanted, lost_entries=())
    opened = replace(closed, state=State.OPEN, last_entry=None, length=None)
    for step in (opened, closed, wanted):
        now = await swapped(
            service.client,
            replace(step, ledger_id=row.ledger_id, version=row.version, created_at=row.created_at),
        )
        row = now
    return row


async def test_a_repair_may_change_who_holds_a_closed_fragment(service: Service) -> None:
    row = await _stepwise(service, CLOSED)

    now = await swapped(service.client, row.with_member_replaced(1, "b4@1", "b9@1"))
    assert now.fragments[1].bookies == ("b1@1", "b2@1", "b9@1")


async def test_a_member_that_lost_its_place_is_listed_until_it_is_let_go(service: Service) -> None:
    """Rule 20b: a drain or a decommission that does not see it would take away what an older row names."""
    row = await _stepwise(service, CLOSED)
    moved = await swapped(service.client, row.with_member_replaced(1, "b4@1", "b9@1"))

    listed = await service.client.list(bookie="b4")
    _, released = await service.client.cas(moved.with_leaving_released(10, "b9@1"))

    assert listed == ([moved], None)
    assert released is not None
    assert released.fragments == moved.fragments
    assert await service.client.list(bookie="b4") == ([], None)


async def test_lost_entries_of_a_closed_ledger_only_grow(service: Service) -> None:
    """Rule 31."""
    row = await _stepwise(service, CLOSED)

    for first, last in ((3, 4), (8, 8), (5, 9)):
        now = await swapped(service.client, row.given_up(first, last, ("b1@1",)))
        row = now

    assert row.lost_entries == ((3, 9),)
    assert await service.client.get(row.ledger_id) == row


async def test_a_recovery_may_commit_its_ensemble_change_with_the_end(service: Service) -> None:
    row = await _stepwise(service, RECOVERY)
    changed = row.with_ensemble(22, ("b1@1", "b2@1", "b7@1"))

    status, _ = await service.client.cas(changed.closed(last_entry=25, length=1))

    assert status is CasStatus.OK


async def test_only_a_closed_ledger_is_deleted(service: Service) -> None:
    row = await service.client.create(DRAFT)

    with pytest.raises(InvalidRequest):
        await service.client.delete(row.ledger_id, version=row.version)

    assert await service.client.get(row.ledger_id) == row


async def test_a_tombstone_keeps_the_id_for_ever(service: Service) -> None:
    chosen = replace(DRAFT, ledger_id=ASSIGNED_ID_END)
    row = await closed(service, await service.client.create(chosen))
    attempt = new_attempt()
    await service.client.delete(ASSIGNED_ID_END, version=row.version, attempt=attempt)

    await service.client.delete(ASSIGNED_ID_END, version=row.version, attempt=attempt)

    with pytest.raises(NoSuchLedger) as missing:
        await service.client.get(ASSIGNED_ID_END)
    assert missing.value.members["deleted"] is True
    assert await service.client.read(ASSIGNED_ID_END) == (CasStatus.MISSING, None)
    assert await service.client.cas(row) == (CasStatus.MISSING, None)
    with pytest.raises(NoSuchLedger):
        await service.client.delete(ASSIGNED_ID_END, version=row.version)
    with pytest.raises(LedgerExists):
        await service.client.create(chosen)
    assert (await service.client.create(DRAFT)).ledger_id == 1


async def test_a_ledger_that_never_existed_is_not_reported_as_deleted(service: Service) -> None:
    with pytest.raises(NoSuchLedger) as missing:
        await service.client.get(5)

    assert missing.value.members["deleted"] is False
    assert await service.client.read(5) == (CasStatus.UNKNOWN, None)


async def test_heads_give_the_writers_of_many_ledgers(service: Service) -> None:
    rows = [await service.client.create(DRAFT) for _ in range(4)]
    recovering = (await service.client.cas(rows[1].in_recovery()))[1]
    ended = await closed(service, rows[2])
    gone = await closed(service, rows[3])
    await service.client.delete(gone.ledger_id, version=gone.version)
    never = rows[3].ledger_id + 1000

    heads = await service.client.heads([never, *(row.ledger_id for row in reversed(rows))])

    assert recovering is not None
    writer = "gateway-1"
    assert list(heads.values()) == [
        LedgerHead(rows[0].ledger_id, 1, State.OPEN, writer),
        LedgerHead(rows[1].ledger_id, recovering.version, State.IN_RECOVERY, writer),
        LedgerHead(rows[2].ledger_id, ended.version, State.CLOSED, writer),
        LedgerHead(rows[3].ledger_id, gone.version + 1, None),
    ]
    assert await service.client.heads([]) == {}


async def test_heads_are_asked_for_in_limits(service: Service) -> None:
    assert await service.client.heads(range(HEADS_MAX)) == {}

    status, problem = await service.send(
        "POST", "/v1/ledger-heads", {"ledgers": list(range(HEADS_MAX + 1))}
    )

    assert (status, problem["code"]) == (422, "invalid")


async def test_a_delete_from_another_version_is_a_conflict(service: Service) -> None:
    row = await closed(service, await service.client.create(DRAFT))

    with pytest.raises(VersionConflict):
        await service.client.delete(row.ledger_id, version=row.version - 1)


BAD_BODIES = [
    (b"{", 400, "bad-request"),
    (b"", 422, "invalid"),
    (b"[]", 422, "invalid"),
    (b'{"row":{},"attempt":"x"}', 422, "invalid"),
    (b"\xff", 400, "bad-request"),
]


async def test_a_bad_body_is_a_4xx(service: Service) -> None:
    for body, status, code in BAD_BODIES:
        for method, path in (("POST", "/v1/ledgers"), ("PUT", "/v1/ledgers/1")):
            answered, problem = await service.send(method, path, body)

            assert (answered, problem["code"]) == (status, code)


UNREADABLE = ["/v1/ledgers/x", "/v1/ledgers/01", "/v1/ledgers?limit=1&limit=2"]
NOT_ALLOWED = [
    "/v1/ledgers/-1",
    "/v1/ledgers/9223372036854775808",
    "/v1/ledgers?state=SEALED",
    "/v1/ledgers?limit=0",
    "/v1/ledgers?limit=10001",
    "/v1/ledgers?after=-1",
    "/v1/ledgers?colour=red",
    "/v1/ledgers?bookie=a@b@1",
    "/v1/ledgers?log=%00",
    "/v1/ledgers?metadata[a]=%00",
    "/v1/ledgers/1?x=1",
    "/v1/bookies?x=1",
    "/v1/bookies/..%2f/cookie",
]


async def test_a_bad_address_is_a_4xx(service: Service) -> None:
    cases = (
        *((path, 400, "bad-request") for path in UNREADABLE),
        *((path, 422, "invalid") for path in NOT_ALLOWED),
    )
    for path, *expected in cases:
        status, problem = await service.send("GET", path)

        assert [status, problem["code"]] == expected, path


async def test_a_path_and_a_row_of_different_ledgers_are_refused(service: Service) -> None:
    row = await service.client.create(DRAFT)
    body = {"row": document_of(row), "attempt": new_attempt()}

    status, problem = await service.send("PUT", f"/v1/ledgers/{row.ledger_id + 1}", body)

    assert (status, problem["code"]) == (422, "invalid")


async def test_a_version_in_the_header_must_be_the_rows(service: Service) -> None:
    row = await service.client.create(DRAFT)
    body = {"row": document_of(row), "attempt": new_attempt()}
    path = f"/v1/ledgers/{row.ledger_id}"

    refused, _ = await service.send("PUT", path, body, headers={"If-Match": '"2"'})
    taken, now = await service.send("PUT", path, body, headers={"If-Match": '"1"'})

    assert refused == 422
    assert (taken, now["version"]) == (200, 2)
