"""The event-sourced example: no seat is given twice by servers that decide at once, and the events alone give the state."""

import asyncio
import signal
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson
import pytest
import pytest_asyncio

from loadtest.cluster import Cluster
from loadtest.ports import free_ports
from quorumlog.client import Client
from tests.cluster.examples.support import ROOT, Running, up

pytestmark = pytest.mark.asyncio(loop_scope="package")

SEATS: Final = 8
GUESTS: Final = 10


class Box:
    """One process of the example, and requests about one show."""

    def __init__(
        self, session: aiohttp.ClientSession, folder: Path, gateways: list[str], show: str
    ) -> None:
        port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{port}"
        self._session, self._show = session, f"{self.url}/shows/{show}"
        self.program = Running(
            f"box-{port}",
            (
                sys.executable, str(ROOT / "examples" / "event_sourcing.py"), "--port", str(port),
                "--snapshots", str(folder / "snapshots"), "--snapshot-every", "5",
                "--gateways", *gateways,
            ),
            folder,
        )  # fmt: skip

    async def ask(self, method: str, path: str = "", body: str | None = None) -> tuple[int, Any]:
        """A request's status, and its JSON or text."""
        async with self._session.request(method, self._show + path, data=body) as answer:
            text = await answer.text()
            return answer.status, orjson.loads(text) if answer.status == 200 else text

    async def state(self, query: str = "") -> Any:
        """The show as this process has it."""
        status, shown = await self.ask("GET", query)
        assert status == 200, shown
        return shown

    async def up(self) -> None:
        """Wait until it answers."""
        await up(self._session, self.program, self.url + "/shows/nowhere-at-all")


@pytest_asyncio.fixture(loop_scope="package")
async def boxes(
    cluster: Cluster, session: aiohttp.ClientSession, tmp_path: Path
) -> AsyncIterator[tuple[list[Box], str]]:
    """Two processes of one show, each with another gateway first, and the show's name."""
    show = uuid.uuid4().hex
    gateways = cluster.gateways
    started: list[Box] = []
    try:
        for order in (gateways, gateways[::-1]):
            box = Box(session, tmp_path, order, show)
            started.append(box)
        for box in started:
            await box.up()
        yield started, show
    finally:
        for box in started:
            box.program.kill()


async def events_of(cluster: Cluster, show: str) -> list[dict[str, Any]]:
    """All events of a show, as the log has them."""
    async with Client(*cluster.gateways) as client:
        return [orjson.loads(record.value) async for record in client.log(f"show-{show}").records()]


def seats_of(events: list[dict[str, Any]]) -> dict[str, str]:
    """Who has which seat by the events; fails where one was given while somebody had it."""
    taken: dict[str, str] = {}
    for event in events:
        seat, guest = str(event["seat"]), event["guest"]
        if event["kind"] == "taken":
            assert seat not in taken, f"seat {seat} was given twice"
            taken[seat] = guest
        elif event["kind"] == "freed":
            assert taken.pop(seat) == guest
    return taken


async def test_no_seat_is_given_twice_by_two_servers_that_decide_at_once(
    cluster: Cluster, boxes: tuple[list[Box], str]
) -> None:
    (one, other), show = boxes
    assert (await one.ask("PUT", "", str(SEATS)))[0] == 200
    answers: dict[tuple[int, str], int] = {}

    async def ask_for_all(box: Box, guest: str, first: int) -> None:
        for number in range(SEATS):
            seat = (first + number) % SEATS + 1
            answers[seat, guest], _ = await box.ask("PUT", f"/seats/{seat}", guest)

    await asyncio.gather(
        *(ask_for_all((one, other)[n % 2], f"guest-{n}", n // 2) for n in range(GUESTS))
    )
    events = await events_of(cluster, show)
    taken = seats_of(events)

    assert len(taken) == SEATS == len(events) - 1, "a refused command leaves no event"
    assert set(answers.values()) == {200, 409}
    for (seat, guest), status in answers.items():
        assert (status == 200) == (taken[str(seat)] == guest)
    assert (await one.state())["taken"] == taken == (await other.state())["taken"]


async def test_a_repeat_of_a_command_does_no_harm(
    cluster: Cluster, boxes: tuple[list[Box], str]
) -> None:
    (one, other), show = boxes
    for box in (one, other):
        assert (await box.ask("PUT", "", "3"))[0] == 200
        assert (await box.ask("PUT", "/seats/1", "ann"))[0] == 200
    assert (await other.ask("PUT", "/seats/1", "bob")) == (409, "seat 1 is taken by another guest")
    assert (await other.ask("DELETE", "/seats/1", "bob"))[0] == 409
    for box in (one, other):
        assert (await box.ask("DELETE", "/seats/1", "ann"))[0] == 200
    assert (await one.ask("PUT", "/seats/1", "bob"))[0] == 200
    assert (await one.ask("PUT", "/seats/4", "bob")) == (
        409,
        "the show has no seat 4: its seats are 1 to 3",
    )
    assert (await one.ask("PUT", "", "4"))[0] == 409

    kinds = [event["kind"] for event in await events_of(cluster, show)]
    assert kinds == ["opened", "taken", "freed", "taken"]


async def test_the_state_is_what_the_events_say_after_kill_9_from_snapshots_and_without(
    cluster: Cluster, boxes: tuple[list[Box], str], tmp_path: Path
) -> None:
    (one, other), show = boxes
    assert (await one.ask("PUT", "", "100"))[0] == 200
    answered: list[int] = []

    async def take_until_it_fails() -> None:
        for seat in range(1, 101):
            try:
                status, text = await one.ask("PUT", f"/seats/{seat}", "ann")
            except (aiohttp.ClientError, OSError):
                return
            assert status == 200, text
            answered.append(seat)
            if len(answered) == 20:
                one.program.process.send_signal(signal.SIGKILL)

    await take_until_it_fails()
    one.program.process.wait()
    assert len(answered) < 100
    kept = orjson.loads((tmp_path / "snapshots" / f"{show}.snapshot").read_bytes())
    assert 0 < kept["state"]["version"] <= len(answered) + 2

    one.program.start()
    await one.up()
    events = await events_of(cluster, show)
    state = await one.state()
    assert state["taken"] == seats_of(events)
    assert {str(seat) for seat in answered} <= set(state["taken"])
    assert state["version"] == len(events)

    # A snapshot which lies is forgotten by a rebuild: the events alone give the state.
    kept["state"]["taken"]["1"] = "a liar"
    (tmp_path / "snapshots" / f"{show}.snapshot").write_bytes(orjson.dumps(kept))
    one.program.kill()
    one.program.start()
    await one.up()
    assert (await one.state())["taken"]["1"] == "a liar"
    assert await one.ask("POST", "/rebuild") == (200, state)
    assert await one.state() == state == await other.state()

    past = await other.state("?at=11")
    assert past["taken"] == seats_of(events[:11])
    assert past["version"] == 11


async def test_bad_input_is_refused(boxes: tuple[list[Box], str]) -> None:
    (one, _), _ = boxes
    assert await one.ask("GET") == (404, "no such show: create it with PUT /shows/NAME")
    assert (await one.ask("PUT", "/seats/1", "ann"))[0] == 404
    for body in ("0", "-1", "ten", "", "1000000", "٣"):
        assert (await one.ask("PUT", "", body))[0] == 400
    assert (await one.ask("PUT", "", "5"))[0] == 200
    for guest in ("", "x" * 101):
        assert (await one.ask("PUT", "/seats/1", guest))[0] == 400
    assert (await one.ask("GET", "?at=x"))[0] == 400
