"""Take a log over: the machine (`protocol/log/takeover.py`), driven to its end."""

import asyncio

from quorumlog.errors import QuorumLogError
from quorumlog.protocol.log import LogMetadata
from quorumlog.protocol.log.messages import Begin, TakeoverDone
from quorumlog.protocol.log.takeover import Finish, Takeover
from services.gateway.logs.driver import LogDriver, Told, World


async def take_over(
    log: LogMetadata, world: World, *, creates: bool, finish: Finish
) -> tuple[LogMetadata, Takeover] | None:
    """All ledgers of `log` are CLOSED afterwards, but for the new last one with `creates`.

    `finish` may change the row further, in the same step. None: the row was changed by another;
    look again. Raises what recovery, creation or metadata raise, with the row as it was.
    """
    machine = Takeover(log, creates=creates, finish=finish)
    ended: asyncio.Future[LogMetadata | QuorumLogError | None] = (
        asyncio.get_running_loop().create_future()
    )

    def tell(told: Told) -> None:
        if isinstance(told, TakeoverDone) and not ended.done():
            ended.set_result(told.log)

    LogDriver(machine, log.name, world, tell).post(Begin())
    done = await ended
    if isinstance(done, QuorumLogError):
        raise done
    return None if done is None else (done, machine)
