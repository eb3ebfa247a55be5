"""Reading a range of confirmed entries from the bookies that store them."""

import asyncio

from quorumlog.errors import EntryUnavailable
from quorumlog.net.ports import Ports, Ranges
from quorumlog.protocol.messages import Status
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.record import Codec, Run


async def read_range(
    ports: Ports, row: LedgerMetadata, first: int, last: int, bytes_max: int
) -> list[Run]:
    """Contiguous entries from `first` on, at least that one, about `bytes_max` of payload."""
    codec = Codec(row.digest, row.mac_key)
    runs: list[Run] = []
    size = 0
    while first <= last and size < bytes_max:
        answers = []
        for _, member in row.members_of(first):
            status, run = await _ask(ports, member, row.ledger_id, first, last)
            good = None if run is None else _start(run, first, set(run.invalid(codec)))
            if good is not None:
                break
            answers.append(f"{member}: {status.value}")
        else:
            if runs:
                break
            raise EntryUnavailable(
                f"asked {', '.join(answers)}", ledger_id=row.ledger_id, entry_id=first
            )
        runs.append(good)
        size += good.payload_bytes
        first = good.last + 1
    return runs


def _start(run: Run, first: int, bad: set[int]) -> Run | None:
    """The valid entries of a run that follow on from `first`."""
    end = first
    while run.index(end) is not None and end not in bad:
        end += 1
    return run.where(lambda entry_id: first <= entry_id < end)


async def _ask(
    ports: Ports, member: str, ledger_id: int, first: int, last: int
) -> tuple[Status, Run | None]:
    answer: asyncio.Future[tuple[Status, Run | None]] = asyncio.get_running_loop().create_future()

    def done(status: Status, run: Run | None, _absent: Ranges) -> None:
        if not answer.done():
            answer.set_result((status, run))

    ports.bookies.read(member, ledger_id, first, last, done, bytes_max=ports.read_bytes_max)
    return await answer
