"""Builds the bookie: its store, its routes, its metrics."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, Final

from aiohttp import web
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic.json_schema import models_json_schema

from quorumlog.net.service import METRICS, add_shared_routes, answers_problems
from quorumlog.wire.bodies import Body
from quorumlog.wire.digest_bodies import DigestsAsked, DigestsBody
from services.bookie import handlers
from services.bookie.bodies import (
    DamageBody,
    EntriesBody,
    HeldBody,
    HeldList,
    InfoBody,
    ProcessBody,
    VerdictBody,
)
from services.bookie.config import Config
from services.bookie.handlers import BOOKIE
from services.bookie.runtime import Bookie, end_process

BODY_BYTES_MAX: Final = 80 * 1024 * 1024

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_COUNTERS: Final = (
    "log_bytes",
    "log_records",
    "log_syncs",
    "checkpoints",
    "damaged_reads",
    "scrubbed_bytes",
    "scrub_damages",
    "dropped_ledgers",
    "removed_segments",
    "compacted_bytes",
)
_TEXT: Final = {"type": "string"}
_LEDGER: Final = "/v1/ledgers/{ledger_id}"
_ROUTES: Final[tuple[tuple[str, str, _Handler, type[Body] | None], ...]] = (
    ("GET", "/v1/channel", handlers.open_channel, None),
    ("GET", "/v1/info", handlers.info, InfoBody),
    ("GET", "/v1/process", handlers.process, ProcessBody),
    ("PUT", "/v1/state", handlers.put_state, InfoBody),
    ("PUT", "/v1/maintenance", handlers.put_maintenance, InfoBody),
    ("GET", "/v1/damage", handlers.damage, DamageBody),
    ("GET", "/v1/ledgers", handlers.list_ledgers, HeldList),
    ("GET", _LEDGER, handlers.get_ledger, HeldBody),
    ("POST", f"{_LEDGER}/entries", handlers.add_entries, VerdictBody),
    ("GET", f"{_LEDGER}/entries", handlers.read_entries, EntriesBody),
    ("POST", f"{_LEDGER}/fence", handlers.fence, VerdictBody),
    ("GET", f"{_LEDGER}/last-add-confirmed", handlers.last_add_confirmed, VerdictBody),
    ("POST", f"{_LEDGER}/digests", handlers.digest_ranges, DigestsBody),
)
_VERDICTS: Final = (VerdictBody, EntriesBody)
_QUERIES: Final[Mapping[str, tuple[str, ...]]] = {
    "add_entries": ("kind",),
    "read_entries": ("from", "to"),
    "list_ledgers": ("after", "limit"),
}


def build(config: Config, *, end: Callable[[int, str], None] = end_process) -> web.Application:
    """Build the application. It listens at once and is ready once the bookie is registered."""
    app = web.Application(middlewares=[answers_problems], client_max_size=BODY_BYTES_MAX)
    app[BOOKIE] = Bookie(config, end=end)

    async def live(app: web.Application) -> AsyncIterator[None]:
        app[BOOKIE].start()
        yield
        await app[BOOKIE].stop()

    async def end_channels(app: web.Application) -> None:
        # The server waits for its handlers when it shuts down, and open channels are handlers.
        await asyncio.gather(*[socket.close() for socket in list(app[BOOKIE].sockets)])

    app.on_shutdown.append(end_channels)
    app.cleanup_ctx.append(live)

    async def ready() -> None:
        await app[BOOKIE].ready()

    add_shared_routes(app, ready=ready, openapi=_openapi)
    app[METRICS].register(_StoreMetrics(app))
    add_routes(app)
    return app


def add_routes(app: web.Application) -> None:
    """The bookie's own routes."""
    for method, path, handler, _ in _ROUTES:
        app.router.add_route(method, path, handler)


class _StoreMetrics(Collector):
    """The store's counters, collected at scrape time: they cost nothing on the hot path."""

    def __init__(self, app: web.Application) -> None:
        self._app = app

    def collect(self) -> Iterable[Metric]:
        """The metrics as they are now."""
        store = self._app[BOOKIE].store
        if store is None:
            return
        for name in _COUNTERS:
            yield CounterMetricFamily(
                f"bookie_{name}", f"{name.replace('_', ' ')} so far", value=store.counters[name]
            )
        damages = store.damages.count
        yield GaugeMetricFamily("bookie_damages", "places known to be damaged", value=damages)
        yield CounterMetricFamily(
            "bookie_missing_rows",
            "rows that the metadata service lacks without a tombstone: nothing was deleted",
            value=self._app[BOOKIE].missing_rows,
        )
        yield GaugeMetricFamily("bookie_pending_bytes", "queued", value=store.pending.bytes)
        yield GaugeMetricFamily("bookie_free_bytes", "room on disk", value=store.disk.free_bytes())
        yield GaugeMetricFamily("bookie_disk_low", "1: little room left", value=store.disk.is_low)
        yield GaugeMetricFamily("bookie_read_only", "1: no normal adds", value=store.takes_no_adds)
        limbo = self._app[BOOKIE].limbo
        if limbo is not None:
            progress, copied = limbo.progress, store.counters["limbo_copied_entries"]
            for name, value in (
                ("ledgers", progress.ledgers),
                ("checked_entries", progress.checked_entries),
                ("copied_entries", copied),
            ):
                text = f"limbo: {name.replace('_', ' ')} (docs/guides/bookie.md)"
                yield GaugeMetricFamily(f"bookie_limbo_{name}", text, value=value)


def _openapi() -> Mapping[str, Any]:
    models: list[type[Body]] = [model for *_, model in _ROUTES if model is not None]
    models.append(DigestsAsked)
    _, schemas = models_json_schema(
        [(model, "serialization") for model in models],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, dict[str, Any]] = {}
    for method, path, handler, gives in _ROUTES:
        summary = (handler.__doc__ or "").strip().split("\n", 1)[0].rstrip(".")
        name = handler.__name__
        places = [("query", query) for query in _QUERIES.get(name, ())]
        if "{" in path:
            places.append(("path", "ledger_id"))
        parameters = [
            {"name": place_name, "in": place, "required": place == "path", "schema": _TEXT}
            for place, place_name in places
        ]
        operation: dict[str, Any] = {
            "operationId": name,
            "summary": summary,
            "parameters": parameters,
            "responses": {
                "default": {
                    "description": "a problem",
                    "content": {"application/problem+json": {"schema": {"type": "object"}}},
                }
            },
        }
        if gives is not None:
            schema = {"$ref": f"#/components/schemas/{gives.__name__}"}
            operation["responses"]["200"] = {
                "description": "the answer",
                "content": {"application/json": {"schema": schema}},
            }
            if gives in _VERDICTS:
                # A refusal or an unknown is a verdict too, under its own HTTP status.
                operation["responses"]["default"]["content"]["application/json"] = {
                    "schema": schema
                }
        paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "quorumlog bookie", "version": "1"},
        "paths": paths,
        "components": {"schemas": schemas.get("$defs", {})},
    }
