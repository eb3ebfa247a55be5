"""A log that a batch has ended (rule 25b), and stream sequences (rule 25a)."""

import pytest

from quorumlog.errors import StreamSeqRegression
from quorumlog.protocol import batch
from quorumlog.protocol.batch import ProducerSeq, Record
from tests.model.logs.endings import no_seed_goes_on
from tests.support.virtual import run_virtual


def test_nothing_follows_the_batch_that_ends_a_log_whoever_dies() -> None:
    assert run_virtual(no_seed_goes_on, seed=0) is None


def test_a_batch_without_records_ends_a_log_and_no_other_batch_lacks_records() -> None:
    data = batch.encode([], ProducerSeq("p", 1, 2), is_end=True)
    head = batch.decode_head(data)
    assert (head.count, head.is_end, head.producer) == (0, True, ProducerSeq("p", 1, 2))
    assert batch.decode(data) == (head, [])
    with pytest.raises(batch.BadBatch):
        batch.decode_head(data[:2] + b"\0\0" + data[4:])


@pytest.mark.parametrize("producer", [None, ProducerSeq("p", 1, 2)], ids=["plain", "producer"])
def test_a_batch_carries_the_last_stream_sequence_on(producer: ProducerSeq | None) -> None:
    records = [Record(b"v", b"k"), Record(b"w")]
    plain = batch.encode(records, producer)
    placed = batch.placed(plain, append_time_ms=7, records_before=3, seq="0041")
    head, found = batch.decode(placed)
    assert (head.seq, head.producer, head.records_before, found) == ("0041", producer, 3, records)
    assert batch.content(placed) == batch.content(plain)
    own = batch.placed(
        batch.encode(records, producer, seq="0042"), append_time_ms=7, records_before=3, seq="0041"
    )
    assert batch.decode_head(own).seq == "0042"


def test_a_regression_is_an_error_of_its_own() -> None:
    assert (StreamSeqRegression.status, StreamSeqRegression.code) == (409, "stream-seq-regression")
