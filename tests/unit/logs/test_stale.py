"""What a gateway knew of a log, and what is so no longer: an owner that was displaced while it was
idle, a row that was changed, a log that was deleted and made again. None of it decides an answer.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from quorumlog.errors import LogFull, NoSuchLog, NotTheOwner, QuorumLogError, WriterLost
from quorumlog.protocol.log import job, takeover
from quorumlog.protocol.log.messages import Publish
from quorumlog.protocol.metadata import State
from quorumlog.protocol.transaction import TransactionState
from tests.model.logs.attempts import write
from tests.model.logs.model import Cluster, Gateway
from tests.support.waiting import turns
from tests.unit.logs.test_manager import SETTINGS, a_cluster, call, contents


class Held:
    """A method of a gateway's engine that waits before it does anything, from its n-th call on."""

    def __init__(self, gateway: Gateway, method: str, *, calls: int = 1) -> None:
        self.reached, self._goes = asyncio.Event(), asyncio.Event()
        self._inner, self._calls = getattr(gateway, method), calls
        setattr(gateway, method, self._call)

    async def _call(self, *args: Any, **options: Any) -> Any:
        self._calls -= 1
        if self._calls <= 0:
            self.reached.set()
            await self._goes.wait()
        return await self._inner(*args, **options)

    def go(self) -> None:
        """Let those go on who wait, and all who come."""
        self._goes.set()


async def take(gateway: Gateway) -> None:
    await gateway.take_over("log")


async def deleted_and_made_again(gateway: Gateway) -> None:
    await gateway.logs.delete("log")
    await gateway.logs.put("log", SETTINGS)


async def drop_first_ledger(gateway: Gateway) -> None:
    """Another owner goes on, and all that was before it is truncated and deleted."""
    await take(gateway)
    await gateway.logs.forwarded("log", call("x"))
    await gateway.logs.forwarded("log", None)
    row = await gateway.logs.get("log")
    assert row.log.items[-1].first_offset is not None
    await gateway.logs.truncate("log", row.log.items[-1].first_offset)


def transaction(cluster: Cluster) -> tuple[str, Publish]:
    name = cluster.begin("log")
    return name, Publish(name, (write(cluster, name, [["t"]]),))


# --- an owner that was displaced while it was idle ---------------------------------------------------


@pytest.mark.parametrize("through", ["the displaced one", "one that forwards to it"])
async def test_a_displaced_owner_does_not_refuse_the_token_of_who_opened_the_log(
    through: str,
) -> None:
    async with a_cluster(3) as (cluster, (one, two, three)):
        await one.logs.append("log", call("a"))
        await three.logs.append("log", call("b"))
        token, _ = await two.logs.open("log", "me")
        name, wanted = transaction(cluster)
        asked = one if through == "the displaced one" else three

        done = await asked.logs.publish("log", Publish(name, wanted.ledgers, token=token))

        assert done.state is TransactionState.COMMITTED
        assert await contents(two) == ["a", "b", "t"]


@pytest.mark.parametrize("through", ["the displaced one", "one that forwards to it"])
async def test_a_roll_through_a_displaced_owner_of_an_empty_ledger_is_done(through: str) -> None:
    async with a_cluster(3) as (_, (one, two, three)):
        await three.logs.append("log", call("a"))
        await take(one)
        if through != "the displaced one":
            await three.logs.roll("log")  # which learns that way who owns it
        await take(two)
        await two.logs.forwarded("log", call("b"))
        asked = one if through == "the displaced one" else three

        rolled = await asked.logs.roll("log")

        assert rolled.log.items[-1].first_offset == 2
        assert rolled.next_offset == 2


async def test_a_row_that_was_truncated_through_another_gateway_has_room_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(takeover, "LOG_LEDGERS_MAX", 4)
    monkeypatch.setattr(job, "LEDGERS_SPARE", 2)
    async with a_cluster() as (_, (one, two)):
        await one.logs.append("log", call("a"))
        await one.logs.roll("log")
        await one.logs.append("log", call("b"))
        with pytest.raises(LogFull):
            await one.logs.roll("log")
        await two.logs.truncate("log", 1)

        rolled = await one.logs.roll("log")

        assert rolled.log.items[-1].first_offset == 2


@pytest.mark.parametrize("what", ["roll", "publish"])
async def test_who_forwards_to_an_owner_that_stands_still_does_not_wait_for_it(what: str) -> None:
    async with a_cluster() as (cluster, (one, two)):
        await one.logs.append("log", call("a"))
        await two.logs.append("log", call("b"))  # and learns who owns it
        one.goes.clear()

        if what == "roll":
            rolled = await two.logs.roll("log")
            assert rolled.log.items[-1].first_offset == 2
        else:
            name, wanted = transaction(cluster)
            done = await two.logs.publish("log", wanted)
            assert (done.id, done.first_offset) == (name, 2)


async def test_a_drained_gateway_leaves_the_owner_after_it_alone() -> None:
    async with a_cluster() as (cluster, (one, two)):
        await one.logs.append("log", call("a"))
        await take(two)
        await two.logs.forwarded("log", call("b"))

        await one.logs.ownership.drain()

        last = cluster.logs["log"].last_item
        assert last is not None
        assert cluster.ledgers[last.ledger_id].row.state is State.OPEN
        done: Any = await two.logs.forwarded("log", call("c"))
        assert done.ledger_id == last.ledger_id


# --- a log that was deleted, and made again ----------------------------------------------------------


async def test_an_answer_of_a_log_that_was_deleted_is_none_of_its_namesake() -> None:
    async with a_cluster() as (_, (one, two)):
        await one.logs.append("log", call("a", seq=0))
        await deleted_and_made_again(two)

        done = await one.logs.append("log", call("a", seq=0))

        assert not done.is_duplicate
        assert await contents(two) == ["a"]


@pytest.mark.parametrize(
    "again", [call("b", seq=0), call("b", seq=0, epoch=1)], ids=["content", "epoch"]
)
async def test_a_producer_of_a_log_that_was_deleted_is_none_of_its_namesake(again: Any) -> None:
    async with a_cluster() as (_, (one, two)):
        await one.logs.append("log", call("a", seq=0, epoch=again.producer.epoch))
        if again.producer.epoch:
            await one.logs.append("log", call("c", seq=0, epoch=again.producer.epoch + 1))
        await deleted_and_made_again(two)

        assert (await one.logs.append("log", again)).first_offset == 0
        assert await contents(two) == ["b"]


async def test_nothing_is_acknowledged_into_a_log_whose_deleter_died_half_way() -> None:
    async with a_cluster(3) as (cluster, (one, two, three)):
        await one.logs.append("log", call("a"))
        drops = Held(two, "existing", calls=2)
        deleting = asyncio.ensure_future(two.logs.delete("log"))
        await drops.reached.wait()
        assert "log" not in cluster.logs
        two.kill()
        await three.logs.put("log", SETTINGS)

        with pytest.raises(NotTheOwner):  # it had a place in the log that is no more (rule 27b)
            await one.logs.append("log", call("b"))
        await one.logs.append("log", call("b"))

        assert await contents(three) == ["b"]
        deleting.cancel()
        await asyncio.gather(deleting, return_exceptions=True)


async def test_a_deletion_that_comes_late_spares_the_namesake() -> None:
    async with a_cluster() as (_, (one, two)):
        await one.logs.append("log", call("a"))
        recovers = Held(two, "recover")
        late = asyncio.ensure_future(two.logs.delete("log"))
        await recovers.reached.wait()
        await deleted_and_made_again(one)
        await one.logs.append("log", call("b"))
        recovers.go()

        with pytest.raises(NoSuchLog):
            await late

        assert await contents(two) == ["b"]


# --- rows that name what is gone ---------------------------------------------------------------------


async def test_a_log_that_is_deleted_meanwhile_is_left_out_of_a_page_and_is_no_log() -> None:
    async with a_cluster() as (_, (one, two)):
        await one.logs.append("log", call("a"))
        asked, listed = Held(two, "last_add_confirmed"), Held(two, "gateways")
        page = asyncio.ensure_future(two.logs.views.page(after=None, limit=10))
        alone = asyncio.ensure_future(two.logs.get("log"))
        latest = asyncio.ensure_future(two.logs.reader.read("log", "latest"))
        await asked.reached.wait()
        await listed.reached.wait()

        await one.logs.delete("log")
        asked.go()
        listed.go()

        assert (await page)[0] == []
        for asking in (alone, latest):
            with pytest.raises(NoSuchLog):
                await asking


async def test_a_tail_of_a_log_that_is_deleted_is_told_so() -> None:
    async with a_cluster() as (_, (one, two)):
        await one.logs.append("log", call("a"))
        asked = Held(two, "last_add_confirmed", calls=2)  # the second one begins the wait
        tail = asyncio.ensure_future(two.logs.reader.read("log", 1, wait_s=60))
        await asked.reached.wait()

        await one.logs.delete("log")
        asked.go()

        with pytest.raises(NoSuchLog):
            await tail


@pytest.mark.parametrize("what", ["open", "close", "delete"])
async def test_who_takes_a_log_over_looks_again_when_its_ledger_is_gone(what: str) -> None:
    async with a_cluster() as (_, (one, two)):
        await one.logs.append("log", call("a"))
        recovers = Held(two, "recover")
        work: dict[str, Callable[[], Any]] = {
            "open": lambda: two.logs.open("log", "me"),
            "close": lambda: two.logs.close("log"),
            "delete": lambda: two.logs.delete("log"),
        }
        asked = asyncio.ensure_future(work[what]())
        await recovers.reached.wait()

        await drop_first_ledger(one)
        recovers.go()

        await asked


async def test_an_append_whose_ledger_is_gone_is_unknown_and_names_no_ledger() -> None:
    async with a_cluster() as (cluster, (one, two)):
        await take(one)
        ledger = cluster.ledgers[cluster.logs["log"].items[-1].ledger_id]
        cluster.kept_of = lambda in_flight: 0 * in_flight  # type: ignore[method-assign]
        adds, settles = Held(one, "_pump"), Held(one, "recover")
        append = asyncio.ensure_future(one.logs.append("log", call("a")))
        await adds.reached.wait()
        await take(two)  # and so drops the ledger, which is empty
        await settles.reached.wait()
        assert ledger.row.state is State.CLOSED
        await two.logs.orphans.delete(ledger.row.ledger_id)
        settles.go()

        with pytest.raises(WriterLost) as lost:
            await append

        assert lost.value.outcome == "unknown"


# --- a process that is about to end ------------------------------------------------------------------


async def test_a_drain_takes_nothing_new_and_waits_only_for_what_is_in_flight() -> None:
    async with a_cluster() as (cluster, (one, two)):
        await one.logs.append("log", call("a"))
        adds = Held(one, "_pump")
        first = asyncio.ensure_future(one.logs.append("log", call("b")))
        await adds.reached.wait()
        draining = asyncio.ensure_future(one.logs.ownership.drain())
        await turns()

        with pytest.raises(WriterLost) as refused:
            await one.logs.forwarded("log", call("c"))
        second = asyncio.ensure_future(two.logs.append("log", call("d")))
        assert one.logs.ownership.waits_for() == ["the seal of log log"]
        adds.go()
        await draining

        assert one.logs.ownership.waits_for() == []
        assert refused.value.outcome == "not-done"
        assert (await first).first_offset == 1
        assert (await second).first_offset == 2
        assert cluster.logs["log"].items[0].last_offset == 1


async def test_a_request_whose_search_a_drain_cuts_short_is_told_that_nothing_was_done() -> None:
    async with a_cluster() as (_, (one, _two)):
        made = Held(one, "create")
        append = asyncio.ensure_future(one.logs.append("log", call("a")))
        await made.reached.wait()

        await one.logs.ownership.drain()

        with pytest.raises(QuorumLogError) as refused:
            await append
        assert refused.value.retryable
        assert refused.value.outcome == "not-done"


async def test_what_an_owner_had_in_flight_is_answered_when_a_drain_cuts_its_settling_short() -> (
    None
):
    async with a_cluster() as (_, (one, two)):
        await take(one)
        adds, settles = Held(one, "_pump"), Held(one, "recover")
        appends = [asyncio.ensure_future(one.logs.append("log", call(v))) for v in "ab"]
        await adds.reached.wait()
        await take(two)
        await settles.reached.wait()

        await one.logs.ownership.stop()

        for append in appends:
            with pytest.raises(WriterLost) as lost:
                await append
            assert lost.value.outcome == "unknown"
