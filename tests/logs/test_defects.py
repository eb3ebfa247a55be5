"""What becomes of those who wait when a gateway's work on logs dies of something unforeseen: each request
ends, with an outcome that is true, and the log says what broke.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from quorumlog.errors import NOT_DONE, UNKNOWN, QuorumLogError
from quorumlog.protocol.log.messages import AppendsAsked, Stopped
from quorumlog.protocol.log.owner import Owner
from quorumlog.protocol.log.takeover import Takeover
from services.gateway.logs.ownership import Ownership
from services.gateway.logs.ports import LogAppended
from tests.logs.model import Gateway
from tests.logs.test_manager import a_cluster, call, contents
from tests.support.waiting import within


def breaking(real: Callable[..., Any], *events: type) -> Callable[..., Any]:
    """A machine's `step` that dies of such events."""

    def step(machine: Any, event: Any, now: Any) -> Any:
        if isinstance(event, events):
            raise RuntimeError("unforeseen")  # noqa: TRY004 - a defect
        return real(machine, event, now)

    return step


async def outcomes(gateway: Gateway, count: int) -> list[LogAppended | BaseException]:
    async with within("every append ends"):
        return await asyncio.gather(
            *(gateway.logs.append("log", call(str(n))) for n in range(count)),
            return_exceptions=True,
        )


@pytest.mark.parametrize("events", [(AppendsAsked,), (AppendsAsked, Stopped), (object,)])
async def test_appends_end_when_the_owner_s_machine_breaks_and_breaks_again(
    events: tuple[type, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_cluster(1) as (_, (one,)):
        await one.logs.append("log", call("before"))
        with monkeypatch.context() as patched:
            patched.setattr(Owner, "step", breaking(Owner.step, *events))
            ended = await outcomes(one, 5)

        assert all(isinstance(end, QuorumLogError) for end in ended), ended
        assert "log-machine-broke" in caplog.text
        async with within("another owner goes on"):
            await one.logs.append("log", call("after"))
        assert (await contents(one))[0] == "before"


async def test_what_is_in_flight_when_the_machine_breaks_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with a_cluster(1) as (_, (one,)):
        await one.logs.append("log", call("before"))
        owner = one.logs.ownership.slot("log").owner
        assert owner is not None
        in_flight = owner.append(call("in flight"))
        assert in_flight is not None
        owner._flush()
        with monkeypatch.context() as patched:
            patched.setattr(Owner, "step", breaking(Owner.step, object))
            rolled, released = owner.roll(), asyncio.ensure_future(owner.release())
            async with within("all end"):
                ended = await asyncio.gather(in_flight, rolled, released, return_exceptions=True)

        assert [getattr(end, "outcome", None) for end in ended] == [UNKNOWN, UNKNOWN, NOT_DONE]
        assert owner.is_ended


@pytest.mark.parametrize("events", [(object,)])
async def test_appends_end_when_a_takeover_breaks(
    events: tuple[type, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_cluster(1) as (_, (one,)):
        with monkeypatch.context() as patched:
            patched.setattr(Takeover, "step", breaking(Takeover.step, *events))
            ended = await outcomes(one, 3)

        assert all(isinstance(end, QuorumLogError) for end in ended), ended
        await one.logs.append("log", call("after"))


@pytest.mark.parametrize("step", ["_find_or_become", "_append"])
async def test_what_is_to_be_appended_again_ends_when_the_search_or_the_repeat_breaks(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_cluster(1) as (_, (one,)):
        ownership = one.logs.ownership
        slot = ownership.slot("log")
        loop = asyncio.get_running_loop()
        again = [(loop.create_future(), call(str(n))) for n in range(3)]
        futures: list[asyncio.Future[LogAppended]] = [future for future, _ in again]

        def broken(*_args: Any) -> None:
            raise RuntimeError("unforeseen")

        with monkeypatch.context() as patched:
            patched.setattr(ownership, step, broken)
            if step == "_append":
                ownership._resend(slot, again)
            else:
                with pytest.raises(RuntimeError):
                    await ownership._establish(slot, again)
            async with within("all end"):
                ended = await asyncio.gather(*futures, return_exceptions=True)

        assert all(isinstance(end, QuorumLogError) for end in ended), ended


async def test_a_repeat_that_is_cut_off_before_its_first_step_ends_its_appends() -> None:
    async with a_cluster(1) as (_, (one,)):
        ownership: Ownership = one.logs.ownership
        future: asyncio.Future[LogAppended] = asyncio.get_running_loop().create_future()
        ownership._resend(ownership.slot("log"), [(future, call("x"))])

        await ownership.stop()

        error = future.exception()
        assert isinstance(error, QuorumLogError)
        assert error.outcome == NOT_DONE


async def test_appends_that_are_in_flight_end_when_the_gateway_stops() -> None:
    async with a_cluster(1) as (_, (one,)):
        await one.logs.append("log", call("before"))
        one.goes.clear()
        owner = one.logs.ownership.slot("log").owner
        assert owner is not None
        in_flight = owner.append(call("in flight"))
        assert in_flight is not None
        owner._flush()
        gathered = owner.append(call("gathered"))
        assert gathered is not None

        await one.logs.ownership.stop()

        ended = await asyncio.gather(in_flight, gathered, return_exceptions=True)
        assert [getattr(end, "outcome", None) for end in ended] == [UNKNOWN, NOT_DONE]
