"""Ledgers' keys at rest: what a copy of the database tells, and how the key file changes."""

import asyncio
import os
import re
from asyncio.subprocess import PIPE
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import orjson
import pytest
from pydantic import ValidationError

from loadtest.stores import Stores
from quorumlog.cli.clusters import new_key
from quorumlog.errors import MetadataUnavailable
from services.metadata import migrate
from services.metadata.config import Config
from services.metadata.sealing import KeyRing, key_id, read_key_file
from tests.support.commands import path_with_quorumlog
from tests.support.database import connected, sql
from tests.support.waiting import until, within
from tests.unit.metadata.restores import _run
from tests.unit.metadata.support import DRAFT, Service, serving

PAGE: Final = Path(__file__).resolve().parents[3] / "docs" / "guides" / "keys.md"
COMMAND: Final = re.compile(
    r"^```sh\n(.*?)^```|`((?:quorumlog|\{) [^`]*)`", re.MULTILINE | re.DOTALL
)
"""A command of the page: in a block, or within a sentence."""
MAC_KEY, ACCESS_KEY = (
    b"the MAC key of the ledger 012345",
    b"s" * 16 + b"the access key of the ledger 012",
)
KEYED = replace(DRAFT, mac_key=MAC_KEY, access_key=ACCESS_KEY, custom=(("note", "sealed:x"),))


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    new_key(tmp_path / "keys")
    return tmp_path / "keys"


async def dump(stores: Stores, folder: Path) -> bytes:
    """The database in plain text."""
    file = folder / "dump"
    await asyncio.to_thread(
        _run, "pg_dump", "--format=plain", f"--file={file}", stores.postgres_dsn
    )
    return await asyncio.to_thread(file.read_bytes)


def cut(keys: Path) -> None:
    """Only the first key stays."""
    keys.write_text(keys.read_text().split()[0] + "\n")


def turned(keys: Path) -> None:
    """The last key comes first."""
    *others, last = keys.read_text().split()
    keys.write_text("\n".join((last, *others)) + "\n")


async def listed(service: Service) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = (await service.send("GET", "/v1/ledgers"))[1]["ledgers"]
    return rows


async def test_a_dump_has_no_keys_and_gateways_get_them(stores: Stores, keys: Path) -> None:
    async with serving(stores, key_file=keys) as service:
        made = await service.client.create(KEYED)
        _, closed = await service.client.cas(made.closed(last_entry=-1, length=0))
        read = await service.client.get(made.ledger_id)
        (shown,) = await listed(service)
        dumped = await dump(stores, keys.parent)

    assert closed == read
    assert (read.mac_key, read.access_key, read.custom) == (MAC_KEY, ACCESS_KEY, KEYED.custom)
    assert "sealed" not in shown["mac_key"] + shown["access_key"]
    for name in ("mac_key", "access_key"):
        assert shown[name].encode() not in dumped
    assert b"sealed:" in dumped


async def test_the_pages_commands_seal_and_change_keys(stores: Stores, tmp_path: Path) -> None:
    keys, path = tmp_path / "keys", path_with_quorumlog(tmp_path)
    begin, reseal, add, turn, reseal_again = [a or b for a, b in COMMAND.findall(PAGE.read_text())]

    async def said(command: str, service: Service | None = None) -> str:
        url = "" if service is None else service.url
        return await output_of(command.replace("http://127.0.0.1:8082", url), tmp_path, path)

    async with serving(stores) as service:
        made = await service.client.create(KEYED)
        plain = (await listed(service))[0]["mac_key"].encode()
    assert plain in await dump(stores, tmp_path)

    await said(begin)
    async with serving(stores, key_file=keys) as service:
        assert (await service.client.get(made.ledger_id)).mac_key == MAC_KEY
        assert await said(reseal, service) == "resealed: 1\n"
        assert await said(reseal, service) == "resealed: 0\n"
        assert await service.client.get(made.ledger_id) == made
        assert len((await service.send("GET", "/v1/audit"))[1]["audit"]) == 1
    assert plain not in await dump(stores, tmp_path)

    old = keys.read_text()
    await said(add)
    await said(turn)
    assert keys.read_text().endswith(old)
    async with serving(stores, key_file=keys) as service:
        assert await service.client.get(made.ledger_id) == made
        assert await said(reseal_again, service) == "resealed: 1\n"
    cut(keys)
    assert old not in keys.read_text()
    async with serving(stores, key_file=keys) as service:
        assert await service.client.get(made.ledger_id) == made


async def output_of(command: str, folder: Path, path: str) -> str:
    process = await asyncio.create_subprocess_exec(
        "sh", "-ec", command, cwd=folder, env={**os.environ, "PATH": path}, stdout=PIPE, stderr=PIPE
    )
    async with within(f"{command} ends"):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_a_service_without_a_key_of_the_rows_does_not_serve_and_says_so(
    stores: Stores, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(stores, key_file=keys) as service:
        await service.client.create(KEYED)

    async with serving(stores, wait=False) as service:
        await until(
            lambda: _is_reported(caplog, "key-missing"), "the service says that a key is missing"
        )
        assert (await service.send("GET", "/health/ready"))[0] == 503


async def _is_reported(caplog: pytest.LogCaptureFixture, event: str) -> bool:
    return any(record.msg == event for record in caplog.records)


async def test_a_reseal_goes_on_anywhere_and_the_older_key_is_needed_until_its_end(
    stores: Stores, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate, "_SEALED_AT_ONCE", 1)
    async with serving(stores, key_file=keys) as service:
        first, second = [(await service.client.create(KEYED)).ledger_id for _ in range(2)]
    new_key(keys)
    turned(keys)
    new, old = read_key_file(keys).ids

    async with serving(stores, key_file=keys) as service:
        found = []
        for after in ("", "", f"?after={first}", f"?after={second}"):
            _, reported = await service.send("POST", f"/v1/keys/reseal{after}")
            found.append((reported["resealed"], reported["next"], old in await noted(stores)))

    assert found == [(1, first, True), (0, first, True), (1, second, True), (0, None, False)]
    assert await noted(stores) == {new}


async def noted(stores: Stores) -> set[str]:
    """The keys without which no service serves."""
    async with connected(stores) as connection:
        records = await connection.fetch("SELECT id FROM sealing_keys")
    return {record["id"] for record in records}


async def test_without_keys_nothing_is_sealed_or_forgotten(stores: Stores, keys: Path) -> None:
    """As while the processes get the key file one after the other."""
    async with serving(stores) as without:
        async with serving(stores, key_file=keys) as service:
            made = await service.client.create(KEYED)
            needed = await noted(stores)

        status, problem = await without.send("POST", "/v1/keys/reseal")
        read, why = await without.send("GET", f"/v1/ledgers/{made.ledger_id}")

    assert (status, problem["code"]) == (422, "invalid")
    assert "KEY_FILE" in problem["detail"]
    assert (read, why["code"]) == (503, MetadataUnavailable.code)
    assert why["detail"] == f"the metadata service's KEY_FILE lacks key {min(needed)}: add it"
    assert await noted(stores) == needed != set()


async def test_a_sealing_key_is_noted_where_it_is_missing(stores: Stores, keys: Path) -> None:
    """One that was restored while the service ran, or was sealed anew by a process with the former first key."""
    (used,) = read_key_file(keys).ids
    async with serving(stores, key_file=keys) as service:
        await sql(stores, "DELETE FROM sealing_keys")
        await service.client.create(KEYED)

        async def is_noted() -> bool:
            return await noted(stores) == {used}

        await until(is_noted, "the key is noted")


@pytest.mark.parametrize("text", ["sealed:", "sealed:{key}", "sealed:{key}:AA==", "sealed:{key}:?"])
def test_what_is_no_sealed_key_is_told_as_changed(keys: Path, text: str) -> None:
    ring = read_key_file(keys)
    body = orjson.dumps({"mac_key": text.format(key=ring.ids[0])}).decode().replace('":', '": ')

    with pytest.raises(MetadataUnavailable):
        ring.opened(7, body)


async def test_keys_that_are_put_into_another_row_do_not_open(stores: Stores, keys: Path) -> None:
    async with serving(stores, key_file=keys) as service:
        one, two = [await service.client.create(KEYED) for _ in range(2)]
        await sql(
            stores,
            "UPDATE ledgers SET body = (SELECT body FROM ledgers WHERE ledger_id = $1)"
            " WHERE ledger_id = $2",
            one.ledger_id,
            two.ledger_id,
        )

        status, reported = await service.send("GET", f"/v1/ledgers/{two.ledger_id}")

    assert (status, reported["code"]) == (503, MetadataUnavailable.code)


def test_a_key_file_that_others_may_read_or_that_has_no_keys_is_refused(keys: Path) -> None:
    def config() -> Config:
        return Config.model_validate(
            {
                "port": 1,
                "postgres_dsn": "postgresql://x",
                "redis_url": "redis://x",
                "key_file": keys,
            }
        )

    key = keys.read_text().strip()
    keys.chmod(0o640)
    with pytest.raises(ValidationError, match="chmod 600"):
        config()
    keys.chmod(0o600)
    assert len(config().key_ring.ids) == 1
    keys.write_text("no key\n")
    with pytest.raises(ValidationError, match="openssl rand") as refused:
        config()
    assert key not in str(refused.value)


def test_the_name_of_a_key_tells_nothing_of_it() -> None:
    key = bytes(range(32))

    assert key_id(key) == KeyRing([key]).ids[0]
    assert key.hex()[:16] not in key_id(key)
