"""The quick way through a batch of base64 gives what the way entry by entry gives."""

import random

import orjson
import pytest

from quorumlog.errors import QuorumLogError
from services.gateway.edge import payloads

ENTRY_BYTES_MAX = 600
VALUES: tuple[object, ...] = (
    *("QQ==", "QR==", "QUI=", "QUJ=", "QUJD", "", "QQ=", "Q", "é", "=", "====", "QQ==\n", " QQ=="),
    *("QUJDRA==", "AAAA" * 300, 5, None, True, ["x"], {"a": 1}),
)
ODD_ENTRIES: tuple[object, ...] = (1, "data", [], None, {})


def body_of(chance: random.Random) -> bytes:
    entries: list[object] = []
    for _ in range(chance.randint(1, 3)):
        form = chance.choice(["data"] * 6 + ["text", "json", "x"])
        entry: dict[str, object] = {form: chance.choice(VALUES)}
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
    for body, found in zip(bodies, quick, strict=True):
        assert outcome(body) == found, body
