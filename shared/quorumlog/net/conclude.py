"""Runs one machine, a recovery or a repair, until it ends."""

import asyncio

from quorumlog.errors import UNKNOWN, QuorumLogError, RecoveryBlocked, by_code
from quorumlog.net.driver import Driver, LedgerMachine, Told
from quorumlog.net.ports import Ports
from quorumlog.protocol.messages import Closed, Event, Failed, Repaired
from quorumlog.protocol.metadata import LedgerMetadata


async def conclude(
    machine: LedgerMachine, ledger_id: int, ports: Ports, first: Event, *, deadline_s: float
) -> LedgerMetadata:
    """Run a recovery or a repair until it ends, and return the row.

    Raises: the error that the machine ended with; RecoveryBlocked when it has not ended in time.
    """
    end: asyncio.Future[LedgerMetadata] = asyncio.get_running_loop().create_future()

    def told(news: Told) -> None:
        if end.done():
            return
        if isinstance(news, Closed | Repaired):
            end.set_result(news.metadata)
        elif isinstance(news, Failed):
            end.set_exception(error_of(news, ledger_id))

    driver = Driver(machine, ledger_id, ports, told)
    try:
        driver.post(first)
        async with asyncio.timeout(deadline_s):
            return await end
    except TimeoutError as error:
        raise RecoveryBlocked(
            "it did not end in time", ledger_id=ledger_id, outcome=UNKNOWN
        ) from error
    finally:
        driver.stop()
        if end.done() and not end.cancelled():
            end.exception()


def error_of(failed: Failed, ledger_id: int) -> QuorumLogError:
    """The error of a failed machine."""
    return by_code(failed.code)(
        failed.detail, ledger_id=ledger_id, entry_id=failed.entry_id, bookie=failed.bookie
    )
