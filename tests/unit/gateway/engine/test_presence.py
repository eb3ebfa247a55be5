"""Processes that are gone: which ones a gateway tells of, and for how long."""

from loadtest.stores import Stores
from quorumlog.wire.bodies import BookieInfo, ServiceHeartbeat, ServiceInfo, ServiceList
from services.gateway.engine.presence import SEEN_MAX, Presence
from tests.support.waiting import until
from tests.unit.gateway.engine.support import world_of


class Seen:
    """A gateway's list of processes that are gone. The test sets its clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._presence = Presence(tuple, self._none, lambda: self.now_s)

    async def _none(self) -> ServiceList:
        return ServiceList(services=())

    def gone(self, *services: ServiceInfo, stale: bool = False) -> list[str]:
        """The ids of the processes that are listed as gone while these are alive."""
        _, shown = self._presence.shown((), ServiceList(services=services, stale=stale))
        assert [one["id"] for one in shown[: len(services)]] == [one.id for one in services]
        rest = shown[len(services) :]
        assert all(one["state"] == "gone" and one["last_seen_at"].endswith("Z") for one in rest)
        return [one["id"] for one in rest]

    def last_seen(self, state: str) -> list[object]:
        bookie = BookieInfo(id="bookie-1@1", state=state, url="")  # type: ignore[arg-type]
        [shown], _ = self._presence.shown((bookie,), ServiceList(services=()))
        return [shown[name] for name in ("last_seen_at",) if name in shown]


def service(name: str, port: int) -> ServiceInfo:
    url = f"http://127.0.0.1:{port}"
    return ServiceInfo(kind="autorecovery", id=name, url=url, state="ready")


def test_a_process_that_is_gone_is_told_for_an_hour() -> None:
    seen, one, two = Seen(), service("one", 1), service("two", 2)
    assert seen.gone(one, two) == []

    seen.now_s = 10
    assert seen.gone(two) == ["one"]
    assert seen.gone(two, stale=True) == [], "it may live"
    seen.now_s = 3599
    assert seen.gone() == ["one", "two"]
    seen.now_s = 3600
    assert seen.gone() == ["two"]


def test_a_process_that_starts_again_at_its_url_replaces_its_former_self() -> None:
    seen = Seen()
    seen.gone(service("one", 1))

    assert seen.gone(service("one again", 1)) == []
    assert seen.gone() == ["one again"]


def test_a_lost_bookie_was_last_seen_in_the_hour_or_never() -> None:
    seen = Seen()

    assert seen.last_seen("lost") == [None]
    assert seen.last_seen("writable") == []
    [at] = seen.last_seen("lost")
    assert str(at).endswith("Z")


def test_beyond_the_bound_the_process_that_was_seen_longest_ago_is_forgotten() -> None:
    seen = Seen()
    seen.gone(service("first", 1), service("second", 2))

    for port in range(3, SEEN_MAX + 2):
        seen.gone(service(str(port), port))

    found = seen.gone()
    assert (len(found), found[0]) == (SEEN_MAX, "second")


async def test_a_gateway_tells_of_services_that_it_saw(stores: Stores) -> None:
    async with world_of(stores, gateways=1) as world:
        gone = ServiceHeartbeat(url="http://127.0.0.1:1", ttl_s=1)
        await world.lives(world.bookies["bookie-1"], ttl_s=1)

        async def is_seen() -> bool:
            await world.metadata.send_service_heartbeat("autorecovery", "away", gone)
            found = await world.engine.cluster()
            return any(one["id"] == "away" for one in found["services"])

        async def is_gone() -> bool:
            found = await world.engine.cluster()
            [away] = [one for one in found["services"] if one["id"] == "away"]
            [bookie] = [one for one in found["bookies"] if one["id"] == "bookie-1@1"]
            if (away["state"], bookie["state"]) != ("gone", "lost"):
                return False
            assert away["last_seen_at"].endswith("Z")
            assert bookie["last_seen_at"].endswith("Z")
            return True

        await until(is_seen, "the process is listed")
        await until(is_gone, "the process is listed as gone, and the bookie as lost")
