"""`make attack`: strangers, slow peers and crowds on a cluster of its own, beside a bystander."""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Final

import orjson

from loadtest.cluster import running
from tests.outside.attack import crowds, doors, halves, handshakes, hostile, raw, slow, worst
from tests.outside.attack.arena import Arena, Campaign, attack, made_token
from tests.outside.attack.meters import Meters
from tests.outside.attack.report import Report

CAMPAIGNS: Final[dict[str, Campaign]] = {
    "requests": hostile.requests,
    "numbers": hostile.numbers,
    "framing": hostile.framing,
    "damaged": hostile.damaged,
    "aborts": slow.aborts,
    "senders": slow.senders,
    "announced": slow.announced,
    "readers": slow.readers,
    "silent": slow.silent,
    "connections": crowds.connections,
    "ledgers": crowds.ledgers,
    "listings": crowds.listings,
    "messages": crowds.messages,
    "bodies": worst.bodies,
    "floods": worst.floods,
    "strangers": doors.strangers,
    "names": doors.names,
    "guesses": doors.guesses,
    "handshakes": handshakes.handshakes,
    "half-closed": halves.half_closed,
    "stores": halves.stores,
}

BYSTANDERS: Final = ("append:*", "read:*", "manage:*")


async def control(arena: Arena) -> None:
    """The load of the campaigns with valid requests. What the bystander waits for here is the price of a busy machine."""
    await hostile.honest_requests(arena)
    await crowds.honest_messages(arena)
    await crowds.listings(arena)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.outside.attack",
        description="Attacks a local cluster, which it starts, over loopback; all is bounded.",
    )
    parser.add_argument("--seed", type=int, default=1, help="what hostile requests look like")
    parser.add_argument(
        "--requests", type=int, default=4000, help="hostile requests of a campaign that makes them"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="a campaign begins no more requests after that"
    )
    parser.add_argument(
        "--only", action="append", choices=sorted(CAMPAIGNS), help="this campaign; may be repeated"
    )
    parser.add_argument("--hang", type=float, default=raw.HANG_S, help="seconds that are a hang")
    parser.add_argument("--json", type=Path, help="write the report there as well")
    return parser.parse_args()


async def attacked(asked: argparse.Namespace) -> Report:
    """One attack on a cluster of its own."""
    report = Report(seed=asked.seed)
    chosen = asked.only or list(CAMPAIGNS)
    campaigns = {name: one for name, one in CAMPAIGNS.items() if name in chosen}
    required = {"REQUIRE_TOKENS": "1"}
    async with running(None, bookies=3, gateways=2, environment=required) as cluster:
        arena = Arena(
            cluster,
            Meters(cluster),
            report,
            requests=asked.requests,
            seconds=asked.seconds,
            hang_s=asked.hang,
            token=await made_token(cluster, "admin:*"),
            bystanders_token=await made_token(cluster, *BYSTANDERS),
        )
        await attack(arena, campaigns, control=control, say=lambda line: print(line, flush=True))
    return report


def main() -> int:
    asked = parsed()
    report = asyncio.run(attacked(asked))
    if asked.json:
        asked.json.write_bytes(orjson.dumps(report.document(), option=orjson.OPT_INDENT_2))
    print(report.page())
    print(report.last_line())
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
