"""What a gateway measures of itself: rates of the last hour, and metrics of requests."""

from typing import Any

import aiohttp
from prometheus_client import CollectorRegistry, generate_latest

from loadtest.stores import Stores
from quorumlog.wire.bodies import ServiceHeartbeat
from services.gateway.app import _RATES
from services.gateway.edge.http.limits import Limits, Room
from services.gateway.edge.http.middleware import Metrics
from services.gateway.rates import INTERVAL_S, SAMPLES_MAX, UNKNOWN, Counts, Rates, Sample
from tests.support.waiting import until
from tests.unit.gateway.engine.support import world_of
from tests.unit.gateway.fake_engine import FakeEngine


class Sampled:
    """Rates, with counters and clocks that the test sets."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.rates = Rates(FakeEngine(), lambda: self.counts)
        self._monotonic_s, self._wall_s = self.rates._awake_s, self.rates._ends_s

    def after(self, monotonic_s: float, wall_s: float | None = None, **counts: float) -> Sample:
        """The newest sample, once so much time has passed and the counters are these."""
        self.counts = self.counts._replace(**counts)
        self._monotonic_s += monotonic_s
        self._wall_s += monotonic_s if wall_s is None else wall_s
        self.rates.sample(self._monotonic_s, self._wall_s)
        return self.rates._samples[-1]

    @property
    def known(self) -> int:
        return sum(one[0] is not None for one in self.rates._samples)


async def test_rates_are_what_was_counted_in_an_interval() -> None:
    sampled = Sampled()

    first = sampled.after(15, requests=30, appends=15, append_s=0.3, records=150, errors=3)
    second = sampled.after(15, requests=45, reads=15)

    assert first == (2, 0.2, 1, 20, 0, 10, 0)
    assert second == (1, 0, 0, None, 1, 0, 0), "no appends have no latency"
    assert len(sampled.rates._samples) == SAMPLES_MAX
    assert sampled.known == 2


async def test_a_suspended_process_leaves_nulls_and_goes_on() -> None:
    sampled = Sampled()
    for stopped in ((5 * INTERVAL_S, None), (INTERVAL_S, 5 * INTERVAL_S)):
        sampled = Sampled()
        sampled.after(INTERVAL_S, requests=15)

        assert sampled.after(*stopped, requests=1000) == UNKNOWN
        assert sampled.after(INTERVAL_S, requests=1015)[0] == 1
        assert [one[0] for one in list(sampled.rates._samples)[-7:]] == [1, *[None] * 5, 1]

    sampled.after(10 * 3600)
    assert sampled.known == 0


async def test_a_wakeup_that_is_early_belongs_to_the_interval() -> None:
    sampled = Sampled()

    assert sampled.after(2, requests=100) == UNKNOWN
    assert sampled.after(INTERVAL_S, requests=170)[0] == 10
    assert sampled.known == 1


async def test_more_than_an_hour_is_forgotten() -> None:
    sampled = Sampled()
    sampled.after(INTERVAL_S, requests=1500)

    for _ in range(SAMPLES_MAX - 1):
        sampled.after(INTERVAL_S)
    assert sampled.rates._samples[0][0] == 100

    sampled.after(INTERVAL_S)
    assert {one[0] for one in sampled.rates._samples} == {0}


async def test_a_gateway_tells_the_rates_of_all_and_who_is_silent(stores: Stores) -> None:
    async with world_of(stores, bookies=3) as world, aiohttp.ClientSession() as session:
        for number, engine in enumerate((world.engine, world.other)):
            url = f"{engine.writer.url}/v1/logs/log-{number}"
            await done(session, "PUT", url, {})
            for _ in range(2):
                await done(session, "POST", f"{url}/records", {"text": "a record"})
            await done(session, "GET", f"{url}/records")
        for gateway in world.gateways:
            rates = gateway.app[_RATES]
            rates.sample(rates._awake_s + INTERVAL_S, rates._ends_s + INTERVAL_S)
        ghost = ServiceHeartbeat(url="http://127.0.0.1:1", internal_url="http://127.0.0.1:1", ttl_s=3600)  # fmt: skip
        await world.metadata.send_service_heartbeat("gateway", "ghost", ghost)

        async def is_listed() -> bool:
            return len(await world.engine.gateways()) == 3

        await until(is_listed, "both gateways and the silent one are listed")
        found = await done(session, "GET", f"{world.engine.writer.url}/v1/rates")

    ids = [one["id"] for one in found["gateways"]]
    newest = {name: values[-1] for name, values in found["total"].items()}
    each = [{name: row[-1] for name, row in one["series"].items()} for one in found["gateways"]]
    assert ids == [world.engine.writer.id, world.other.writer.id]
    assert found["missing"] == ["http://127.0.0.1:1"]
    assert found["interval_s"] == INTERVAL_S
    assert found["ends_at"].endswith("Z")
    assert all(len(values) == SAMPLES_MAX for values in found["total"].values())
    assert found["total"]["requests"][0] is None
    assert [one["appends"] for one in each] == [round(2 / 15, 3)] * 2
    assert [one["records"] for one in each] == [round(2 / 15, 3)] * 2
    assert newest["reads"] == round(2 * round(1 / 15, 3), 3)
    assert newest["append_bytes"] > 0
    assert min(one["append_ms"] for one in each) <= newest["append_ms"]
    assert newest["append_ms"] <= max(one["append_ms"] for one in each)


async def done(session: aiohttp.ClientSession, method: str, url: str, body: Any = None) -> Any:
    async with session.request(method, url, json=body) as answer:
        assert answer.status < 300, await answer.text()
        return await answer.json()


def test_each_answer_counts_once_by_status_and_once_in_the_times_of_its_route() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry, Room(Limits()))
    for method, status, seconds in (
        ("POST", 201, 0.0005),
        ("POST", 201, 0.003),
        ("POST", 409, 0.004),
        ("BREW", 405, 99.0),
    ):
        metrics.observe(method, "/v1/x", status, seconds)

    lines = generate_latest(registry).decode().splitlines()

    assert 'quorumlog_http_requests_total{method="POST",route="/v1/x",status="201"} 2.0' in lines
    assert 'quorumlog_http_requests_total{method="POST",route="/v1/x",status="409"} 1.0' in lines
    times = 'quorumlog_http_request_seconds_bucket{le="%s",method="%s",route="/v1/x"} %s'
    for le, method, count in (
        ("0.0005", "POST", "1.0"),
        ("0.002", "POST", "1.0"),
        ("0.005", "POST", "3.0"),
        ("+Inf", "POST", "3.0"),
        ("10.0", "other", "0.0"),
        ("+Inf", "other", "1.0"),
    ):
        assert times % (le, method, count) in lines
    assert 'quorumlog_http_request_seconds_count{method="POST",route="/v1/x"} 3.0' in lines
    assert 'quorumlog_http_request_seconds_sum{method="other",route="/v1/x"} 99.0' in lines
