"""Clients of the cluster, in a process of their own: one appends to a log through each gateway until it is asked to end.

`python -m tests.cluster.hosts.appender END URL…` prints a line for each acknowledged record, and when there is a file END it reads
everything back. Its last line says how many records were acknowledged, and how many of them are lost.
"""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

from quorumlog.client import Client

_DEADLINE_S = 110.0
"""For one append with its repeats: a log fails over in between."""
_PAUSE_S = 0.05
"""Between appends: the hosts share the processors of one machine with this process."""


async def main(is_over: Callable[[], bool], token: str, urls: list[str]) -> None:
    acknowledged: dict[str, dict[int, bytes]] = {f"log-{at}": {} for at in range(len(urls))}

    async def append(at: int, name: str) -> None:
        turned = urls[at:] + urls[:at]
        async with Client(*turned, token=token, deadline_s=_DEADLINE_S) as client:
            log = await client.create_log(name)
            producer = log.producer("appender")
            number = 0
            while not is_over():
                value = b"%s %d" % (name.encode(), number)
                done = await producer.append(value)
                acknowledged[name][done.first_offset] = value
                _say(f"{name} {done.first_offset}")
                number += 1
                await asyncio.sleep(_PAUSE_S)

    async def lost(name: str) -> int:
        async with Client(*urls, token=token, deadline_s=_DEADLINE_S) as client:
            log = client.log(name)
            found = {record.offset: record.value async for record in log.records()}
        return sum(found.get(at) != value for at, value in acknowledged[name].items())

    async with asyncio.TaskGroup() as group:
        for at, name in enumerate(acknowledged):
            group.create_task(append(at, name))
    losses = [await lost(name) for name in acknowledged]
    _say(f"end {sum(map(len, acknowledged.values()))} {sum(losses)}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    given = Path(os.environ["QUORUMLOG_TOKEN_FILE"]).read_text().strip()
    asyncio.run(main(Path(sys.argv[1]).exists, given, sys.argv[2:]))
