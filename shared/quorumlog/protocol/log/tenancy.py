"""An owner's state: the newest metadata that it has received, and the ledger that it writes."""

from quorumlog.errors import LogFenced
from quorumlog.protocol.heads import LogHead
from quorumlog.protocol.log.clock import Now
from quorumlog.protocol.log.pipeline import PendingAppend, Pipeline
from quorumlog.protocol.log.producers import ProducerTable
from quorumlog.protocol.log.row import LogMetadata, LogState


class Tenancy:
    """The metadata and the last ledger of a log that this process owns.

    Invariant (checked by `check`): no entry is written to a ledger before the log's metadata names
    the ledger with its first offset (rule 23).
    """

    def __init__(self, log: LogMetadata, producers: ProducerTable[PendingAppend], now: Now) -> None:
        """Begin with a log whose last ledger is this process's, is empty and has a first offset."""
        self.log = log
        self.pipe = self._pipeline(producers, log.appended_ms, now, log.stream_seq)
        """The ledger that the owner writes."""
        self.ahead = self.ledger_id
        """The next ledger if a job has created it, otherwise the present ledger."""

    def _pipeline(
        self,
        producers: ProducerTable[PendingAppend],
        appended_ms: int,
        now: Now,
        seq: str | None,
    ) -> Pipeline:
        """The pipeline of appends to the last ledger in the metadata."""
        item = self.log.last_item
        assert item is not None
        packs = self.log.settings.batch_compression != "none"
        return Pipeline(item, producers, appended_ms, now, packs=packs, seq=seq)

    @property
    def ledger_id(self) -> int:
        """The ledger that the owner writes."""
        return self.pipe.ledger_id

    def check(self, *, is_ended: bool) -> None:
        """Assert the invariants. The ledger must be in the metadata unless the owner has ended."""
        self.log.check()
        self.pipe.check()
        if not is_ended:
            mine = self.log.item_of(self.ledger_id)
            assert mine is not None, "the metadata must name the written ledger (rule 23)"
            assert mine.first_offset == self.pipe.first_offset, "first offsets differ (rule 23)"

    def check_token(self, token: int | None) -> None:
        """Raise LogFenced unless a writer with this token (from `open`) may append."""
        mine = self.log.writer_token
        if (token or 0) != mine and (token is not None or mine):
            raise LogFenced(f"the writer token must be {mine}: open the log", log=self.log.name)

    def is_roll_due(self, now: Now) -> bool:
        """Whether the ledger has reached a limit of the log's settings."""
        settings, pipe = self.log.settings, self.pipe
        return pipe.next_entry > 0 and (
            0 < settings.roll_bytes <= pipe.bytes
            or 0 < settings.roll_entries <= pipe.next_entry
            or 0 < settings.roll_seconds <= now.monotonic_s - pipe.since_s
        )

    # --- metadata --------------------------------------------------------------------------------

    def is_mine(self, log: LogMetadata) -> bool:
        """Whether a version of the metadata names this owner's ledger last."""
        mine, last = self.log.last_item, log.last_item
        return (
            log.state is LogState.OPEN
            and mine is not None
            and last is not None
            and mine.ledger_id == last.ledger_id
            and mine.first_offset == last.first_offset
            and log.writer_token == self.log.writer_token
        )

    def may_be_own(self, head: LogHead) -> bool:
        """Whether this owner writes the last ledger in the metadata. The last ledger may also be
        the next ledger, if the answer to this owner's own roll or publication has not arrived.
        """
        return (
            head.state is LogState.OPEN
            and head.last_ledger in (self.ledger_id, self.ahead)
            and head.writer_token == self.log.writer_token
        )

    def take(self, log: LogMetadata) -> None:
        """Replace the known metadata by newer metadata, unless the log has another owner."""
        if log.version > self.log.version and self.is_mine(log):
            self.log = log

    def with_ends(
        self, log: LogMetadata, ends: dict[int, tuple[int, int]], now: Now
    ) -> LogMetadata:
        """The metadata with the ends of ledgers, and with the present producers."""
        producers = self.pipe.producers.snapshot()
        return log.with_ends(
            ends,
            producers=producers,
            now_ms=now.sealed_ms(),
            forgotten_end=self.pipe.producers.forgotten_end,
            appended_ms=self.pipe.appended_ms,
            stream_seq=self.pipe.seq,
        )

    def next_ledger(self, now: Now) -> None:
        """Switch to the ledger that the metadata now names last."""
        # The metadata's time is later if ledgers were published (rule 26b).
        appended_ms = max(self.pipe.appended_ms, self.log.appended_ms)
        self.pipe = self._pipeline(self.pipe.producers, appended_ms, now, self.pipe.seq)
        self.ahead = self.ledger_id
