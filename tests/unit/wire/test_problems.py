"""Errors travel as problem documents and come back as the class that was raised."""

import pickle

import orjson
import pytest

from quorumlog import errors
from quorumlog.wire import problems

ALL = sorted(errors.codes().items())

API_TABLE = {
    400: "bad-request webhook-url-rejected",
    422: "invalid key-required",
    401: "unauthenticated wake-token-invalid",
    403: "forbidden caller-refused wrong-password stale-producer",
    404: "not-found no-such-ledger no-such-entry not-yet-confirmed no-such-log no-such-transaction "
    "no-such-bookie no-such-repair no-such-token no-such-consumer no-such-queue no-such-key "
    "no-such-subscription",
    405: "method-not-allowed",
    406: "not-acceptable",
    408: "request-timeout",
    413: "too-large",
    415: "unsupported-media-type",
    421: "foreign-host",
    431: "headers-too-large",
    409: "ledger-closed ledger-fenced ledger-exists owned-by-log writer-lost entry-conflict log-exists "
    "log-closed log-fenced sequence-gap stream-seq-regression stream-conflict expired-producer transaction-committed "
    "transaction-aborted loss-not-proven not-the-owner copy-lost log-protected log-replaced lease-held lease-lost "
    "position-behind too-many-consumers log-full request-outdated stale-member incarnation-used already-done "
    "queue-exists too-many-queues subscription-exists too-many-subscriptions wake-fenced already-claimed "
    "no-pending-work invalid-offset",
    410: "offset-truncated entry-lost log-deleted",
    416: "offset-beyond-end",
    412: "version-conflict unexpected-entry-id unexpected-offset",
    428: "precondition-required",
    429: "overloaded",
    503: "not-enough-bookies entry-unavailable metadata-unavailable recovery-blocked read-only "
    "metadata-busy database-went-back shutting-down service-unavailable key-scan-limit",
    504: "quorum-timeout",
    500: "internal-error",
    501: "coding-unknown",
}


def test_the_codes_are_those_of_the_api_table() -> None:
    table = {(status, code) for status, line in API_TABLE.items() for code in line.split()}

    assert {(cls.status, code) for code, cls in ALL} == table


@pytest.mark.parametrize(("code", "cls"), ALL)
def test_an_error_comes_back_as_it_was_raised(code: str, cls: type[errors.QuorumLogError]) -> None:
    error = cls(
        "what happened",
        ledger_id=7,
        entry_id=0,
        bookie="b@1",
        log="l",
        outcome="unknown",
        other=[1],
    )

    back = problems.from_answer(error.status, problems.to_bytes(error, "req-1"), error.headers)

    assert type(back) is cls
    assert (back.code, back.detail, back.outcome) == (code, "what happened", "unknown")
    assert (back.ledger_id, back.entry_id, back.bookie, back.log) == (7, 0, "b@1", "l")
    assert (back.retryable, back.retry_after_s) == (error.retryable, error.retry_after_s)
    assert (back.instance, back.members) == ("req-1", {"other": [1]})


@pytest.mark.parametrize(("code", "cls"), ALL)
def test_errors_survive_pickling(code: str, cls: type[errors.QuorumLogError]) -> None:
    back = pickle.loads(pickle.dumps(cls("d", ledger_id=3, next_entry_id=4)))

    assert (type(back), back.code, back.detail) == (cls, code, "d")
    assert (back.ledger_id, back.members) == (3, {"next_entry_id": 4})


def test_two_classes_of_one_code_are_refused() -> None:
    with pytest.raises(TypeError, match="is used by two error classes"):

        class Twin(errors.Invalid, code="bad-request"):
            """A second class of the code."""


def test_overload_and_unavailability_say_when_to_come_back() -> None:
    for _code, cls in ALL:
        assert ("Retry-After" in cls().headers) == (cls.status in (429, 503))


def test_members_that_clients_need_travel_as_headers_too() -> None:
    assert errors.UnexpectedEntryId(next_entry_id=8).headers["Next-Entry-Id"] == "8"
    assert errors.StaleProducer(producer_epoch=0).headers["Producer-Epoch"] == "0"
    assert errors.SequenceGap(producer_expected_seq=5).headers["Producer-Expected-Seq"] == "5"
    assert errors.Unauthenticated().headers["WWW-Authenticate"].startswith("Bearer")


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b"null", b'{"status":404}', b'{"code":5}', b"\xff", b'"x"']
)
def test_an_answer_that_is_no_problem_document_is_no_knowledge(body: bytes) -> None:
    error = problems.from_answer(404, body)

    assert type(error) is errors.QuorumLogError
    assert (error.status, error.outcome, error.retryable) == (404, "unknown", False)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("7", 7),
        ("90000", 86_400),
        ("Fri, 01 Jan 2100 00:02:00 GMT", 120),
        ("Thu, 31 Dec 2099 23:00:00 GMT", 0),
        ("9" * 5000, None),
        ("Fri, 01 Jan 2100 00:02:00 -0000", None),
        ("soon", None),
        ("-1", None),
    ],
)
def test_retry_after_is_a_number_or_a_server_date(text: str, seconds: int | None) -> None:
    headers = {"Retry-After": text, "Date": "Fri, 01 Jan 2100 00:00:00 GMT"}

    for body in (b"<html>", problems.to_bytes(errors.StaleProducer())):
        assert problems.from_answer(503, body, headers, "http://b").retry_after_s == seconds


def test_a_code_of_a_newer_server_keeps_what_it_says() -> None:
    body = orjson.dumps(
        {"code": "new-thing", "status": 409, "title": "T", "retryable": True, "outcome": "not-done"}
    )

    error = problems.from_answer(409, body)

    assert (type(error), error.code, error.status) == (errors.QuorumLogError, "new-thing", 409)
    assert (error.retryable, error.outcome) == (True, "not-done")


def test_a_document_whose_members_have_wrong_types_is_read_without_an_error() -> None:
    body = orjson.dumps({"code": "too-large", "ledger_id": "x", "retryable": "yes", "outcome": 5})

    error = problems.from_answer(413, body)

    assert isinstance(error, errors.TooLarge)
    assert (error.ledger_id, error.retryable, error.outcome) == (None, False, "unknown")


def test_an_error_is_not_changed_once_it_is_made() -> None:
    error = errors.WriterLost("gone", ledger_id=7, other=1)

    with pytest.raises(AttributeError, match="outcome"):
        error.outcome = errors.NOT_DONE
    assert error.outcome == errors.UNKNOWN


def test_who_knows_more_gets_an_error_of_its_own() -> None:
    error = errors.WriterLost("gone", ledger_id=7, other=1)
    error.add_note("first")

    other = error.replace(outcome=errors.NOT_DONE, detail="never sent")
    other.add_note("second")

    assert (type(other), other.detail, str(other)) == (
        errors.WriterLost,
        "never sent",
        "never sent",
    )
    assert (other.ledger_id, other.members, other.outcome) == (7, {"other": 1}, "not-done")
    assert (error.detail, error.outcome, error.__notes__) == ("gone", "unknown", ["first"])
    assert other.__notes__ == ["first", "second"]


@pytest.mark.parametrize(
    ("precise", "broader"),
    [
        (errors.NotTheOwner, errors.WriterLost),
        (errors.ShuttingDown, errors.ReadOnly),
        (errors.DatabaseWentBack, errors.MetadataUnavailable),
        (errors.MetadataBusy, errors.MetadataUnavailable),
    ],
)
def test_a_more_precise_class_is_caught_as_the_broader_one(
    precise: type[errors.QuorumLogError], broader: type[errors.QuorumLogError]
) -> None:
    back = problems.from_answer(precise.status, problems.to_bytes(precise()))

    assert isinstance(back, broader)
    assert back.status == broader.status


def test_an_error_of_the_clients_own_is_no_code_of_the_api() -> None:
    assert errors.ConnectionLost.code not in errors.codes()
    assert errors.by_code(errors.ConnectionLost.code) is errors.QuorumLogError
