"""The options of the format `quorumlog`, named like those of Kafka's format, and their parser.

The driver rejects invalid options before any task runs.
"""

import difflib
import json
import logging
import pkgutil
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, Self, cast

from quorumlog import header
from quorumlog.spark import config
from quorumlog.spark.http import DEADLINE_S, Gateways
from quorumlog.wire.secret import load_own

_log = logging.getLogger(__name__)

EARLIEST, LATEST = -2, -1
"""Offsets that mean a log's beginning and end in JSON; Kafka uses the same numbers."""

OffsetChoice = Literal["earliest", "latest"] | Mapping[str, int]
"""The beginning or the end of each log, or an offset for each named log."""


@dataclass(frozen=True, slots=True)
class ConsumerStart:
    """Begin each log at a consumer's committed offset, or at `otherwise` if there is none."""

    consumer: str
    otherwise: Literal["earliest", "latest"]


StartChoice = OffsetChoice | ConsumerStart

COLUMNS: Final = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "long",
    "timestamp": "timestamp",
    "timestampType": "int",
    "headers": "array<struct<key:string,value:binary>>",
    "ledger": "long",
    "entry": "long",
}
"""The columns of a read, with their types: Kafka's columns, and the record's ledger and entry."""

_TOKENS: Final = ("token", "token.file", "token.function")
_TLS: Final = ("tls.ca", "tls.certificate", "tls.key")
_CONNECTION: Final = ("gateway.url", *_TOKENS, *_TLS, "ledger.password")
_SUBJECTS: Final = ("subscribe", "subscribePattern", "assign", "ledgers")
READ_OPTIONS: Final = (
    *_CONNECTION,
    *_SUBJECTS,
    *("startingOffsets", "endingOffsets", "startingTimestamp", "endingTimestamp"),
    *("startingOffsetsByTimestampStrategy", "maxEntriesPerPartition", "minPartitions"),
    *("failOnDataLoss", "columns", "includeHeaders", "pushFilters"),
    "timestampsAscend",
    *("maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay"),
    *("publishProgressAs", "queue"),
)
_OF_QUEUES: Final = (
    *(*_CONNECTION, *_SUBJECTS, "queue", "maxOffsetsPerTrigger", "maxEntriesPerPartition"),
    *("minPartitions", "failOnDataLoss", "columns", "includeHeaders"),
)
WRITE_OPTIONS: Final = (
    *_CONNECTION,
    *("topic", "txnAppId", "txnVersion", "txnExpiresInSeconds"),
    *("maxLedgersPerCommit", "rowsPerRequest", "bytesPerRequest"),
)
_SPARKS: Final = ("checkpointLocation", "queryName")
"""Options that Spark adds to the options of a source."""

_URL: Final = re.compile(r"https?://[^/\s,]+/?", re.ASCII)
_TOKEN: Final = re.compile(r"[!-~]+")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", re.ASCII)
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION: Final = re.compile(r"(\d+)\s*(ms|s|m|h|d)", re.ASCII)

LEDGERS_PER_COMMIT_MAX: Final = 128
"""Maximum ledgers per commit, because each costs a create and a close. Chosen by judgement."""


class BadOption(ValueError):
    """An invalid option; the message names the option and its valid values."""


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """How to reach the cluster's gateways."""

    urls: str
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    """The token to send. With `token_file`: the driver's token, for hosts without that file."""
    token_file: str | None = None
    token_function: str | None = None
    """`module:function`, which returns the current token, on the driver and in tasks."""
    tls: tuple[str | None, str | None, str | None] = (None, None, None)
    """PEM files: the authorities, the client's certificate, and its key if in another file."""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Self:
        """Parse the connection's options. Defaults come from the environment. Raises: BadOption."""
        known = config.connection()
        given = [name for name in _TOKENS if name in options]
        if len(given) > 1:
            raise BadOption(f"set only one of {', '.join(_TOKENS)}; given: {', '.join(given)}")
        for name in _TOKENS if given else ():
            known.pop(name, None)
        known |= {name: options[name] for name in _CONNECTION if name in options}
        urls = known["gateway.url"]
        if not all(_URL.fullmatch(url.strip()) for url in urls.split(",")):
            raise BadOption(
                f"gateway.url must be http://host:port or https URLs, separated by commas, not {urls!r}"
            )
        ca, certificate, key = map(known.get, _TLS)
        if key is not None and certificate is None:
            raise BadOption("tls.key needs tls.certificate, which is missing")
        token, file, function = map(known.get, _TOKENS)
        password, tls = known.get("ledger.password"), (ca, certificate, key)
        found = cls(urls, password, token, file, function, tls)
        found.context()
        return replace(found, token=found.current_token())

    def current_token(self) -> str | None:
        """The current token, if any. Raises: BadOption."""
        token = self.token
        try:
            if self.token_function is not None:
                token = pkgutil.resolve_name(self.token_function)()
            elif self.token_file is not None and not (token and self._lacks_file()):
                token = Path(self.token_file).read_text("ascii").strip()
        except (OSError, ImportError, AttributeError, ValueError) as error:
            raise BadOption(
                f"{self.token_function or self.token_file} returned no token: {error}"
            ) from error
        is_due = token is not None or self.token_function is not None
        if is_due and not _TOKEN.fullmatch(token or ""):
            raise BadOption("token must be non-empty ASCII without spaces or line breaks")
        return token

    def _lacks_file(self) -> bool:
        return self.token_file is not None and not Path(self.token_file).exists()

    def context(self) -> ssl.SSLContext | None:
        """A TLS context from the files; None means the system's default. Raises: BadOption."""
        ca, certificate, key = self.tls
        if ca is certificate is None:
            return None
        try:
            context = ssl.create_default_context(cafile=ca)
            if certificate is not None:
                load_own(context, Path(certificate), Path(key or certificate))
        except OSError as error:
            raise BadOption(f"can't load tls.* ({ca}, {certificate}, {key}): {error}") from error
        return context

    def connect(self, *, deadline_s: float = DEADLINE_S) -> Gateways:
        """Open a connection that the caller closes; `deadline_s` limits a request with its retries."""
        if self._lacks_file():
            _log.warning(
                "quorumlog: this host has no %s: requests use the token that the driver had at the start, and never a newer one",
                self.token_file,
            )
        password = self.password
        return Gateways(
            self.urls,
            deadline_s=deadline_s,
            headers=None if password is None else {header.LEDGER_PASSWORD: password},
            token=self.current_token,
            context=self.context(),
        )


@dataclass(frozen=True, slots=True)
class ReadSubject:
    """The subject of a read: exactly one of the fields is set."""

    names: tuple[str, ...] = ()
    pattern: str | None = None
    ledgers: tuple[int, ...] = ()

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Self:
        """Parse the option `subscribe`, `subscribePattern`, `assign` or `ledgers`."""
        given = [name for name in _SUBJECTS if name in options]
        if len(given) != 1:
            raise BadOption(
                "set exactly one of subscribe, subscribePattern, assign and ledgers; "
                f"given: {', '.join(given) or 'none'}"
            )
        text = options[given[0]]
        match given[0]:
            case "subscribe":
                return cls(names=_names(text.split(","), "subscribe"))
            case "assign":
                assigned = _object(text, "assign")
                if any(places != [0] for places in assigned.values()):
                    raise BadOption('assign must be like {"log":[0]}: a log has only partition 0')
                return cls(names=_names(assigned, "assign"))
            case "subscribePattern":
                try:
                    re.compile(text)
                except re.error as error:
                    raise BadOption(
                        f"subscribePattern is not a valid regular expression: {error}"
                    ) from None
                return cls(pattern=text)
            case _:
                return cls(ledgers=_ids(text))

    def has(self, name: str) -> bool:
        """Whether a log of this name would be read."""
        if self.pattern is not None:
            return re.fullmatch(self.pattern, name) is not None
        return name in self.names


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options of batch and streaming reads."""

    connection: ClusterAccess
    subject: ReadSubject
    starting: StartChoice | None
    ending: OffsetChoice
    starting_ms: int | None
    ending_ms: int | None
    starts_late: bool
    """Whether to begin at the end, instead of failing, if no record is as late as `startingTimestamp`."""
    rows_per_partition_max: int
    partitions_min: int
    fails_on_loss: bool
    columns: tuple[str, ...]
    pushes_filters: bool
    timestamps_ascend: bool
    """Whether filters on timestamps may prune, because the timestamps of records ascend."""
    rows_per_trigger_max: int | None
    bytes_per_trigger_max: int | None
    rows_per_trigger_min: int | None
    trigger_delay_s: float
    published_as: str | None
    """The consumer under whose name a stream publishes its progress."""
    queue: str | None
    """The queue from which a stream claims records."""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Self:
        """Parse all options of batch and streaming reads. Raises: BadOption."""
        _check_names(options, READ_OPTIONS, WRITE_OPTIONS, "writes")
        subject = ReadSubject.of(options)
        starting, ending = _start(options), _place(options, "endingOffsets", LATEST)
        _check_places(options, subject, {"startingOffsets": starting, "endingOffsets": ending})
        late = options.get("startingOffsetsByTimestampStrategy", "error")
        if late not in ("error", "latest"):
            raise BadOption("startingOffsetsByTimestampStrategy must be error or latest")
        most_rows = _count(options, "maxOffsetsPerTrigger")
        least_rows = _count(options, "minOffsetsPerTrigger")
        if most_rows and least_rows and least_rows > most_rows:
            raise BadOption("minOffsetsPerTrigger must not be above maxOffsetsPerTrigger")
        return cls(
            ClusterAccess.of(options),
            subject,
            starting,
            ending or "latest",
            _time(options, "startingTimestamp"),
            _time(options, "endingTimestamp"),
            late == "latest",
            _count(options, "maxEntriesPerPartition") or 1_000_000,
            _count(options, "minPartitions") or 1,
            _flag(options, "failOnDataLoss", default=True),
            columns_of(options),
            _flag(options, "pushFilters", default=False),
            _flag(options, "timestampsAscend", default=False),
            most_rows,
            _count(options, "maxBytesPerTrigger"),
            least_rows,
            _duration(options.get("maxTriggerDelay", "15m")),
            _published_as(options, subject),
            _queue(options, subject),
        )


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """The options of batch and streaming writes."""

    connection: ClusterAccess
    log: str | None
    """The log of every row (option `topic`); None if the column `topic` names it."""
    app: str | None
    version: int | None
    ledgers_max: int
    expires_in_s: int | None
    rows_per_request: int
    bytes_per_request: int

    @classmethod
    def of(cls, options: Mapping[str, str], *, is_stream: bool) -> Self:
        """Parse the options. Raises: BadOption."""
        _check_names(options, WRITE_OPTIONS, READ_OPTIONS, "reads")
        app, version = options.get("txnAppId"), options.get("txnVersion")
        if is_stream and version is not None:
            raise BadOption("a stream's txnVersion is the batch number: do not set the option")
        if not is_stream and (app is None) != (version is None):
            raise BadOption("set both txnAppId and txnVersion, or neither")
        log = options.get("topic")
        return cls(
            ClusterAccess.of(options),
            None if log is None else _names([log], "topic")[0],
            app,
            None if version is None else _number(version, "txnVersion"),
            _count(options, "maxLedgersPerCommit") or LEDGERS_PER_COMMIT_MAX,
            _count(options, "txnExpiresInSeconds"),
            min(_count(options, "rowsPerRequest") or 10_000, 10_000),
            min(_count(options, "bytesPerRequest") or 4 << 20, 4 << 20),
        )


def columns_of(options: Mapping[str, str]) -> tuple[str, ...]:
    """The columns of a read, from the option `columns`. Default: all but `headers`."""
    text = options.get("columns")
    if text is None:
        has_headers = _flag(options, "includeHeaders", default=False)
        return tuple(name for name in COLUMNS if has_headers or name != "headers")
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in COLUMNS:
            raise BadOption(f"columns may contain {', '.join(COLUMNS)}; not {name!r}")
    if len(set(names)) != len(names):
        raise BadOption("the option columns contains a column twice: list each column once")
    return names


def _check_names(
    options: Mapping[str, str], own: tuple[str, ...], others: tuple[str, ...], what: str
) -> None:
    """Raise BadOption for an unknown name: a misspelled option would silently have no effect."""
    known = {name.lower(): name for name in (*own, *_SPARKS)}
    for name in options:
        if name.lower() in known:
            continue
        if name.lower() in {other.lower() for other in others}:
            raise BadOption(f"{name} is an option for {what} only")
        if name.lower() in ("path", "paths"):
            raise BadOption("load() and save() take no path: use the options subscribe and topic")
        close = difflib.get_close_matches(name.lower(), known, 1)
        hint = f"did you mean {known[close[0]]}?" if close else f"the options are {', '.join(own)}"
        raise BadOption(f"there is no option {name}: {hint}")


def _check_places(
    options: Mapping[str, str], subject: ReadSubject, places: Mapping[str, StartChoice | None]
) -> None:
    """Raise BadOption for offsets of logs that are not read, and for starts or ends of ledgers."""
    for option in (*places, "startingTimestamp", "endingTimestamp"):
        if subject.ledgers and option in options:
            raise BadOption(f"{option} is for logs: use a filter to read part of a ledger")
    for option, place in places.items():
        for name in place if isinstance(place, Mapping) else ():
            if not subject.has(name):
                raise BadOption(f"{option} names the log {name}, which this query does not read")


def _published_as(options: Mapping[str, str], subject: ReadSubject) -> str | None:
    name = options.get("publishProgressAs")
    if name is None:
        return None
    if subject.ledgers:
        raise BadOption("publishProgressAs is for logs: ledgers have no consumers")
    return _named(name, "publishProgressAs", "consumer")


def _queue(options: Mapping[str, str], subject: ReadSubject) -> str | None:
    name = options.get("queue")
    if name is None:
        return None
    if len(subject.names) != 1:
        raise BadOption("queue needs exactly one log: name the log with subscribe")
    for option in READ_OPTIONS:
        if option in options and option not in _OF_QUEUES:
            raise BadOption(f"{option} can't be combined with queue: the queue's settings apply")
    return _named(name, "queue", "queue")


def _named(given: Any, option: str, noun: str) -> str:
    if not isinstance(given, str) or not _NAME.fullmatch(given):
        raise BadOption(f"{option}: {given!r} is not a valid name of a {noun}")
    return given


def _names(given: Any, option: str) -> tuple[str, ...]:
    names = tuple(str(name).strip() for name in given)
    for name in names:
        if not _NAME.fullmatch(name):
            raise BadOption(f"{option}: {name!r} is not a valid name of a log")
    return names


def _ids(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise BadOption(f"ledgers must be ids separated by commas, not {text!r}")
    return tuple(map(int, parts))


def _object(text: str, option: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise BadOption(f"{option} must be a JSON object, not {text!r}")
    return value


def _start(options: Mapping[str, str]) -> StartChoice | None:
    """Parse `startingOffsets`, which may name a consumer: `{"consumer":"billing"}`. A name is text,
    so it can't be mistaken for the offsets of a log called `consumer`.
    """
    text = options.get("startingOffsets")
    if text is None or text.strip().lower() in ("earliest", "latest"):
        return _place(options, "startingOffsets", EARLIEST)
    given = _object(text, "startingOffsets")
    if not any(isinstance(value, str) for value in given.values()):
        return _place(options, "startingOffsets", EARLIEST)
    if not {"consumer"} <= given.keys() <= {"consumer", "from"}:
        raise BadOption(
            'startingOffsets must name a consumer as {"consumer":"billing"} or '
            f'{{"consumer":"billing","from":"latest"}}, not {text!r}'
        )
    otherwise = given.get("from", "earliest")
    if otherwise not in ("earliest", "latest"):
        raise BadOption(f"startingOffsets: from must be earliest or latest, not {otherwise!r}")
    return ConsumerStart(_named(given["consumer"], "startingOffsets", "consumer"), otherwise)


def _place(options: Mapping[str, str], option: str, end: int) -> OffsetChoice | None:
    """Parse the option for the start (`end` is EARLIEST) or the end (`end` is LATEST) of a read."""
    text = options.get(option)
    if text is None:
        return None
    word = text.strip().lower()
    if word == "earliest" and end == LATEST:
        raise BadOption(f"{option} can't be earliest: use latest or offsets")
    if word in ("earliest", "latest"):
        return cast("OffsetChoice", word)
    places = {}
    for name, by_partition in _object(text, option).items():
        is_right = isinstance(by_partition, dict) and list(by_partition) == ["0"]
        offset = by_partition["0"] if is_right else None
        if type(offset) is not int or offset < EARLIEST:
            raise BadOption(
                f'{option} must be earliest, latest or {{"log":{{"0":23}}}}, not {text!r}'
            )
        if offset == EARLIEST and end == LATEST:
            raise BadOption(f"{option} can't be -2 (earliest): use -1 (latest) or an offset")
        places[name] = offset
    return places


def _number(text: str, option: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise BadOption(f"{option} must be a number, not {text!r}")
    return int(text)


def _count(options: Mapping[str, str], option: str) -> int | None:
    text = options.get(option)
    if text is None:
        return None
    value = _number(text, option)
    if value == 0:
        raise BadOption(f"{option} must be at least 1")
    return value


def _flag(options: Mapping[str, str], option: str, *, default: bool) -> bool:
    text = options.get(option)
    if text is None:
        return default
    if text.lower() not in ("true", "false"):
        raise BadOption(f"{option} must be true or false, not {text!r}")
    return text.lower() == "true"


def _time(options: Mapping[str, str], option: str) -> int | None:
    """Parse milliseconds since 1970 or an RFC 3339 time; returns milliseconds."""
    text = options.get(option)
    if text is None:
        return None
    if text.isascii() and text.isdecimal():
        return int(text)
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise BadOption(f"{option} must be an RFC 3339 time or Unix ms, not {text!r}") from None
    return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)


def _duration(text: str) -> float:
    found = _DURATION.fullmatch(text.strip().lower())
    if found is None:
        raise BadOption(f"maxTriggerDelay must be a duration such as 15m, not {text!r}")
    return int(found.group(1)) * _UNITS[found.group(2)]
