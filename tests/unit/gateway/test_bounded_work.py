"""No body costs a gateway more work than its length allows, and quick parsers agree with slow ones."""

import asyncio
import contextlib
import gc
import random
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import orjson
import pytest
from pydantic import ValidationError

from quorumlog.errors import BadRequest, InvalidRequest, QuorumLogError, TooLarge
from quorumlog.net.bodies import invalid_of
from quorumlog.wire import problems, strict
from quorumlog.zstd import zstd
from services.gateway.edge import payloads
from services.gateway.edge.http import body
from services.gateway.edge.http.limits import CONTROL_BYTES_MAX, INLINE_BYTES_MAX
from services.gateway.edge.models import LedgerCreate
from services.gateway.edge.transactions import TransactionCommit
from services.gateway.streams.messages import records_of
from tests.support.worst_bodies import VALUES, filled, numbered
from tests.unit.gateway.conftest import running
from tests.unit.logs.support import Http
from tests.unit.logs.test_http import served

UNITS_OF_A_MIB: Final = 150
"""CPU of both ends of a request: five times what the worst bodies take. A body of large numbers once took minutes, which is
some ten thousand units."""
MEMORY_MIB: Final = 220
"""Of a request of 16 MiB, both ends: it took up to 1,284 MiB."""
HELD_UNITS: Final = 25
"""CPU of one turn of the loop, with the client's share: eight times what the worst bodies take. One turn once took up to
5.7 s, which is some 600 units."""
MIB: Final = 1 << 20


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    """Keep the garbage collector from visiting objects that are older than the test. A test run has
    millions of them, and a full collection takes longer than the limit for one turn of the loop.
    """
    gc.freeze()
    yield
    gc.unfreeze()


def peak_mib() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line) >> 10


_UNIT: Final = b"[%b]" % b",".join(b'{"number":%d,"text":"text"}' % n for n in range(2000))


def unit_s() -> float:
    """CPU that 25 parses take now, by the time of four: 10 ms on a machine with nothing else to do."""
    begun = time.thread_time()
    for _ in range(4):
        strict.parse(_UNIT)
    return (time.thread_time() - begun) * 25 / 4


@contextlib.contextmanager
def bounded(size: int, what: object) -> Iterator[None]:
    """A block that may take so much CPU and memory."""
    unit = unit_s()
    Path("/proc/self/clear_refs").write_text("5")
    before, begun = peak_mib(), time.process_time()
    yield
    took_s, took_mib = time.process_time() - begun, peak_mib() - before
    units = took_s / max(unit, unit_s())
    assert units < UNITS_OF_A_MIB * max(1, size / MIB), f"{what}: {took_s:.2f} s of CPU"
    assert took_mib < MEMORY_MIB, f"{what}: {took_mib} MiB"


class Turns:
    """The longest turn of the loop, in CPU of its thread."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._unit_s = unit_s()

    async def watch(self) -> None:
        while True:
            begun = time.thread_time()
            # As long as others are to do their work: a loop that never rests would take its CPU from them.
            await asyncio.sleep(0.001)
            self.longest_s = max(self.longest_s, time.thread_time() - begun)

    @property
    def longest_units(self) -> float:
        return self.longest_s / max(self._unit_s, unit_s())  # the machine's speed may have changed


@contextlib.asynccontextmanager
async def watched() -> AsyncIterator[Turns]:
    turns = Turns()
    task = asyncio.create_task(turns.watch())
    try:
        yield turns
    finally:
        task.cancel()


async def operations(http: Http) -> list[tuple[str, str, str, list[str]]]:
    """Each operation with a JSON body: its method, path, the body's media type, and the names of the body's fields."""
    description = (await http.ask("GET", "/openapi.json")).json
    schemas = description["components"]["schemas"]
    found = []
    for path, item in description["paths"].items():
        for method, operation in item.items():
            for media, content in operation.get("requestBody", {}).get("content", {}).items():
                if "json" in media or media == "*/*":
                    names = sorted(_fields(content.get("schema", {}), schemas))
                    found.append((method.upper(), path, media, names or ["json"]))
    return found


def _fields(schema: dict[str, Any], schemas: dict[str, Any]) -> set[str]:
    if "$ref" in schema:
        return _fields(schemas[schema["$ref"].rsplit("/", 1)[1]], schemas)
    nested = [each for key in ("anyOf", "oneOf") for each in schema.get(key, [])]
    return set(schema.get("properties", {})).union(*(_fields(each, schemas) for each in nested))


def is_append(path: str) -> bool:
    return path.endswith(("/entries", "/records")) or "/stream/" in path


def place(path: str) -> str:
    known = {"ledger_id": "1", "name": "log", "consumer": "c", "path": "s", "transaction": "log/1"}
    for name, value in known.items():
        path = path.replace(f"{{{name}}}", value)
    return path


@pytest.mark.parametrize("kind", VALUES)
async def test_no_route_spends_more_on_a_body_than_its_length_allows(kind: str) -> None:
    dice = random.Random(kind)
    async with served() as http:
        assert (await http.ask("PUT", "/v1/logs/log", {})).status == 201
        assert (await http.ask("POST", "/v1/ledgers", {})).status == 201
        found = await operations(http)
        assert len(found) > 15
        made = {size: VALUES[kind](size - 100) for size in (INLINE_BYTES_MAX, MIB, 6 * MIB)}
        largest = dice.choice([one for one in found if is_append(one[1])])
        for method, path, media, names in found:
            size = dice.choice((INLINE_BYTES_MAX, MIB))
            if (method, path, media, names) == largest:
                size = 6 * MIB
            value = made[size]
            field = dice.choice(names) if media != "application/x-ndjson" else "json"
            bodies = [b'{"%b":%b}' % (field.encode(), value), value]
            type_ = media if media != "*/*" else "application/json"
            data, headers = dice.choice(bodies), {"Content-Type": type_}
            sent = data
            if dice.random() < 0.2:
                sent, headers["Content-Encoding"] = zstd.compress(data, 1), "zstd"
            what = (method, path, media, kind)
            with bounded(len(data), what):
                async with watched() as turns:
                    answer = await http.ask(method, place(path), body=sent, headers=headers)
            assert turns.longest_units < HELD_UNITS, (what, size, turns.longest_s)
            # No process of autorecovery runs behind this gateway.
            is_away = answer.status == 503 and b"service-unavailable" in answer.body
            assert answer.status < 500 or is_away, (what, answer)
            assert len(answer.body) < 64 << 10, what


def test_faults_are_counted_before_they_are_made() -> None:
    for model, text in (
        (LedgerCreate, b'{"metadata":%b}' % numbered(600_000)),
        (LedgerCreate, numbered(600_000)),
        (TransactionCommit, b'{"ledgers":%b}' % filled(200_000, b'{"a":1}')),
        (TransactionCommit, b'{"ledgers":%b}' % filled(60_000, b'"x"')),
    ):
        value = orjson.loads(text)
        with bounded(1, model), pytest.raises(InvalidRequest) as caught:
            body.parsed(value, model)
        assert len(problems.to_bytes(caught.value)) < 4096


def test_a_text_has_no_more_values_than_it_may_before_one_is_made() -> None:
    most = strict.MARKS_MAX
    assert strict.parse(filled(2 * most, b"0"))
    for text in (b"[" + b"0," * most + b"0]", b"[" + b'"",' * most + b"1]", b"[" * (most + 2)):
        with pytest.raises(TooLarge, match="commas"):
            strict.parse(text)
    # In strings they are text.
    assert strict.parse(b'["%b"]' % (b",:[{" * most))
    assert strict.parse(b'["%b"]' % (b'\\",' * most))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (filled(8 * MIB, b"0"), TooLarge),
        (b"[" + b"0," * 20_000 + b"0]", TooLarge),
        (b" " * 8 * MIB, BadRequest),
        (b"[" * 4 * MIB, (BadRequest, TooLarge)),
    ],
    ids=["zeros", "a few too many", "spaces", "depth"],
)
def test_a_streams_messages_count_as_they_come(text: bytes, expected: type[Exception]) -> None:
    with bounded(len(text), expected), pytest.raises(expected):
        records_of(text, is_json=True)


async def test_a_body_pays_for_what_it_unpacks_to() -> None:
    async with running() as gateway:
        await gateway.create()
        packed = zstd.compress(b"x" * (MIB - 1), 1)
        headers = {"Content-Type": "application/octet-stream", "Content-Encoding": "zstd"}
        fits = await gateway.ask("POST", "/v1/ledgers/1/entries", packed, headers=headers)
        headers["Content-Type"] = "application/json"
        packed = zstd.compress(b'{"text":"%b"}' % (b"x" * 8 * MIB), 1)
        bomb = await gateway.ask("POST", "/v1/ledgers/1/entries", packed, headers=headers)

    assert fits.status == 201
    assert (bomb.status, bomb.code) == (413, "too-large")
    assert "100 times" in bomb.json["detail"]


async def test_a_large_body_is_parsed_while_others_have_their_turn() -> None:
    # So many values that the parse takes as long as some hundred small requests.
    data = b'{"entries":%b}' % filled(5 * MIB, b'{"json":{"a":"%b"}}' % (b"x" * 600))
    assert len(data) > INLINE_BYTES_MAX
    async with running() as gateway:
        await gateway.create()
        headers = {"Content-Type": "application/json"}
        async with watched() as turns:
            answer = await gateway.ask("POST", "/v1/ledgers/1/entries", data, headers=headers)
        assert answer.status == 201, answer
        assert turns.longest_units < HELD_UNITS


def plain(text: bytes) -> bytes:
    """A string of the text, repeated, in the largest body that is parsed inline."""
    return b'"%b"' % (text * ((body._PLAIN_BYTES_MAX - 100) // len(text)))


@pytest.mark.parametrize("length", [1, 4096, 4097, 20_000])
@pytest.mark.parametrize("bytes_a_mark", [1, 200, 300, 5000])
def test_marks_are_counted_however_many_there_are(length: int, bytes_a_mark: int) -> None:
    dice = random.Random(length * bytes_a_mark)
    text = bytes(
        dice.choice(b",:[{") if dice.random() * bytes_a_mark < 1 else dice.choice(b'"a]}\\')
        for _ in range(length)
    )
    assert strict.marks(text) == sum(map(text.count, (b",", b":", b"[", b"{")))


@pytest.mark.parametrize(
    "value",
    [
        plain(b"\\u0001"),
        plain(b'\\"'),
        plain(b"\\\\"),
        plain(b"\\ud83d\\ude00"),
        plain("ü".encode()),
        plain(b"QUJD"),
        b"1." + b"7" * (body._PLAIN_BYTES_MAX - 100),
        b"[%b]" % b",".join([b"1." + b"7" * 120] * (body._PLAIN_MARKS_MAX - 10)),
    ],
    ids=["control", "quotes", "backslashes", "surrogates", "utf8", "base64", "digits", "decimals"],
)
def test_a_body_of_few_values_is_parsed_quickly_whatever_its_strings_are(value: bytes) -> None:
    for form in payloads.FORMS:
        data = b'{"%b":%b}' % (form.encode(), value)
        assert len(data) <= body._PLAIN_BYTES_MAX
        assert strict.marks(data) <= body._PLAIN_MARKS_MAX
        unit, begun = unit_s(), time.thread_time()
        with contextlib.suppress(QuorumLogError):
            payloads.from_json(data, len(data))
        took_s = time.thread_time() - begun
        assert took_s < HELD_UNITS * max(unit, unit_s()), form


async def test_a_body_of_no_append_has_a_bound_of_its_own() -> None:
    async with running() as gateway:
        answer = await gateway.ask(
            "POST",
            "/v1/ledgers",
            b'{"metadata":{"a":"%b"}}' % (b"x" * CONTROL_BYTES_MAX),
            headers={"Content-Type": "application/json"},
        )
    assert (answer.status, answer.code) == (413, "too-large")


@pytest.mark.parametrize("path", ["/v1/ledgers/1/close", "/v1/ledgers", "/v1/ledgers/1/entries"])
async def test_an_error_repeats_little_of_a_body(path: str) -> None:
    async with running() as gateway:
        await gateway.create()
        for key in (b"k" * MIB, b"\\u0001" * 100_000, b"~/" * 500_000, "ü".encode() * 500_000):
            answer = await gateway.ask(
                "POST", path, b'{"%b":1}' % key, headers={"Content-Type": "application/json"}
            )
            assert answer.status == 422
            assert len(answer.body) < 8192


def test_the_faults_of_a_model_have_short_places_and_details() -> None:
    nested: dict[str, Any] = {"ledgers": [{"x" * 5000: 1}], "y" * 5000: {"z" * 5000: 1}}
    with pytest.raises(ValidationError) as caught:
        TransactionCommit.model_validate(nested)
    found = invalid_of(caught.value)
    for each in found.members["errors"]:
        assert len(each["pointer"]) <= 300
        assert len(each["detail"]) <= 500
    assert len(problems.to_bytes(found)) < 8192


ENTRY_BYTES_MAX = 600
ENTRY_VALUES: tuple[object, ...] = (
    *("QQ==", "QR==", "QUI=", "QUJ=", "QUJD", "", "QQ=", "Q", "é", "=", "====", "QQ==\n", " QQ=="),
    *("QUJDRA==", "AAAA" * 300, 5, None, True, ["x"], {"a": 1}),
)
ODD_ENTRIES: tuple[object, ...] = (1, "data", [], None, {})


def body_of(chance: random.Random) -> bytes:
    entries: list[object] = []
    for _ in range(chance.randint(1, 3)):
        form = chance.choice(["data"] * 6 + ["text", "json", "x"])
        entry: dict[str, object] = {form: chance.choice(ENTRY_VALUES)}
        if chance.random() < 0.05:
            entry["y"] = "z"
        entries.append(chance.choice(ODD_ENTRIES) if chance.random() < 0.03 else entry)
    body = orjson.dumps({"entries": entries})
    if chance.random() < 0.05:
        body = body.replace(b'{"data"', b'{"data":"QUJD","data"', 1)
    if chance.random() < 0.05:
        body = b'{"entries":0,' + body[1:]
    return body


def outcome(body: bytes) -> object:
    try:
        return payloads.from_json(body, ENTRY_BYTES_MAX)
    except QuorumLogError as error:
        return type(error), error.detail, error.members


def test_the_quick_way_and_the_slow_one_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(20261122)
    bodies = [body_of(chance) for _ in range(5_000)]
    quick = [outcome(body) for body in bodies]
    assert sum(isinstance(found, tuple) and isinstance(found[0], list) for found in quick) > 500

    monkeypatch.setattr(payloads, "_alike", lambda *_: None)
    for each, found in zip(bodies, quick, strict=True):
        assert outcome(each) == found, each
