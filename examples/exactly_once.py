"""A consumer that processes each record exactly once, even if processes fail: account balances in an SQLite file.

The cluster delivers records at least once: records that were processed but not committed are delivered again. So the
file stores its own offset, and one SQLite transaction updates both the balances and this offset. A record that is
delivered again has a lower offset, and is skipped. After the transaction, the worker commits the offset to the cluster
too, so that the cluster can show the consumer's lag. The consumer's lease lets only one worker read at a time.

    quorumlog log create payments
    python examples/exactly_once.py --file /tmp/balances.db --gateways http://127.0.0.1:8080 http://127.0.0.1:8081
    echo '{"account": "ann", "cents": 250}' | quorumlog log append payments
    sqlite3 /tmp/balances.db 'SELECT * FROM balances'
    quorumlog log consumers payments

You can kill the program and start it again at any time, even with SIGKILL. It continues at once, because a worker with
the same `--holder` takes the lease over. A worker with another holder waits until the lease has expired.

Guarantees: `balances` is the sum of all records below `progress.following`, each counted once. A record that is not a
payment does not stop the consumer: the table `refused` gets the record's offset and the reason.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sqlite3
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import orjson

from quorumlog.client import Client, Log, LogRecord
from quorumlog.errors import QuorumLogError

RETRY_S: Final = 1.0
"""Pause between attempts to read a log that can't be read now."""
CENTS_MAX: Final = 10**12
_TABLES: Final = """
    CREATE TABLE IF NOT EXISTS balances (account TEXT PRIMARY KEY, cents INTEGER NOT NULL);
    CREATE TABLE IF NOT EXISTS refused (offset INTEGER PRIMARY KEY, reason TEXT NOT NULL);
    CREATE TABLE IF NOT EXISTS progress (only INTEGER PRIMARY KEY CHECK (only = 1), following INTEGER NOT NULL);
    INSERT OR IGNORE INTO progress VALUES (1, 0);
"""


class Behind(Exception):
    """The file lacks records that the consumer has committed, for example because it is an older copy."""


class Balances:
    """The SQLite file.

    Invariant: the tables contain the result of all records below `following`, each counted once, and of no others.
    """

    def __init__(self, file: Path) -> None:
        self._database = sqlite3.connect(
            file, isolation_level=None, timeout=60, check_same_thread=False
        )
        self._lock = threading.Lock()
        self._database.execute("PRAGMA journal_mode = WAL")
        # A commit must survive a power failure: otherwise the cluster's offset could be above the file's.
        self._database.execute("PRAGMA synchronous = FULL")
        self._database.executescript(_TABLES)

    def close(self) -> None:
        """Close the file, once the running transaction has ended."""
        with self._lock:
            self._database.close()

    def following(self) -> int:
        """The offset of the first record that is not counted."""
        return int(self._database.execute("SELECT following FROM progress").fetchone()[0])

    def take(self, records: Sequence[LogRecord]) -> None:
        """Count records and advance the offset, in one transaction. Raises: Behind."""
        with self._lock, self._transaction():
            # Read inside the transaction, which locks the file, because another worker may have counted these records.
            following = self.following()
            for record in records:
                if record.offset > following:
                    raise Behind(
                        f"the file lacks records {following} to {record.offset - 1}: read these"
                        " records again with `quorumlog log reset`"
                    )
                if record.offset == following:
                    self._count(record)
                    following += 1
            self._database.execute("UPDATE progress SET following = ?", (following,))

    def _count(self, record: LogRecord) -> None:
        try:
            account, cents = payment_of(record.value)
        except ValueError as error:
            self._database.execute("INSERT INTO refused VALUES (?, ?)", (record.offset, str(error)))
            return
        self._database.execute(
            "INSERT INTO balances VALUES (?, ?) ON CONFLICT DO UPDATE SET cents = cents + excluded.cents",
            (account, cents),
        )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")


def payment_of(value: bytes) -> tuple[str, int]:
    """Return a payment's account and cents. Raises: ValueError if the record is not a payment."""
    found: Any = orjson.loads(value)
    account, cents = (
        (found.get("account"), found.get("cents")) if isinstance(found, dict) else (None, None)
    )
    if not isinstance(account, str) or not account:
        raise ValueError("account must be a non-empty string")
    if not isinstance(cents, int) or isinstance(cents, bool) or abs(cents) > CENTS_MAX:
        raise ValueError("cents must be an integer between -10**12 and 10**12")
    return account, cents


async def work(log: Log, name: str, balances: Balances, *, holder: str, lease_s: float) -> None:
    """Process records until the log is closed. Raises: Behind, QuorumLogError (LeaseLost among them)."""
    async with log.consumer(name, holder=holder, lease_s=lease_s) as consumer:
        if consumer.position > balances.following():
            raise Behind(
                f"the committed offset is {consumer.position}, but the file has only the records below"
                f" {balances.following()}: read the later records again with `quorumlog log reset`"
            )
        async with aclosing(consumer.records().pages()) as pages:
            async for page in pages:
                if not page:
                    continue  # no new records yet
                # In a thread, so that the lease is renewed while the disk is slow.
                await asyncio.to_thread(balances.take, page)
                consumer.taken(page[-1])
                await consumer.commit()


async def run(given: argparse.Namespace) -> None:
    """Process records until SIGTERM or Ctrl-C. Then release the lease, so that another worker gets it at once."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    token = os.environ.get("QUORUMLOG_TOKEN")  # needed if the gateways require tokens
    with contextlib.closing(Balances(given.file)) as balances:
        async with Client(*given.gateways, token=token) as client:
            log = client.log(given.log)
            while True:
                try:
                    await work(
                        log, given.consumer, balances, holder=given.holder, lease_s=given.lease
                    )
                except QuorumLogError as error:
                    # The lease was lost, or the cluster does not respond. Uncommitted records are delivered again.
                    print(f"{error.code}: {error}", file=sys.stderr)
                    await asyncio.sleep(RETRY_S)
                else:
                    return


def main() -> None:
    """Read the command line and process records. Exit status 1: the file lacks records."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--file", type=Path, required=True, help="SQLite file for the balances")
    parser.add_argument("--gateways", nargs="+", required=True, help="URLs of gateways")
    parser.add_argument("--log", default="payments")
    parser.add_argument("--consumer", default="balances")
    parser.add_argument("--holder", default=socket.gethostname(), help="name of this worker")
    parser.add_argument("--lease", type=float, default=10.0, help="lease in seconds")
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        try:
            asyncio.run(run(parser.parse_args()))
        except Behind as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
