"""Work queues over HTTP: claims, settlements, dead letters. The ledgers behind are the model's."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, TypeVar

import pytest

from quorumlog import errors
from quorumlog.protocol import queues as protocol_queues
from quorumlog.protocol.batch import BATCH_BYTES_MAX
from quorumlog.protocol.queue_requests import BeginMove
from services.gateway.edge.consumer_models import LEASE_MS_MAX
from services.gateway.edge.queue_models import QueueClaimed, QueueList, QueueModel, QueueSettled
from services.gateway.logs import consumers, queues
from services.gateway.logs import dead_letters as moves
from services.gateway.logs.manager import LogManager
from services.gateway.logs.sweep import Sweep
from tests.model.logs.model import Store
from tests.support.waiting import until, within
from tests.unit.logs.support import Answer, Http
from tests.unit.positions.test_http import LOG, append, code, served

T = TypeVar("T")

MAIL = f"{LOG}/queues/mail"
DEAD = "/v1/logs/dead"


@pytest.fixture
async def http() -> AsyncIterator[Http]:
    async with served() as (found, _):
        yield found


async def put(http: Http, **settings: Any) -> Any:
    return await http.done("PUT", MAIL, settings)


async def claim(http: Http, count: int = 100, *, at: int = 0, wait_ms: int = 0) -> list[Any]:
    body = {"max": count, "wait_ms": wait_ms}
    answer = await http.done("POST", f"{MAIL}/claim?encoding=text", body, at=at)
    QueueClaimed.model_validate(answer)
    records: list[Any] = answer["records"]
    return records


async def settle(http: Http, how: str, records: list[Any], *, at: int = 0, **more: Any) -> Any:
    parts: dict[int, list[int]] = {}
    for record in records:
        parts.setdefault(record["claim"], []).append(record["offset"])
    claims = [{"claim": token, "offsets": offsets} for token, offsets in parts.items()]
    answer = await http.done("POST", f"{MAIL}/{how}", {"claims": claims, **more}, at=at)
    QueueSettled.model_validate(answer)
    return answer


def offsets(records: list[Any]) -> list[int]:
    return [record["offset"] for record in records]


async def test_records_are_claimed_acknowledged_and_not_given_again(http: Http) -> None:
    shown = await put(http)
    QueueModel.model_validate(shown)
    first = await claim(http, 4)
    second = await claim(http, 100, at=1)
    assert (offsets(first), offsets(second)) == ([0, 1, 2, 3], [4, 5, 6, 7, 8, 9])
    assert [(one["text"], one["attempt"]) for one in first] == [(str(n), 1) for n in range(4)]
    assert len({one["claim"] for one in first}) == 1
    assert await settle(http, "ack", first + second[1:], at=1) == {"done": 9, "refused": []}
    shown = await http.done("GET", MAIL, at=1)
    assert (shown["floor"], shown["depth"], shown["in_flight"]) == (4, 1, 1)
    assert await claim(http) == []
    assert await settle(http, "nak", second[:1]) == {"done": 1, "refused": []}
    (again,) = await claim(http, at=1)
    assert (again["offset"], again["attempt"]) == (4, 2)
    stale = await settle(http, "ack", second[:2])
    assert [(one["offsets"], one["reason"]) for one in stale["refused"]] == [
        ([5], "acknowledged"),
        ([4], "claim-ended"),
    ]
    assert (await settle(http, "ack", [again]))["done"] == 1
    shown = await http.done("GET", MAIL)
    assert (shown["floor"], shown["depth"], shown["redelivered"]) == (10, 0, 1)


async def test_a_claim_that_does_not_wait_sees_what_was_acknowledged_before(http: Http) -> None:
    await http.done("PUT", "/v1/logs/new", {})
    await http.done("PUT", "/v1/logs/new/queues/mail", {})
    for at in (0, 1):
        empty = await http.done("POST", "/v1/logs/new/queues/mail/claim", {"max": 5}, at=at)
        assert empty["records"] == []
    for number in range(3):
        await http.done("POST", "/v1/logs/new/records", {"text": str(number)}, at=number % 2)
        await http.done("POST", "/v1/logs/new/roll", at=number % 2)
        found = await http.done(
            "POST", "/v1/logs/new/queues/mail/claim?encoding=text", {"max": 5}, at=number % 2
        )
        assert [one["text"] for one in found["records"]] == [str(number)]


async def test_a_claim_acknowledges_earlier_records_by_the_same_append(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[Any] = []
    original = queues.QueueService._changed

    def counted(self: Any, batch: Any) -> None:
        batches.append(batch)
        original(self, batch)

    await put(http)
    token = (await claim(http, 3))[0]["claim"]
    monkeypatch.setattr(queues.QueueService, "_changed", counted)
    for at in (0, 1):  # the owner of the log of queues, and another gateway
        body = {"max": 2, "ack": [{"claim": token, "offsets": [2 * at]}, {"claim": 1}]}
        answer = await http.done("POST", f"{MAIL}/claim", body, at=at)
        QueueClaimed.model_validate(answer)
        assert offsets(answer["records"]) == [3 + 2 * at, 4 + 2 * at]
        assert answer["refused"] == [{"claim": 1, "offsets": [], "reason": "claim-ended"}]
    assert len(batches) == 2
    shown = await http.done("GET", MAIL)
    assert (shown["floor"], shown["depth"]) == (1, 8)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The queues of claims, once for each time that a claim begins to wait."""
    begun: list[Any] = []
    original = queues.QueueService._watch_tail

    def noted(self: Any, key: Any, *rest: Any, **more: Any) -> None:
        original(self, key, *rest, **more)
        begun.append(key)

    monkeypatch.setattr(queues.QueueService, "_watch_tail", noted)
    return begun


async def woken(claiming: "asyncio.Task[T]") -> T:
    """The answer to a claim that waits for 60 s, before it would ask for the last time by itself."""
    async with within("the claim is woken", 45):
        return await claiming


async def test_a_claim_waits_for_records_and_for_one_that_is_given_back(
    http: Http, waits: list[Any]
) -> None:
    await put(http, lease_ms=LEASE_MS_MAX)
    first = await claim(http)
    waiting = asyncio.create_task(claim(http, wait_ms=60_000, at=1))
    await until(lambda: bool(waits), "the claim waits")
    await append(http, 1)
    assert offsets(await woken(waiting)) == [10]
    waits.clear()
    waiting = asyncio.create_task(claim(http, wait_ms=60_000))
    await until(lambda: bool(waits), "the claim waits")
    await settle(http, "nak", first[:2])
    assert offsets(await woken(waiting)) == [0, 1]
    assert await claim(http, wait_ms=100) == []


async def test_a_change_wakes_one_waiting_claim_and_each_that_gets_records_the_next(
    http: Http, monkeypatch: pytest.MonkeyPatch, waits: list[Any]
) -> None:
    takes: list[str] = []
    original = queues.QueueService._asked

    async def counted(self: Any, asked: Any) -> Any:
        takes.append(asked.queue)
        return await original(self, asked)

    await put(http, lease_ms=LEASE_MS_MAX)
    first = await claim(http)
    monkeypatch.setattr(queues.QueueService, "_asked", counted)
    waiting = [asyncio.create_task(claim(http, 1, wait_ms=60_000)) for _ in range(8)]
    await until(lambda: len(waits) >= 8, "all claims wait")
    assert len(takes) == 8
    for record in first[8:]:
        await settle(http, "ack", [record])
    await until(lambda: len(waits) >= 8 + 2, "the claims that were woken wait again")
    await asyncio.sleep(0.2)  # no further claim is woken
    assert len(takes) == 8 + 2
    await settle(http, "nak", first[:8])
    found = [offset for each in waiting for offset in offsets(await woken(each))]
    assert sorted(found) == list(range(8))


async def test_a_waiting_claim_that_ends_wakes_the_next_one(http: Http, waits: list[Any]) -> None:
    await put(http, lease_ms=LEASE_MS_MAX)
    first = await claim(http)
    gone = asyncio.create_task(claim(http, 1, wait_ms=60_000))
    await until(lambda: len(waits) >= 1, "the first claim waits")
    waiting = asyncio.create_task(claim(http, 1, wait_ms=60_000))
    await until(lambda: len(waits) >= 2, "the second claim waits")
    gone.cancel()
    await settle(http, "nak", first[:1])
    assert offsets(await woken(waiting)) == [0]


async def test_a_claim_that_fails_after_it_was_woken_wakes_the_next_one(
    http: Http, monkeypatch: pytest.MonkeyPatch, waits: list[Any]
) -> None:
    takes: list[str] = []
    original = queues.QueueService._asked

    async def fails_third(self: Any, asked: Any) -> Any:
        takes.append(asked.queue)
        if len(takes) == 3:
            raise errors.QuorumTimeout("the owner did not answer")
        return await original(self, asked)

    await put(http, **{"from": "latest"})
    monkeypatch.setattr(queues.QueueService, "_asked", fails_third)
    body = {"max": 1, "wait_ms": 60_000}
    failing = asyncio.create_task(http.ask("POST", f"{MAIL}/claim", body))
    await until(lambda: len(waits) >= 1, "the first claim waits")
    waiting = asyncio.create_task(claim(http, 1, wait_ms=60_000))
    await until(lambda: len(waits) >= 2, "the second claim waits")
    assert len(takes) == 2
    await append(http, 1)
    assert (await woken(failing)).status == 504
    assert offsets(await woken(waiting)) == [10]


async def test_a_claim_whose_acknowledgement_fails_gives_its_records_back(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = queues.QueueService.submit

    def failing(self: Any, request: Any, stamp: Any = None) -> Any:
        if getattr(request, "kind", "") != "ack":
            return original(self, request, stamp)
        lost = asyncio.get_running_loop().create_future()
        lost.set_exception(errors.QuorumTimeout("the owner did not answer"))
        return lost

    await put(http)
    token = (await claim(http, 3))[0]["claim"]
    monkeypatch.setattr(queues.QueueService, "submit", failing)
    body = {"ack": [{"claim": token}], "wait_ms": 20_000}
    assert (await http.ask("POST", f"{MAIL}/claim", body)).status == 504
    again = await claim(http, wait_ms=60_000)
    assert [(one["offset"], one["attempt"]) for one in again] == [(n, 1) for n in range(3, 10)]


async def test_a_claim_asks_again_if_its_keys_are_outdated_and_another_claim_knows_newer_ones(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol_queues, "KEYS_MAX", 1)
    await put(http, order="key")
    first = await claim(http, 1)
    original, take = queues.QueueService._asked, queues.QueueService._take
    has_records: list[bool] = []

    async def noted(self: Any, *of_claim: Any) -> Any:
        taken = await take(self, *of_claim)
        has_records.append(bool(taken.records))
        return taken

    async def late(self: Any, asked: Any) -> Any:
        monkeypatch.setattr(queues.QueueService, "_asked", original)
        await settle(http, "ack", first)
        await settle(http, "nak", await claim(http, 1))
        return await original(self, asked)

    monkeypatch.setattr(queues.QueueService, "_take", noted)
    monkeypatch.setattr(queues.QueueService, "_asked", late)
    assert offsets(await claim(http, 1)) == [1]
    assert has_records == [True, True]


async def test_a_lease_that_ends_gives_the_record_again(
    monkeypatch: pytest.MonkeyPatch, waits: list[Any]
) -> None:
    now_s = 0.0
    async with served() as (http, cluster):
        for gateway in cluster.gateways.values():
            monkeypatch.setattr(gateway.logs.queues, "_monotonic_s", lambda: now_s)
        await put(http, lease_ms=1000)
        first = await claim(http)
        now_s += 0.6
        await settle(http, "extend", first)
        now_s += 0.6
        assert await claim(http) == []
        waiting = asyncio.create_task(claim(http, wait_ms=60_000))
        await until(lambda: bool(waits), "the claim waits")
        now_s += 0.6
        again = await woken(waiting)
        stale = await settle(http, "ack", first)
    assert [(one["offset"], one["attempt"]) for one in again] == [(n, 2) for n in range(10)]
    assert stale["done"] == 0
    assert stale["refused"][0]["reason"] == "claim-ended"


async def test_a_record_is_a_dead_letter_after_its_attempts_and_is_sent_back_once(
    http: Http,
) -> None:
    await http.done("PUT", DEAD, {})
    await put(http, max_attempts=2, dead_letter_log="dead")
    records = await claim(http)
    await settle(http, "ack", [one for one in records if one["offset"] not in (3, 5)])
    bad = [one for one in records if one["offset"] in (3, 5)]
    await settle(http, "nak", bad)
    await settle(http, "nak", await claim(http, at=1), reason="no such address")

    async def dead() -> Any:
        return (await http.done("GET", MAIL))["dead"] == 2

    await until(dead, "two dead letters")
    assert await claim(http) == []
    letters = (await http.done("GET", f"{DEAD}/records?encoding=text"))["records"]
    assert [one["text"] for one in letters] == ["3", "5"]
    headers = letters[1]["headers"]
    for added in ("Queue-Move", "Dead-Letter-Timestamp-Ms"):
        headers.pop(added)
    assert headers == {
        "Dead-Letter-Log": "log",
        "Dead-Letter-Queue": "mail",
        "Dead-Letter-Offset": "5",
        "Dead-Letter-Attempts": "2",
        "Dead-Letter-Reason": "no such address",
    }
    assert (await http.done("GET", MAIL))["floor"] == 10
    assert await http.done("POST", f"{MAIL}/redrive", {"max": 1}, at=1) == {"redriven": 1}
    assert await http.done("POST", f"{MAIL}/redrive", {}) == {"redriven": 1}
    assert await http.done("POST", f"{MAIL}/redrive", {}) == {"redriven": 0}
    again = await claim(http)
    assert [(one["text"], one["offset"], one["attempt"]) for one in again] == [
        ("3", 10, 1),
        ("5", 11, 1),
    ]
    assert again[0]["headers"]["Redriven-From"] == "dead/0"


async def dead_letters(http: Http, count: int) -> Any:
    async def dead() -> Any:
        return (await http.done("GET", MAIL))["dead"] == count

    await until(dead, f"{count} dead letters")
    return (await http.done("GET", f"{DEAD}/records?encoding=text"))["records"]


async def test_many_dead_letters_with_long_reasons_are_sent_in_appends_that_are_not_too_large(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "_MOVE_BYTES", 10_000)
    await http.done("PUT", DEAD, {})
    await put(http, max_attempts=1, dead_letter_log="dead")
    await settle(http, "nak", await claim(http), reason="\N{GRINNING FACE}" * 500)
    letters = await dead_letters(http, 10)
    assert [one["headers"]["Dead-Letter-Offset"] for one in letters] == [str(n) for n in range(10)]
    assert len({one["headers"]["Queue-Move"] for one in letters}) == 3  # 4 x 2,300 bytes in each


@pytest.mark.parametrize(("reads", "scanned", "count"), [(2, 3, 2), (2, 1, 3), (1, 9, 1)])
async def test_a_move_has_the_scattered_dead_letters_that_a_few_reads_find(
    http: Http, monkeypatch: pytest.MonkeyPatch, reads: int, scanned: int, count: int
) -> None:
    """A gateway that is soon killed must still finish a step of a move."""
    monkeypatch.setattr(moves, "_MOVE_READS", reads)
    monkeypatch.setattr(moves, "_SCANNED", scanned)
    await http.done("PUT", DEAD, {})
    await put(http, max_attempts=1, dead_letter_log="dead")
    records = await claim(http)
    await settle(http, "ack", records[1::2])
    await settle(http, "nak", records[::2])
    letters = await dead_letters(http, 5)
    offsets = [one["headers"]["Dead-Letter-Offset"] for one in letters]
    assert offsets == ["0", "2", "4", "6", "8"]
    assert len({one["headers"]["Queue-Move"] for one in letters}) == count
    assert (await http.done("GET", MAIL))["floor"] == 10


@pytest.mark.parametrize(("room", "headers"), [(600, 6), (150, 1), (95, 0)])
async def test_a_record_that_is_almost_too_large_is_moved_with_fewer_headers(
    http: Http, room: int, headers: int
) -> None:
    await http.done("PUT", DEAD, {})
    await http.done("PUT", MAIL, {"from": "latest"})
    value = "x" * (BATCH_BYTES_MAX - room)
    await http.done("POST", f"{LOG}/records", {"records": [{"text": value}]})
    await put(http, max_attempts=1, dead_letter_log="dead")
    (one,) = await claim(http)
    await settle(http, "nak", [one], reason="x" * 500)
    (letter,) = await dead_letters(http, 1)
    assert (len(letter["text"]), len(letter.get("headers") or {})) == (len(value), headers)
    assert (await http.done("GET", MAIL))["depth"] == 0


async def test_a_record_that_no_move_has_room_for_is_counted_as_lost(http: Http) -> None:
    await http.done("PUT", DEAD, {})
    value = "x" * (BATCH_BYTES_MAX - 50)
    await http.done("POST", f"{LOG}/records", {"records": [{"text": value}]})
    await put(http, max_attempts=1, dead_letter_log="dead")
    await settle(http, "nak", await claim(http))
    await dead_letters(http, 10)

    async def lost() -> Any:
        return (await http.done("GET", MAIL))["lost"] == 1

    await until(lost, "the record is counted")
    assert (await http.done("GET", MAIL))["depth"] == 0


async def test_dead_letters_go_to_a_log_that_was_made_again_and_back_to_none(http: Http) -> None:
    await http.done("PUT", DEAD, {})
    await put(http, max_attempts=1, dead_letter_log="dead")
    await settle(http, "nak", await claim(http, 2))
    await dead_letters(http, 2)
    assert await http.done("POST", f"{MAIL}/redrive", {}) == {"redriven": 2}
    await http.ask("DELETE", DEAD)
    await http.done("PUT", DEAD, {})
    await settle(http, "nak", await claim(http, 3))
    assert len(await dead_letters(http, 5)) == 3
    # What was sent back of the log before says nothing about this one.
    assert await http.done("POST", f"{MAIL}/redrive", {}) == {"redriven": 3}
    await http.ask("DELETE", LOG)
    await http.done("PUT", LOG, {})
    assert code(await http.ask("POST", f"{MAIL}/redrive", {})) == (409, "log-replaced")
    assert (await http.done("GET", f"{LOG}/records"))["records"] == []


async def test_records_of_a_key_are_given_one_after_the_other(http: Http) -> None:
    await http.done("PUT", "/v1/logs/keyed", {})
    records = [{"text": str(n), "key": f"k{n % 3}" if n % 4 else None} for n in range(12)]
    records = [{name: value for name, value in one.items() if value} for one in records]
    await http.done("POST", "/v1/logs/keyed/records", {"records": records})
    queue = "/v1/logs/keyed/queues/mail"
    await http.done("PUT", queue, {"order": "key"})

    async def claimed(at: int = 0) -> list[Any]:
        body = {"max": 100}
        answer = await http.done("POST", f"{queue}/claim?encoding=text", body, at=at)
        return list(answer["records"])

    first = await claimed()
    assert offsets(first) == [0, 1, 2, 3, 4, 8]
    assert await claimed(1) == []
    nak = {"claims": [{"claim": first[0]["claim"], "offsets": [1]}]}
    await http.done("POST", f"{queue}/nak", nak)
    (again,) = await claimed(1)
    assert again["offset"] == 1
    rest = {"claims": [{"claim": first[0]["claim"]}, {"claim": again["claim"]}]}
    assert (await http.done("POST", f"{queue}/ack", rest))["done"] == 6
    assert offsets(await claimed()) == [5, 6, 7]


async def test_queues_are_listed_changed_and_deleted(http: Http) -> None:
    assert await http.done("GET", f"{LOG}/queues") == {"queues": [], "next": None}
    await put(http, max_in_flight=3)
    await http.done("PUT", f"{LOG}/queues/other", {"from": "latest"})
    assert offsets(await claim(http)) == [0, 1, 2]
    full = await http.done("POST", f"{MAIL}/claim", {})
    assert (full["records"], full["limit"]) == ([], "max-in-flight")
    await put(http, max_in_flight=5)
    assert offsets(await claim(http)) == [3, 4]
    page = await http.done("GET", f"{LOG}/queues?limit=1", at=1)
    QueueList.model_validate(page)
    assert ([one["queue"] for one in page["queues"]], page["next"]) == (["mail"], "mail")
    page = await http.done("GET", f"{LOG}/queues?after=mail")
    assert [(one["queue"], one["floor"]) for one in page["queues"]] == [("other", 10)]
    assert (await http.ask("DELETE", MAIL, at=1)).status == 204
    assert code(await http.ask("GET", MAIL)) == (404, "no-such-queue")
    assert code(await http.ask("POST", f"{MAIL}/claim", {})) == (404, "no-such-queue")
    assert [one["queue"] for one in (await http.done("GET", f"{LOG}/queues"))["queues"]] == [
        "other"
    ]


async def test_a_late_request_with_a_version_changes_no_later_queue(http: Http) -> None:
    async def asked(method: str, *, at: int = 0, **headers: str) -> Answer:
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        return await http.ask(method, MAIL, {} if method == "PUT" else None, at=at, headers=named)

    made = await asked("PUT", If_None_Match="*")
    assert code(await asked("PUT", If_None_Match="*")) == (412, "version-conflict")
    await claim(http)  # changes the queue, but not its settings
    first = (await asked("GET", at=1)).headers["ETag"]
    assert first == made.headers["ETag"] == f'"{made.json["version"]}"'
    await put(http, lease_ms=5000)
    stale = await asked("DELETE", If_Match=first)
    assert code(stale) == code(await asked("PUT", If_Match=first)) == (412, "version-conflict")
    assert stale.json["current"] == {"version": (await http.done("GET", MAIL))["version"]}
    second = (await asked("GET")).headers["ETag"]
    assert (await asked("DELETE", If_Match=second)).status == 204
    assert code(await asked("PUT", If_Match=second)) == (404, "no-such-queue")
    await put(http, lease_ms=5000)
    assert code(await asked("DELETE", If_Match=second)) == (412, "version-conflict")


async def test_queues_of_a_deleted_log_go_even_if_the_gateway_that_deleted_it_forgets() -> None:
    async with served() as (http, cluster):
        await put(http)
        await http.done("PUT", "/v1/logs/other", {})
        await http.done("PUT", "/v1/logs/other/queues/mail", {})
        await http.ask("DELETE", LOG)
        for gateway in cluster.gateways.values():
            gateway.logs.queues.take_deleted()
        for gateway in [*cluster.gateways.values()] * 2:
            await Sweep(gateway.logs, Store(gateway)).sweep_logs()
        kept = [gateway.logs.queues for gateway in cluster.gateways.values()]
        (owner,) = [each for each in kept if each.is_here]
        assert list(owner.kept) == [("other", "mail")]


@pytest.mark.parametrize(
    "settings",
    [
        {"lease_ms": 999},
        {"max_attempts": 3},
        {"max_attempts": 3, "dead_letter_log": "log"},
        {"dead_letter_log": "quorumlog.queues"},
        {"order": "time"},
        {"max_in_flight": 10_001},
        {"max_attempts": 1001, "dead_letter_log": "dead"},
        {"from": 11},
    ],
)
async def test_bad_settings_are_refused(http: Http, settings: Any) -> None:
    refused: Answer = await http.ask("PUT", MAIL, settings)
    assert code(refused) == (422, "invalid")
    assert (await http.done("GET", f"{LOG}/queues"))["queues"] == []


async def test_settings_that_cannot_change_are_told(http: Http) -> None:
    for name in ("dead", "dead2"):
        await http.done("PUT", f"/v1/logs/{name}", {})
    await put(http, dead_letter_log="dead")
    ordered = {"order": "key", "dead_letter_log": "dead"}
    assert code(await http.ask("PUT", MAIL, ordered)) == (409, "queue-exists")
    missing = {"max_attempts": 1, "dead_letter_log": "nowhere"}
    assert code(await http.ask("PUT", f"{LOG}/queues/q", missing)) == (404, "no-such-log")


async def test_a_dead_letter_log_that_takes_nothing_is_shown_and_can_be_changed(http: Http) -> None:
    for name in ("dead", "dead2"):
        await http.done("PUT", f"/v1/logs/{name}", {})
    await put(http, max_attempts=1, dead_letter_log="dead")
    await http.done("POST", f"{DEAD}/close")
    await settle(http, "nak", await claim(http))

    async def told() -> Any:
        return (await http.done("GET", MAIL))["dead_letter_error"] == "log-closed"

    await until(told, "the error is shown")
    none = await http.ask("PUT", MAIL, {})
    assert code(none) == (409, "queue-exists")
    await put(http, max_attempts=1, dead_letter_log="dead2")

    async def dead() -> Any:
        return (await http.done("GET", MAIL))["dead"] == 10

    await until(dead, "the records are in the other log")
    shown = await http.done("GET", MAIL)
    assert (shown["dead_letter_error"], shown["floor"]) == (None, 10)
    assert len((await http.done("GET", "/v1/logs/dead2/records"))["records"]) == 10


async def test_what_truncation_takes_is_counted(http: Http) -> None:
    await put(http)
    records = await claim(http, 4)
    await settle(http, "ack", records[1:2])
    assert (await http.ask("POST", f"{LOG}/roll")).status == 200
    await append(http, 5)
    await http.done("POST", f"{LOG}/truncate", {"before": 10})
    found: list[int] = []

    async def rest() -> bool:
        found.extend(offsets(await claim(http)))
        return len(found) == 5

    await until(rest, "the rest is given")
    assert found == [10, 11, 12, 13, 14]
    shown = await http.done("GET", MAIL)
    assert (shown["lost"], shown["floor"], shown["in_flight"]) == (9, 10, 5)


async def test_a_queue_of_a_log_that_was_made_again_begins_anew(http: Http) -> None:
    await put(http)
    await claim(http, 4)
    await http.ask("DELETE", LOG)
    await http.done("PUT", LOG, {})
    await append(http, 2)
    shown = await http.done("GET", MAIL)
    assert shown["state"] == "log-replaced"
    assert code(await http.ask("POST", f"{MAIL}/claim", {})) == (409, "log-replaced")
    await put(http)
    assert offsets(await claim(http)) == [0, 1]


@pytest.mark.parametrize("is_expired", [False, True])
async def test_a_waiting_claim_takes_no_offset_of_the_deleted_log_into_the_next(
    http: Http, monkeypatch: pytest.MonkeyPatch, waits: list[Any], *, is_expired: bool
) -> None:
    monkeypatch.setattr(consumers, "_ROW_S", 0)
    await put(http)
    await settle(http, "ack", await claim(http))
    if is_expired:
        expiring = {"records": [{"text": "x", "ttl_s": 1}]}
        await http.done("POST", f"{LOG}/records", expiring)
        await asyncio.sleep(1.5)
    waiting = asyncio.create_task(claim(http, wait_ms=60_000))
    await until(lambda: bool(waits), "the claim waits")
    monkeypatch.setattr(queues, "_POLL_S", 60)  # it asks again once there is a new queue
    await http.ask("DELETE", LOG)
    await http.done("PUT", LOG, {})
    await append(http, 3)
    await put(http)
    assert offsets(await woken(waiting)) == [0, 1, 2]
    shown = await http.done("GET", MAIL)
    assert (shown["floor"], shown["depth"], shown["lost"], shown["in_flight"]) == (0, 3, 0, 3)


async def test_more_bytes_than_asked_for_are_given_back_without_an_attempt(http: Http) -> None:
    await put(http)
    body = {"max": 10}
    some = await http.done("POST", f"{MAIL}/claim?max_bytes=2", body)
    assert 1 <= len(some["records"]) < 10
    rest = await claim(http)
    assert [one["attempt"] for one in rest] == [1] * len(rest)
    assert offsets(some["records"]) + offsets(rest) == list(range(10))


async def test_only_the_first_keys_are_looked_at(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol_queues, "KEYS_MAX", 3)
    await http.done("PUT", "/v1/logs/keyed", {})
    records = [{"text": str(n), "key": "ab"[n > 3]} for n in range(8)]
    await http.done("POST", "/v1/logs/keyed/records", {"records": records})
    queue = "/v1/logs/keyed/queues/mail"
    await http.done("PUT", queue, {"order": "key"})
    found: list[list[int]] = []
    while sum(len(each) for each in found) < 8:
        claimed = (await http.done("POST", f"{queue}/claim", {}))["records"]
        await http.done("POST", f"{queue}/ack", {"claims": [{"claim": claimed[0]["claim"]}]})
        found.append(offsets(claimed))
    assert found[:2] == [[0], [1]]
    assert sorted(at for each in found for at in each) == list(range(8))


async def test_keys_of_more_queues_than_are_cached_are_read_again(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "_QUEUES_MAX", 1)
    for queue in ("one", "two"):
        await http.done("PUT", f"{LOG}/queues/{queue}", {"order": "key"})
    for count in (4, 6):
        for queue in ("one", "two"):
            answer = await http.done("POST", f"{LOG}/queues/{queue}/claim", {"max": count})
            assert len(answer["records"]) == count


async def test_keys_of_done_records_above_the_floor_are_forgotten(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol_queues, "KEYS_MAX", 3)
    known: list[int] = []
    original = queues.QueueService._saw_keys

    def noted(self: Any, key: Any, row: Any, taken: Any) -> None:
        original(self, key, row, taken)
        known.append(len(self._seen_keys[key].keys))

    monkeypatch.setattr(queues.QueueService, "_saw_keys", noted)
    await put(http, order="key")
    await append(http, 20)
    stuck, *rest = await claim(http)
    while rest:
        await settle(http, "ack", rest)
        rest = await claim(http)
    shown = await http.done("GET", MAIL)
    assert (shown["floor"], shown["depth"], stuck["offset"]) == (0, 1, 0)
    assert max(known) <= 2 * 3


@pytest.mark.parametrize(
    ("method", "path", "json"),
    [
        ("POST", f"{MAIL}/claim", {"max": 1001}),
        ("POST", f"{MAIL}/claim", {"wait_ms": 60_001}),
        ("POST", f"{MAIL}/claim?max_bytes=8388609", {}),
        ("POST", f"{MAIL}/ack", {"claims": []}),
        ("POST", f"{MAIL}/ack", {"claims": [{"claim": 1, "offsets": [0, 300_000]}]}),
        ("POST", f"{MAIL}/nak", {"claims": [{"claim": 1}], "delay_ms": 3_600_001}),
        ("POST", f"{MAIL}/nak", {"claims": [{"claim": 1}], "reason": "x" * 501}),
        ("POST", f"{MAIL}/extend", {"claims": [{"claim": 1}] * 1001}),
        ("POST", f"{MAIL}/redrive", {"max": 1001}),
        ("POST", f"{MAIL}/redrive", {}),
        ("GET", f"{LOG}/queues?limit=101", None),
    ],
)
async def test_bad_requests_are_refused(http: Http, method: str, path: str, json: Any) -> None:
    await put(http)
    assert code(await http.ask(method, path, json)) == (422, "invalid")
    assert len(await claim(http)) == 10


async def test_dead_letters_without_keys_dont_go_to_a_compacted_log(http: Http) -> None:
    """Before the move begins, so that the queue can have another dead-letter log."""
    await http.done("PUT", DEAD, {"cleanup_policy": "compact"})
    await http.done("PUT", "/v1/logs/dead2", {})
    await put(http, max_attempts=1, dead_letter_log="dead")
    await settle(http, "nak", await claim(http, 1))

    async def is_shown() -> Any:
        return (await http.done("GET", MAIL))["dead_letter_error"] == "key-required"

    await until(is_shown, "the reason is shown")
    await put(http, max_attempts=1, dead_letter_log="dead2")
    await dead_letters(http, 1)


def after_the_begin(monkeypatch: pytest.MonkeyPatch, action: Callable[[], Any]) -> asyncio.Event:
    """Await an action after the next move has begun, and before its append. The request of a redrive and the owner's task
    carry out the same move: neither appends before the action is done.
    """
    done = asyncio.Event()
    original, is_first = moves.QueueMoves._begun, True

    async def begun(self: Any, *of_move: Any) -> Any:
        nonlocal is_first
        acts, is_first = is_first, False
        row = await original(self, *of_move)
        if acts:
            answer = await action()
            assert getattr(answer, "status", 200) < 300
            done.set()
        await done.wait()
        return row

    monkeypatch.setattr(moves.QueueMoves, "_begun", begun)
    monkeypatch.setattr(moves, "_RETRY_S", 0.2)
    return done


OWNED = {"owner": "me"}


@pytest.mark.parametrize(
    "action",
    [("DELETE", DEAD), ("POST", f"{DEAD}/close"), ("POST", f"{DEAD}/open", OWNED)],
    ids=lambda action: action[-1] if action[-1] != OWNED else "open",
)
async def test_dead_letters_go_elsewhere_if_their_log_took_none_after_the_move_began(
    http: Http, monkeypatch: pytest.MonkeyPatch, action: Any
) -> None:
    for name in ("dead", "dead2"):
        await http.done("PUT", f"/v1/logs/{name}", {})
    await put(http, max_attempts=1, dead_letter_log="dead")
    done = after_the_begin(monkeypatch, lambda: http.ask(*action))
    await settle(http, "nak", await claim(http))
    async with within("the move has begun"):
        await done.wait()

    async def is_changed() -> bool:
        settings = {"max_attempts": 1, "dead_letter_log": "dead2"}
        return (await http.ask("PUT", MAIL, settings)).status == 200

    async def is_moved() -> bool:
        return len((await http.done("GET", "/v1/logs/dead2/records"))["records"]) == 10

    await until(is_changed, "the queue has the other log")
    await until(is_moved, "the other log has the records")


async def one_dead_letter(http: Http) -> None:
    for name in ("dead", "dead2"):
        await http.done("PUT", f"/v1/logs/{name}", {})
    await put(http, max_attempts=1, dead_letter_log="dead")
    await settle(http, "nak", await claim(http, 1))
    await dead_letters(http, 1)


@pytest.mark.parametrize("is_made_again", [False, True])
async def test_a_redrive_of_a_deleted_log_ends_and_counts_nothing_as_sent(
    http: Http, monkeypatch: pytest.MonkeyPatch, *, is_made_again: bool
) -> None:
    original = moves.QueueMoves._carry_out
    is_begun, is_deleted = asyncio.Event(), asyncio.Event()

    async def late(self: Any, row: Any, move: Any) -> Any:
        is_begun.set()
        await is_deleted.wait()
        return await original(self, row, move)

    await one_dead_letter(http)
    monkeypatch.setattr(moves.QueueMoves, "_carry_out", late)
    redrive = asyncio.create_task(http.ask("POST", f"{MAIL}/redrive", {}))
    async with within("the redrive has a move"):
        await is_begun.wait()
    await http.ask("DELETE", DEAD)
    if is_made_again:
        await http.done("PUT", DEAD, {})
    await asyncio.sleep(0.5)  # longer than a page is read from memory
    is_deleted.set()
    refused = await redrive
    assert code(refused) == ((409, "log-replaced") if is_made_again else (404, "no-such-log"))
    if is_made_again:
        assert refused.json["outcome"] == "unknown"
    await put(http, max_attempts=1, dead_letter_log="dead2")


@pytest.mark.parametrize("how", ["close", "open"])
@pytest.mark.parametrize("is_late", [False, True])
async def test_a_redrive_to_a_log_that_takes_none_leaves_nothing(
    http: Http, monkeypatch: pytest.MonkeyPatch, how: str, *, is_late: bool
) -> None:
    await one_dead_letter(http)
    end = partial(http.ask, "POST", f"{LOG}/{how}", OWNED if how == "open" else None)
    if is_late:
        after_the_begin(monkeypatch, end)
    else:
        await end()
    refused = await http.ask("POST", f"{MAIL}/redrive", {})
    assert code(refused) == (409, "log-closed" if how == "close" else "log-fenced")

    async def is_free() -> bool:  # the owner's task may end the move later
        settings = {"max_attempts": 1, "dead_letter_log": "dead2"}
        return (await http.ask("PUT", MAIL, settings)).status == 200

    await until(is_free, "the queue has the other log")


async def test_dead_letters_pass_moves_that_go_back(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = moves.QueueMoves._carry_out

    async def only_away(self: Any, row: Any, move: Any) -> Any:
        if move.is_back:
            raise errors.EntryUnavailable("it can't be read now")
        return await original(self, row, move)

    await one_dead_letter(http)
    monkeypatch.setattr(moves, "_MOVES_AT_ONCE", 1)
    monkeypatch.setattr(moves.QueueMoves, "_carry_out", only_away)
    assert (await http.ask("POST", f"{MAIL}/redrive", {})).status == 503
    await settle(http, "nak", await claim(http, 1))
    assert len(await dead_letters(http, 2)) == 2


async def test_a_move_waits_for_a_copy_of_its_append_with_other_records(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    submit, append_to = moves.QueueMoves.submit, LogManager.append

    def noted(self: Any, request: Any, stamp: Any = None) -> Any:
        asked.append(request)
        return submit(self, request, stamp)

    async def refused(_self: Any, name: str, _call: Any) -> Any:
        monkeypatch.setattr(LogManager, "append", append_to)
        raise errors.InvalidRequest("a copy with other records is in flight", log=name)

    await http.done("PUT", DEAD, {})
    await put(http, max_attempts=1, dead_letter_log="dead")
    records = await claim(http)
    monkeypatch.setattr(moves, "_RETRY_S", 0.2)
    monkeypatch.setattr(moves.QueueMoves, "submit", noted)
    monkeypatch.setattr(LogManager, "append", refused)
    await settle(http, "nak", records)
    assert len(await dead_letters(http, 10)) == 10
    assert [one.since for one in asked if isinstance(one, BeginMove)] == [0]


async def test_dead_letters_are_lost_if_the_log_needs_keys_after_the_move_began(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    await http.done("PUT", DEAD, {})
    await put(http, max_attempts=1, dead_letter_log="dead")
    compact = {"cleanup_policy": "compact"}
    after_the_begin(monkeypatch, lambda: http.done("PATCH", DEAD, compact))
    await settle(http, "nak", await claim(http, 4))

    async def lost() -> Any:
        return (await http.done("GET", MAIL))["lost"] == 4

    await until(lost, "the records are counted")
    shown = await http.done("GET", MAIL)
    assert (shown["dead"], shown["floor"]) == (0, 4)


async def test_a_tombstone_is_one_as_a_dead_letter_and_after_it(http: Http) -> None:
    """Else the deleted key would be back, with an empty value."""
    await http.done("PUT", DEAD, {})
    await http.done("POST", f"{LOG}/records", {"key": "k", "text": None})
    await put(http, max_attempts=1, dead_letter_log="dead", **{"from": 10})
    await settle(http, "nak", await claim(http, 1))
    await dead_letters(http, 1)
    await http.done("PATCH", LOG, {"cleanup_policy": "compact"})
    assert await http.done("POST", f"{MAIL}/redrive", {}) == {"redriven": 1}

    for path in (f"{DEAD}/records?from=0", f"{LOG}/records?from=11"):
        (record,) = (await http.done("GET", f"{path}&encoding=text"))["records"]
        assert (record["key"], record["text"]) == ("k", None)


async def test_dead_letters_that_a_compacted_log_doesnt_take_back_are_lost(http: Http) -> None:
    await http.done("PUT", DEAD, {})
    await http.done("POST", f"{LOG}/records", {"key": "k", "text": "v", "ttl_s": 1000})
    await put(http, max_attempts=1, dead_letter_log="dead", **{"from": 9})
    await settle(http, "nak", await claim(http, 2))
    await dead_letters(http, 2)
    await http.done("PATCH", LOG, {"cleanup_policy": "compact"})

    assert await http.done("POST", f"{MAIL}/redrive", {}) == {"redriven": 2}

    found = (await http.done("GET", f"{LOG}/records?from=11&encoding=text"))["records"]
    assert [(one["key"], one["text"]) for one in found] == [("k", "v")]
