"""What is lost everywhere is told, stays unknown, and is given up by an operator alone: rule 31, on real
processes whose disks lose what was not synced.
"""

import asyncio
import os
import sys
from typing import Any

import orjson

from loadtest.stores import Stores
from tests.cluster.bp46.world import Process, World, world_of
from tests.support.commands import told
from tests.support.waiting import MENDED_S, until

LIMBO = {"LIMBO_S": "0.1"}
FLAG = "--declare-lost"


async def test_what_all_have_lost_is_told_and_only_an_operator_gives_it_up(stores: Stores) -> None:
    async with world_of(stores) as world:
        ledger_id = await world.create()
        for text in ("a", "b", "c"):
            await world.append(ledger_id, text)
        for at in range(3):
            await world.holds(at, ledger_id, 2)
        await asyncio.gather(*(bookie.hold_disk() for bookie in world.bookies))
        for text in ("d", "e"):  # acknowledged, and on no disk
            await world.append(ledger_id, text)
        assert sorted(world.acknowledged[ledger_id]) == [0, 1, 2, 3, 4]
        status, row = await world.post(0, f"/v1/ledgers/{ledger_id}/close")
        assert (status, row["last_entry"]) == (200, 4)
        for bookie in world.bookies:
            await bookie.cut_power()
        for bookie in world.bookies:
            bookie.start(**LIMBO)
        await asyncio.gather(*(bookie.ready() for bookie in world.bookies))
        healer = _healer(world)
        try:
            healer.start()
            await healer.ready()
            await _lives_with_the_loss(world, ledger_id, healer)
            await _is_given_up(world, ledger_id, healer)
        except BaseException:
            sys.stderr.write(f"--- {healer.name}\n{healer.log.read_text()[-4000:]}\n")
            raise
        finally:
            if healer.running is not None:
                healer.running.kill()
                healer.running.wait()


async def _lives_with_the_loss(world: World, ledger_id: int, healer: Process) -> None:
    """It is told with all who were asked; nobody denies it, and limbo does not end."""

    async def is_reported() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await healer.get("/v1/status"))["lost_entries"]
        return found

    (lost,) = await until(is_reported, "the loss is told", MENDED_S)
    assert (lost["ledger_id"], lost["first"], lost["last"]) == (ledger_id, 3, 4)
    assert set(lost["answers"].values()) == {"absent"}
    assert {member.partition("@")[0] for member in lost["answers"]} == {"b1", "b2", "b3"}

    async def is_the_reason() -> bool:
        queued = (await healer.get("/v1/repairs"))["repairs"]
        return any("lost: entries 3 to 4" in item["detail"] for item in queued)

    await until(is_the_reason, "the queue says why", MENDED_S)
    status, _, reported = await _quorumlog(world, "ledger", "verify", str(ledger_id))
    assert status == 1
    assert [(part["first"], part["last"]) for part in reported["lost"]] == [(3, 4)]
    assert (await _read(world, f"/v1/ledgers/{ledger_id}/entries/3"))[0] == 503
    assert all((bookie.data / "limbo").exists() for bookie in world.bookies)


async def _is_given_up(world: World, ledger_id: int, healer: Process) -> None:
    """Refused where somebody has it, or may; then final."""
    words = ("ledger", "accept-loss", str(ledger_id), "--from")
    # Nobody can be asked, and nobody said yes.
    assert (await _quorumlog(world, *words, "3", "--to", "4"))[0] == 2
    status, said, _ = await _quorumlog(world, *words, "2", "--to", "4", "--yes")
    assert (status, "loss-not-proven" in said, "held" in said) == (1, True, True)
    await world.bookies[2].end()
    status, said, _ = await _quorumlog(world, *words, "3", "--to", "4", "--yes")
    assert (status, "loss-not-proven" in said, "silent" in said) == (1, True, True)
    assert (await _read(world, f"/v1/ledgers/{ledger_id}/entries/3"))[0] == 503
    # That it never comes back is an operator's word (rule 14), and none against a copy.
    path = f"/v1/ledgers/{ledger_id}/accept-loss"

    async def is_declared() -> dict[str, Any]:
        # A repair may have begun to fill it under its new name meanwhile.
        _, refusal = await world.post(1, path, {"first": 3, "last": 3})
        said = refusal["answers"][0]["answers"]
        gone = [word for m, reported in said.items() if reported == "silent" for word in (FLAG, m)]
        status, why, _ = await _quorumlog(world, *words, "2", "--to", "3", "--yes", *gone)
        assert (status, "loss-not-proven" in why, "held" in why) == (1, True, True), why
        status, _, row = await _quorumlog(world, *words, "3", "--to", "3", "--yes", *gone)
        return row if status == 0 else {}

    row = await until(is_declared, "b3 is declared lost, and entry 3 with it", MENDED_S)
    assert row["lost_entries"] == [{"first": 3, "last": 3}]
    world.bookies[2].start(**LIMBO)
    await world.bookies[2].ready()

    async def is_accepted() -> dict[str, Any]:
        # Its new process may not be known yet.
        status, _, row = await _quorumlog(world, *words, "3", "--to", "4", "--yes")
        return row if status == 0 else {}

    row = await until(is_accepted, "the loss is accepted", MENDED_S)
    assert (row["lost_entries"], row["may_lack_entries"]) == ([{"first": 3, "last": 4}], True)

    for entry_id in (3, 4):
        status, body = await _read(world, f"/v1/ledgers/{ledger_id}/entries/{entry_id}")
        assert (status, body["code"], body["retryable"]) == (410, "entry-lost", False)
        assert (body["entry_id"], body["next"]) == (entry_id, 5)
    status, body = await _read(world, f"/v1/ledgers/{ledger_id}/entries?encoding=text")
    assert (status, body["next"]) == (200, 3)
    assert [entry["text"] for entry in body["entries"]] == ["a", "b", "c"]
    status, body = await _read(world, f"/v1/ledgers/{ledger_id}/entries?from=3")
    assert (status, body["next"]) == (410, 5)
    status, body = await _read(world, f"/v1/ledgers/{ledger_id}/entries?from=5")
    assert (status, body["entries"], body["closed"]) == (200, [], True)
    assert (await _read(world, f"/v1/ledgers/{ledger_id}/entries/5"))[1]["code"] == "no-such-entry"

    async def is_whole() -> bool:
        await _quorumlog(world, "repair", "trigger")
        verified = await _quorumlog(world, "ledger", "verify", str(ledger_id))
        return verified[0] == 0 and not any((b.data / "limbo").exists() for b in world.bookies)

    await until(is_whole, "nothing is in limbo, and all else has its copies", MENDED_S)

    async def is_quiet() -> bool:
        reported = await healer.get("/v1/status")
        queued = (await healer.get("/v1/repairs"))["repairs"]
        return not reported["lost_entries"] and not queued

    await until(is_quiet, "nothing is queued or told any more", MENDED_S)


def _healer(world: World) -> Process:
    settings = {
        "METADATA_URLS": world.gateways[1].settings["METADATA_URLS"],
        "AUDIT_S": "0.5",
        "DAMAGE_S": "0.2",
        "CHECK_S": "3600",
    }
    folder = world.bookies[0].folder
    return Process("a1", "services.autorecovery", folder, settings, world.session)


async def _read(world: World, path: str) -> tuple[int, dict[str, Any]]:
    """As C2 reads; again while its gateway does not know yet where the bookies are."""
    async with world.session.get(world.gateways[1].url + path) as answer:
        return answer.status, await answer.json()


async def _quorumlog(world: World, *words: str) -> tuple[int, str, Any]:
    """An operator's command at C2: its status, what it says, and the JSON that it prints."""
    environment = os.environ | {"QUORUMLOG_GATEWAY": world.gateways[1].url, "COLUMNS": "1000"}
    status, out, said = await told(*words, "--json", environment=environment)
    return status, said, orjson.loads(out) if out else None
