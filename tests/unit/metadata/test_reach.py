"""A server that is away is told once, with its error's text, and once more when it is back."""

import logging
from dataclasses import replace

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from loadtest.stores import Stores
from services.metadata.servers import Reach
from tests.support.proxy import proxy_to
from tests.support.waiting import until
from tests.unit.metadata.support import serving


def reported(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str | None]]:
    return [(record.message, getattr(record, "error", None)) for record in caplog.records]


def test_each_outage_is_told_once_with_its_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    reach = Reach(away="toy-away", there="toy-there", deadline_s=0.5)

    for error in (TimeoutError(), TimeoutError(), RedisConnectionError("Error 111"), None, None):
        if error is None:
            reach.found()
        else:
            reach.lost(error)

    assert reported(caplog) == [
        ("toy-away", "no answer within 0.5 s"),
        ("toy-away", "ConnectionError: Error 111"),
        ("toy-there", None),
    ]
    assert reach.is_up


def test_an_outage_with_errors_that_take_turns_fills_no_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reach = Reach(away="toy-away", there="toy-there", deadline_s=0.5)

    for number in range(1000):
        reach.lost(OSError("refused"))
        reach.lost(OSError(f"reset {number % 100}"))

    texts = [error for _, error in reported(caplog)]
    assert texts[:2] == ["OSError: refused", "OSError: reset 0"]
    assert len(texts) == len(set(texts)) <= 10


@pytest.mark.parametrize(
    ("store", "event"), [("redis", "redis-away"), ("postgres", "database-away")]
)
async def test_a_database_that_was_never_there_and_one_that_goes_away_are_told_with_their_errors(
    stores: Stores, caplog: pytest.LogCaptureFixture, store: str, event: str
) -> None:
    name = {"redis": "redis_url", "postgres": "postgres_dsn"}[store]
    caplog.set_level(logging.INFO, "services.metadata")

    def tellings(event: str) -> list[str | None]:
        return [error for told_event, error in reported(caplog) if told_event == event]

    async with proxy_to(getattr(stores, name)) as proxy:
        proxy.is_down = True
        through = replace(stores, **{name: proxy.url(getattr(stores, name))})
        async with serving(through, wait=False, redis_deadline_s=0.5):
            await until(lambda: tellings(event), f"{event} is logged")
            proxy.is_down = False
            back = event.replace("away", "there")
            await until(lambda: tellings(back), f"{back} is logged")
            first = len(tellings(event))
            proxy.is_down = True
            proxy.cut_all()
            await until(lambda: len(tellings(event)) > first, f"{event} is logged again")

    assert all(tellings(event))
