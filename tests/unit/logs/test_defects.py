"""What becomes of those who wait when a gateway's work on logs dies of something unforeseen: each request
ends, with an outcome that is true, and the log says what broke.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from quorumlog.errors import UNKNOWN, QuorumLogError
from quorumlog.protocol.log.messages import AppendsAsked, RecordsAppended, Stopped
from quorumlog.protocol.log.owner import Owner
from quorumlog.protocol.log.route import LogRoute
from quorumlog.protocol.log.takeover import Takeover
from tests.model.logs.model import Gateway
from tests.support.waiting import within
from tests.unit.logs.test_manager import a_cluster, call, contents


def breaking(real: Callable[..., Any], *events: type) -> Callable[..., Any]:
    """A machine's `step` that dies of such events."""

    def step(machine: Any, event: Any, now: Any) -> Any:
        if isinstance(event, events):
            raise RuntimeError("unforeseen")  # noqa: TRY004 - a defect
        return real(machine, event, now)

    return step


async def outcomes(gateway: Gateway, count: int) -> list[RecordsAppended | BaseException]:
    async with within("every append ends"):
        return await asyncio.gather(
            *(gateway.logs.append("log", call(str(n))) for n in range(count)),
            return_exceptions=True,
        )


@pytest.mark.parametrize("events", [(AppendsAsked,), (AppendsAsked, Stopped), (object,)])
@pytest.mark.parametrize("machine", [Owner, LogRoute])
async def test_appends_end_when_a_log_s_machine_breaks_and_breaks_again(
    machine: type,
    events: tuple[type, ...],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with a_cluster(1) as (_, (one,)):
        await one.logs.append("log", call("before"))
        with monkeypatch.context() as patched:
            patched.setattr(machine, "step", breaking(getattr(machine, "step"), *events))  # noqa: B009
            ended = await outcomes(one, 5)

        assert all(isinstance(end, QuorumLogError) for end in ended), ended
        assert "log-machine-broke" in caplog.text
        async with within("another one goes on"):
            await one.logs.append("log", call("after"))
        assert (await contents(one))[0] == "before"


async def test_all_that_is_under_way_when_the_machine_breaks_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with a_cluster(1) as (_, (one,)):
        await one.logs.append("log", call("before"))
        handle = one.logs.ownership.handle("log")
        waiting: list[asyncio.Future[Any]] = [handle.append(call("a"))]
        handle._flush()
        with monkeypatch.context() as patched:
            patched.setattr(LogRoute, "step", breaking(LogRoute.step, object))
            waiting += [handle.request(None, is_forwarded=False), handle.delete(), handle.drain()]
            waiting.append(handle.append(call("b")))
            async with within("all end"):
                ended = await asyncio.gather(*waiting, return_exceptions=True)

        assert all(isinstance(end, QuorumLogError) for end in ended), ended
        assert getattr(ended[0], "outcome", None) == UNKNOWN
        assert one.logs.ownership.handle("log") is not handle


async def test_appends_end_when_a_takeover_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_cluster(1) as (_, (one,)):
        with monkeypatch.context() as patched:
            patched.setattr(Takeover, "step", breaking(Takeover.step, object))
            ended = await outcomes(one, 3)

        assert all(isinstance(end, QuorumLogError) for end in ended), ended
        await one.logs.append("log", call("after"))


async def test_appends_that_are_in_flight_end_when_the_gateway_stops() -> None:
    async with a_cluster(1) as (_, (one,)):
        await one.logs.append("log", call("before"))
        one.goes.clear()
        handle = one.logs.ownership.handle("log")
        in_flight = handle.append(call("in flight"))
        handle._flush()
        gathered = handle.append(call("gathered"))

        await one.logs.ownership.stop()

        ended = await asyncio.gather(in_flight, gathered, return_exceptions=True)
        assert all(isinstance(end, QuorumLogError) for end in ended), ended
