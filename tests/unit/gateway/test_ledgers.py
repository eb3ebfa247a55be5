"""The good paths of the HTTP API, and what the answers carry."""

import base64
import struct
from collections.abc import AsyncIterator

import pytest

from quorumlog.errors import NotEnoughBookies, codes
from quorumlog.protocol.ids import ID_MAX
from services.gateway.edge import models
from tests.unit.gateway.conftest import Gateway, running

JSON = {"Content-Type": "application/json"}
OCTETS = {"Content-Type": "application/octet-stream"}
FRAMES = {"Content-Type": "application/vnd.quorumlog.frames"}
ENTRIES = "/v1/ledgers/1/entries"


def frames(*payloads: bytes) -> bytes:
    return b"".join(struct.pack(">I", len(p)) + p for p in payloads)


async def test_a_ledger_of_which_nothing_is_said_has_the_defaults(gateway: Gateway) -> None:
    answer = await gateway.ask("POST", "/v1/ledgers")

    models.Ledger.model_validate_json(answer.body)
    assert (answer.status, answer.headers["Location"]) == (201, "/v1/ledgers/1")
    shown = answer.json
    assert (shown["ensemble_size"], shown["write_quorum"], shown["ack_quorum"]) == (3, 3, 2)
    assert (shown["state"], shown["last_entry"], shown["length"]) == ("OPEN", None, None)
    assert answer.headers["ETag"] == '"1"'


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"ensemble_size": 1}, (1, 1, 1)),
        ({"ensemble_size": 2}, (2, 2, 2)),
        ({"ensemble_size": 4}, (4, 3, 2)),
        ({"write_quorum": 4}, (4, 4, 3)),
        ({"write_quorum": 2}, (3, 2, 2)),
        ({"ack_quorum": 3}, (3, 3, 3)),
        ({"ensemble_size": 4, "write_quorum": 4, "ack_quorum": 4}, (4, 4, 4)),
        ({"ensemble_size": None, "password": None, "ledger_id": None}, (3, 3, 2)),
    ],
)
async def test_sizes_that_are_left_out_follow_from_the_others(
    gateway: Gateway, given: dict[str, int | None], expected: tuple[int, int, int]
) -> None:
    shown = (await gateway.ask("POST", "/v1/ledgers", json=given)).json

    assert (shown["ensemble_size"], shown["write_quorum"], shown["ack_quorum"]) == expected


async def test_a_ledger_takes_metadata_and_an_id(gateway: Gateway) -> None:
    wanted = {"ledger_id": ID_MAX, "metadata": {"k": "v", "ü": "\n"}}

    answer = await gateway.ask("POST", "/v1/ledgers", json=wanted)

    assert answer.status == 201
    assert answer.json | wanted == answer.json
    again = await gateway.ask("POST", "/v1/ledgers", json={"ledger_id": ID_MAX})
    assert (again.status, again.code, again.json["ledger_id"]) == (409, "ledger-exists", ID_MAX)


async def test_a_repeat_with_an_idempotency_key_gets_the_same_ledger(gateway: Gateway) -> None:
    first = await gateway.ask("POST", "/v1/ledgers", headers={"Idempotency-Key": "a"})
    repeat = await gateway.ask("POST", "/v1/ledgers", headers={"Idempotency-Key": "a"})
    other = await gateway.ask("POST", "/v1/ledgers", headers={"Idempotency-Key": "b"})

    assert first.json["ledger_id"] == repeat.json["ledger_id"]
    assert other.json["ledger_id"] != first.json["ledger_id"]


async def test_lists_go_on_where_they_ended(gateway: Gateway) -> None:
    for colour in ("red", "blue", "red"):
        await gateway.create(metadata={"colour": colour})

    first = await gateway.ask("GET", "/v1/ledgers?limit=2")
    models.LedgerList.model_validate_json(first.body)
    assert [ledger["ledger_id"] for ledger in first.json["ledgers"]] == [1, 2]
    second = await gateway.ask("GET", f"/v1/ledgers?limit=2&after={first.json['next']}")
    assert [ledger["ledger_id"] for ledger in second.json["ledgers"]] == [3]
    assert second.json["next"] is None
    red = await gateway.ask("GET", "/v1/ledgers?metadata%5Bcolour%5D=red&state=OPEN&bookie=b0@1")
    assert [ledger["ledger_id"] for ledger in red.json["ledgers"]] == [1, 3]


@pytest.mark.parametrize(
    ("body", "headers", "payload"),
    [
        (rb'{"text":"hell\u00f6"}', JSON, "hellö".encode()),
        (b'{"data":"AAEC"}', {"Content-Type": "application/json; charset=utf-8"}, b"\0\1\2"),
        (b'{"data":""}', {"Content-Type": "APPLICATION/JSON"}, b""),
        (b'{"json": {"b": [1, 2.5], "a": null}}', JSON, b'{"b":[1,2.5],"a":null}'),
        (b'{"json":null}', JSON, b"null"),
        (rb'{"text":"a \"quoted\" \\ path\\"}', JSON, rb'a "quoted" \ path' + b"\\"),
        (rb'{"te\u0078t":"x"}', JSON, b"x"),
        (b"\0\xff", OCTETS, b"\0\xff"),
        (b"", OCTETS, b""),
    ],
)
async def test_one_entry_is_stored_as_it_was_meant(
    gateway: Gateway, body: bytes, headers: dict[str, str], payload: bytes
) -> None:
    await gateway.create()

    answer = await gateway.ask("POST", ENTRIES, body, headers=headers)

    models.AppendedEntry.model_validate_json(answer.body)
    assert answer.status == 201
    assert answer.json == {"ledger_id": 1, "entry_id": 0, "last_add_confirmed": 0}
    assert gateway.engine.entries[1] == [payload]


async def test_batches_get_contiguous_ids(gateway: Gateway) -> None:
    await gateway.create()
    await gateway.ask("POST", ENTRIES, json={"text": "0"})
    batch = [{"text": "1"}, {"data": "Mg=="}, {"json": {"n": ["x", {"y": "z"}]}}]

    answer = await gateway.ask("POST", ENTRIES, json={"entries": batch})
    models.AppendedBatch.model_validate_json(answer.body)
    assert (answer.status, answer.json["first_entry"], answer.json["last_entry"]) == (201, 1, 3)
    answer = await gateway.ask("POST", ENTRIES, frames(b"4", b"", b"6"), headers=FRAMES)
    assert (answer.status, answer.json["first_entry"], answer.json["last_entry"]) == (201, 4, 6)

    stored = [b"0", b"1", b"2", b'{"n":["x",{"y":"z"}]}', b"4", b"", b"6"]
    assert gateway.engine.entries[1] == stored


async def test_a_chunked_body_is_taken(gateway: Gateway) -> None:
    await gateway.create()

    async def chunks() -> AsyncIterator[bytes]:
        for part in (b'{"te', b'xt":"', b"x" * 100_000, b'"}'):
            yield part

    async with gateway.session.post(gateway.url + ENTRIES, data=chunks(), headers=JSON) as response:
        assert response.status == 201
    assert gateway.engine.entries[1] == [b"x" * 100_000]


async def test_a_client_that_waits_to_be_asked_for_its_body_is_asked(gateway: Gateway) -> None:
    await gateway.create()

    async with gateway.session.post(
        gateway.url + ENTRIES, data=b"x" * 70_000, headers=OCTETS, expect100=True
    ) as response:
        assert response.status == 201
    assert gateway.engine.entries[1] == [b"x" * 70_000]


async def test_what_is_expected_holds_or_nothing_is_written(gateway: Gateway) -> None:
    await gateway.create()

    good = await gateway.ask("POST", ENTRIES + "?expect=0", json={"text": "a"})
    bad = await gateway.ask("POST", ENTRIES + "?expect=0", json={"text": "b"})

    assert good.status == 201
    assert (bad.status, bad.code, bad.headers["Next-Entry-Id"]) == (412, "unexpected-entry-id", "1")
    assert bad.json["next_entry_id"] == 1
    assert gateway.engine.entries[1] == [b"a"]


async def test_reads_give_entries_in_the_encoding_that_is_asked_for(gateway: Gateway) -> None:
    await gateway.create()
    gateway.engine.entries[1] = [b"a", b'{"n": 1}', b"\xff"]

    plain = await gateway.ask("GET", ENTRIES)
    models.Entries.model_validate_json(plain.body)
    assert plain.json == {
        "ledger_id": 1,
        "entries": [
            {"entry_id": n, "data": base64.b64encode(p).decode()}
            for n, p in enumerate(gateway.engine.entries[1])
        ],
        "next": 3,
        "last_add_confirmed": 2,
        "closed": False,
        "lac_source": "writer",
    }
    text = await gateway.ask("GET", ENTRIES + "?encoding=text&to=1")
    assert [entry["text"] for entry in text.json["entries"]] == ["a", '{"n": 1}']
    json = await gateway.ask("GET", ENTRIES + "?encoding=json&from=1&limit=1")
    assert json.json["entries"] == [{"entry_id": 1, "json": {"n": 1}}]


async def test_reads_stop_at_their_limits_and_say_where_to_go_on(gateway: Gateway) -> None:
    await gateway.create()
    gateway.engine.entries[1] = [bytes(10)] * 5

    for query, expected in {
        "?limit=2": ([0, 1], 2),
        "?from=3": ([3, 4], 5),
        "?max_bytes=1": ([0], 1),
        "?max_bytes=25&from=1": ([1, 2], 3),
        "?from=1&to=2": ([1, 2], 3),
        "?from=5": ([], 5),
        f"?from={ID_MAX}": ([], ID_MAX),
    }.items():
        shown = (await gateway.ask("GET", ENTRIES + query)).json
        assert ([e["entry_id"] for e in shown["entries"]], shown["next"]) == expected, query


async def test_frames_carry_the_position_in_headers(gateway: Gateway) -> None:
    await gateway.create()
    gateway.engine.entries[1] = [b"a", b"", b"ccc"]

    answer = await gateway.ask(
        "GET", ENTRIES + "?from=1", headers={"Accept": "application/vnd.quorumlog.frames"}
    )

    assert answer.headers["Content-Type"] == "application/vnd.quorumlog.frames"
    assert answer.body == struct.pack(">QI", 1, 0) + struct.pack(">QI", 2, 3) + b"ccc"
    assert (answer.headers["Next-Entry-Id"], answer.headers["Ledger-Closed"]) == ("3", "false")
    assert answer.headers["Last-Add-Confirmed"] == "2"


async def test_single_entries_of_closed_ledgers_may_be_cached(gateway: Gateway) -> None:
    await gateway.create()
    gateway.engine.entries[1] = [b"a"]

    opened = await gateway.ask("GET", ENTRIES + "/0")
    models.OneEntry.model_validate_json(opened.body)
    assert opened.json == {"ledger_id": 1, "entry_id": 0, "data": "YQ=="}
    assert opened.headers["Cache-Control"] == "no-store"
    closed = await gateway.ask("POST", "/v1/ledgers/1/close")
    assert (closed.json["state"], closed.json["last_entry"]) == ("CLOSED", 0)
    raw = await gateway.ask("GET", ENTRIES + "/0", headers={"Accept": "application/octet-stream"})
    assert (raw.body, raw.headers["Content-Type"]) == (b"a", "application/octet-stream")
    assert {"private", "immutable"} <= set(raw.headers["Cache-Control"].split(", "))
    beyond = await gateway.ask("GET", ENTRIES + "/1")
    assert (beyond.status, beyond.code) == (404, "no-such-entry")


async def test_an_entry_past_the_end_of_an_open_ledger_may_still_come(gateway: Gateway) -> None:
    await gateway.create()

    answer = await gateway.ask("GET", ENTRIES + "/0")

    assert (answer.status, answer.code, answer.json["retryable"]) == (
        404,
        "not-yet-confirmed",
        True,
    )


async def test_the_lac_of_an_empty_ledger_is_minus_one(gateway: Gateway) -> None:
    await gateway.create()

    answer = await gateway.ask("GET", "/v1/ledgers/1/last-add-confirmed")

    models.LastAddConfirmed.model_validate_json(answer.body)
    assert answer.json == {"ledger_id": 1, "last_add_confirmed": -1, "closed": False}


async def test_a_closed_ledger_takes_nothing_and_a_deleted_one_is_gone(gateway: Gateway) -> None:
    await gateway.create()

    assert (await gateway.ask("POST", "/v1/ledgers/1/recover", json={})).status == 200
    late = await gateway.ask("POST", ENTRIES, json={"text": "x"})
    assert (late.status, late.code, late.json["outcome"]) == (409, "ledger-closed", "not-done")
    gone = await gateway.ask("DELETE", "/v1/ledgers/1")
    assert (gone.status, gone.body) == (204, b"")
    again = await gateway.ask("DELETE", "/v1/ledgers/1")
    assert (again.status, again.code, again.json["deleted"]) == (404, "no-such-ledger", True)


async def test_passwords_are_asked_for_and_never_shown(gateway: Gateway) -> None:
    secret = "s3cret-ü"
    answer = await gateway.ask(
        "POST", "/v1/ledgers", json={"password": secret, "digest": "hmac-sha256"}
    )
    assert b"s3cret" not in answer.body

    for method, path, body in (
        ("POST", ENTRIES, {"text": "x"}),
        ("GET", ENTRIES, None),
        ("GET", ENTRIES + "/0", None),
        ("POST", "/v1/ledgers/1/close", None),
        ("POST", "/v1/ledgers/1/recover", None),
        ("DELETE", "/v1/ledgers/1", None),
    ):
        for headers in ({}, {"Ledger-Password": "other"}):
            refused = await gateway.ask(method, path, json=body, headers=headers)
            assert (refused.status, refused.code) == (403, "wrong-password"), (method, path)
        taken = await gateway.ask(method, path, json=body, headers={"Ledger-Password": secret})
        assert taken.status in (200, 201, 204), taken


async def test_bookies_and_cluster_are_shown(gateway: Gateway) -> None:
    bookies = await gateway.ask("GET", "/v1/bookies")
    cluster = await gateway.ask("GET", "/v1/cluster")

    models.BookieListModel.model_validate_json(bookies.body)
    assert (bookies.status, cluster.status) == (200, 200)
    assert bookies.json["bookies"][0]["state"] == "writable"


async def test_readiness_is_that_a_ledger_could_be_created(gateway: Gateway) -> None:
    assert (await gateway.ask("GET", "/health/ready")).status == 200
    gateway.engine.fails = NotEnoughBookies()

    answer = await gateway.ask("GET", "/health/ready")

    assert (answer.status, answer.code) == (503, "not-enough-bookies")
    assert answer.headers["Retry-After"] == "1"
    assert (await gateway.ask("GET", "/health/live")).status == 200


async def test_every_problem_has_a_page(gateway: Gateway) -> None:
    for code in codes():
        page = await gateway.ask("GET", f"/problems/{code}")
        data = await gateway.ask("GET", f"/problems/{code}", headers={"Accept": "application/json"})

        assert (page.status, page.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert data.json["code"] == code


async def test_metrics_count_requests_by_route(gateway: Gateway) -> None:
    await gateway.create()
    await gateway.ask("PROPFIND", "/v1/ledgers/1")

    text = (await gateway.ask("GET", "/metrics")).body.decode()

    line = 'quorumlog_http_requests_total{method="POST",route="/v1/ledgers",status="201"} 1.0'
    assert line in text
    assert 'method="other"' in text


async def test_pages_of_allowed_origins_may_read_and_ask() -> None:
    origin = {"Origin": "https://a.example"}
    asked = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }
    async with running(cors_origins=("https://a.example",)) as gateway:
        plain = await gateway.ask("GET", "/v1/bookies", headers=origin)
        assert plain.headers["Access-Control-Allow-Origin"] == "https://a.example"
        preflight = await gateway.ask("OPTIONS", "/v1/ledgers", headers=origin | asked)
        assert preflight.status == 204
        assert "POST" in preflight.headers["Access-Control-Allow-Methods"]
        assert preflight.headers["Access-Control-Allow-Headers"] == "content-type"
        other = await gateway.ask("GET", "/v1/bookies", headers={"Origin": "https://b.example"})
        assert "Access-Control-Allow-Origin" not in other.headers


async def test_pages_of_the_gateway_itself_and_of_allowed_origins_may_do_all() -> None:
    async with running(cors_origins=("https://a.example",)) as gateway:
        await gateway.create()
        for origin in (gateway.url, "https://a.example"):
            answer = await gateway.ask("POST", "/v1/ledgers", headers={"Origin": origin})
            assert answer.status == 201
            socket = await gateway.session.ws_connect(
                gateway.url + "/v1/ledgers/1/ws", origin=origin
            )
            await socket.close()
