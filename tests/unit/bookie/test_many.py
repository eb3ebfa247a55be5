"""Ten thousand open ledgers on one bookie."""

import asyncio
import threading
from pathlib import Path

from loadtest.stores import scratch
from quorumlog.protocol.messages import Status
from quorumlog.protocol.replica import AddAsked, Verdict
from tests.unit.bookie.support import KEY, ME, ids_of, read, run_of, started

LEDGERS = 10_000


async def test_ten_thousand_open_ledgers_cost_no_task_file_thread_or_timer_each() -> None:
    with scratch("ql-many-") as root:
        store = started(root / "d")
        loop = asyncio.get_running_loop()

        def costs() -> tuple[int, int, int, int]:
            return (
                len(asyncio.all_tasks()),
                len(list(Path("/proc/self/fd").iterdir())),
                threading.active_count(),
                len(loop._scheduled),  # type: ignore[attr-defined]
            )

        async def add_to_all(entry: int) -> None:
            left = LEDGERS
            done = loop.create_future()

            def answered(verdict: Verdict) -> None:
                nonlocal left
                assert verdict.status is Status.OK
                left -= 1
                if not left:
                    done.set_result(None)

            for ledger in range(LEDGERS):
                store.add(AddAsked(ME, run_of(ledger, [entry]), KEY), answered)
            await done

        # What the tests before this one left open (leases of ports, say) is none of its costs.
        idle = costs()
        await add_to_all(0)
        before = costs()
        await add_to_all(1)
        await store.checkpoint()
        await add_to_all(2)

        # A few for all of them together: readers of the log, files of the index.
        assert all(now <= then + 30 for then, now in zip(before, costs(), strict=True))
        opened = [now - then for then, now in zip(idle, before, strict=True)]
        assert opened[0] <= 5
        assert max(opened[1:]) < 100
        for ledger in range(0, LEDGERS, 997):
            assert ids_of(await read(store, ledger, 0, 2)) == [0, 1, 2]
        await store.stop()
