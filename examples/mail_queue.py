"""A mail sender on a work queue: several workers share a log of mails, and unsendable mails go to a dead-letter log.

    python examples/mail_queue.py --gateways http://127.0.0.1:8080 --put ann@example.org bob@nowhere
    python examples/mail_queue.py --gateways http://127.0.0.1:8080 --workers 4

A mail may be sent twice, if a worker dies between sending and acknowledging it. So each mail has a `Message-ID` made
from its offset, by which the mail server recognises the duplicate. No mail is lost: each is acknowledged, waits in the
queue, or is in `mails.dead` with the reason. `quorumlog queue redrive mails mail` sends the mails in `mails.dead` once
more.
"""

import argparse
import asyncio
from collections.abc import Sequence

from quorumlog.client import Client, Job, Queue


class Rejected(Exception):
    """The mail server rejects a mail."""


async def send(to: str, message_id: str) -> None:
    """Placeholder for a mail server's client. Raises: Rejected."""
    await asyncio.sleep(0.01)
    if "." not in to.partition("@")[2]:
        raise Rejected(f"no such host in the address {to}")
    print(f"sent {message_id} to {to}", flush=True)


async def opened(client: Client) -> Queue:
    """Return the queue, and create it if it does not exist."""
    await client.create_log("mails")
    await client.create_log("mails.dead")
    queue = client.log("mails").queue("mail")
    await queue.create(lease_s=10, max_attempts=3, dead_letter_log="mails.dead")
    return queue


async def work(queue: Queue, wait_s: float | None) -> None:
    """Send mails until none arrives for `wait_s`."""
    async for job in queue.jobs(wait_s=wait_s):
        await sent(queue, job)


async def sent(queue: Queue, job: Job) -> None:
    """Send a mail. The loop acknowledges the mail, unless `nak` has returned it to the queue."""
    try:
        await send(job.record.value.decode(), f"<{job.record.offset}@mails>")
    except Rejected as error:
        await queue.nak(job, delay_s=0.1 * 2**job.attempt, reason=str(error))


async def main(
    gateways: Sequence[str], put: Sequence[str], workers: int, wait_s: float | None
) -> None:
    """Append mails, or send them."""
    async with Client(*gateways) as client:
        queue = await opened(client)
        if put:
            await client.log("mails").append(*(to.encode() for to in put))
        else:
            await asyncio.gather(*(work(queue, wait_s) for _ in range(workers)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A mail sender on a work queue.")
    parser.add_argument("--gateways", nargs="+", default=["http://127.0.0.1:8080"])
    parser.add_argument("--put", nargs="+", default=[], metavar="ADDRESS", help="append mails")
    parser.add_argument("--workers", type=int, default=2, help="number of concurrent workers")
    parser.add_argument("--wait", type=float, help="end after this many seconds without a mail")
    given = parser.parse_args()
    asyncio.run(main(given.gateways, given.put, given.workers, given.wait))
