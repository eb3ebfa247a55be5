"""Trace context, which links log lines and requests to the client request that caused them.

In the W3C's header `traceparent`, all services pass the trace id on unchanged, and each hop creates
a new span id. Requests without the header are not traced. A trace ends at the channel to bookies,
where one run carries the entries of many requests.
"""

import logging
import re
import secrets
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import aiohttp
import orjson

HEADER: Final = "traceparent"
_FORM: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


@dataclass(frozen=True, slots=True)
class Trace:
    """One hop of a trace."""

    trace_id: str
    span_id: str
    flags: str

    @property
    def header(self) -> str:
        """The `traceparent` header for requests to the next service."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"


_trace: ContextVar[Trace | None] = ContextVar("trace", default=None)
_request: ContextVar[str | None] = ContextVar("request", default=None)


def begin(request_id: str, traceparent: str | None) -> None:
    """Begin a request, so that further work in this context belongs to its trace."""
    _request.set(request_id)
    trace = None
    if traceparent is not None:
        found = _FORM.fullmatch(traceparent)
        # Ids of only zeros are invalid (W3C), and an invalid header starts no trace.
        if found is not None and int(found[1], 16) and int(found[2], 16):
            trace = Trace(found[1], secrets.token_hex(8), found[3])
    _trace.set(trace)


def in_logs() -> dict[str, str]:
    """The log fields that identify the current request and its trace."""
    request_id, trace = _request.get(), _trace.get()
    fields = {} if request_id is None else {"request_id": request_id}
    if trace is not None:
        fields |= {"trace_id": trace.trace_id, "span_id": trace.span_id}
    return fields


def config() -> aiohttp.TraceConfig:
    """A client session's hook that sends the trace header if the request belongs to a trace."""
    found = aiohttp.TraceConfig()
    found.on_request_start.append(_send_header)
    return found


async def _send_header(
    _session: aiohttp.ClientSession, _context: Any, params: aiohttp.TraceRequestStartParams
) -> None:
    trace = _trace.get()
    if trace is not None:
        params.headers[HEADER] = trace.header


_OWN: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """Formats a log record as JSON: time, level, service, logger, event, fields of `extra`."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON, without a line break."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= in_logs()
        line |= {name: value for name, value in record.__dict__.items() if name not in _OWN}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def log_as_json(service: str, level: str) -> None:
    """Configure the root logger to write JSON lines only."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
