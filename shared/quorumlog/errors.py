"""Every error that a caller of quorumlog can get: one class for each code of the HTTP API.

A server raises an error, `wire/problems.py` turns it into `application/problem+json`, and the
client raises an error of the same class. The class determines whether the same request may be sent
again (`retryable`), whether the request was carried out (`outcome`), and who caused the failure
(the family and its `status`). The page `/problems/<code>` shows the class's docstring. The code is
made from the class's name and never changes; `tests/unit/wire/test_problems.py` lists all codes.

A class for a special case is a subclass of the general class, with a code of its own. Callers that
catch the general class, or use only `retryable` and `outcome`, need no change for a new subclass.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, Self, TypeVar

from quorumlog import header

Outcome = Literal["not-done", "unknown"]
"""Whether a failed request certainly was not carried out, or may have been."""

NOT_DONE: Final[Outcome] = "not-done"
UNKNOWN: Final[Outcome] = "unknown"

_CAPITAL: Final = re.compile(r"\B(?=[A-Z])")
_BY_CODE: dict[str, type["QuorumLogError"]] = {}


class QuorumLogError(Exception):
    """The base class of all errors. By itself, an internal error: a defect of quorumlog, or a state
    that should not occur. The service's log has details.
    """

    # Invariant: an error never changes after its construction, because one task may raise it while
    # another task reads it. Code that knows more about the error raises a copy (`replace`).

    code: str = "internal-error"
    status: int = 500
    title: str = "Internal error"
    retryable: bool = False
    outcome: Outcome = UNKNOWN
    retry_after_s: int | None = None
    """Seconds to wait before a retry (`Retry-After`); never None in responses 429 and 503."""

    detail: str
    ledger_id: int | None
    entry_id: int | None
    bookie: str | None
    log: str | None
    members: Mapping[str, Any]
    """Additional members of the problem document."""
    instance: str | None
    """The id of the failed request."""
    extra_headers: Mapping[str, str]

    member_headers: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """The header name for each member that the response repeats as a header."""

    def __init_subclass__(
        cls,
        *,
        code: str | None = None,
        status: int | None = None,
        title: str | None = None,
        retryable: bool | None = None,
        outcome: Outcome | None = None,
        retry_after_s: int | None = None,
        travels: bool = True,
    ) -> None:
        """Set the given attributes of a class, and register the class if it has a code.

        The default `code` of a class with a title is its name in lower case with hyphens. A family
        of classes has neither code nor title, and is never raised. `travels=False`: only the client
        raises the class, and the HTTP API has no such code.
        """
        if code is None and title is not None:
            code = _CAPITAL.sub("-", cls.__name__).lower()
        given = {
            "code": code,
            "status": status,
            "title": title,
            "retryable": retryable,
            "outcome": outcome,
            "retry_after_s": retry_after_s,
        }
        for name, value in given.items():
            if value is not None:
                setattr(cls, name, value)
        if code is None or not travels:
            return
        if code in _BY_CODE or code == QuorumLogError.code:
            raise TypeError(f"the code {code} is used by two error classes: rename one of them")
        _BY_CODE[code] = cls

    def __init__(
        self,
        detail: str = "",
        *,
        ledger_id: int | None = None,
        entry_id: int | None = None,
        bookie: str | None = None,
        log: str | None = None,
        outcome: Outcome | None = None,
        retryable: bool | None = None,
        retry_after_s: int | None = None,
        headers: Mapping[str, str] | None = None,
        **members: Any,
    ) -> None:
        """Create an error. `detail` describes this occurrence. `outcome`, `retryable` and
        `retry_after_s` replace the defaults of the class. `members`: additional members of the
        problem document.
        """
        super().__init__(detail or self.title)
        given = {"outcome": outcome, "retryable": retryable, "retry_after_s": retry_after_s}
        self.__dict__.update(
            {name: value for name, value in given.items() if value is not None},
            detail=detail or self.title,
            ledger_id=ledger_id,
            entry_id=entry_id,
            bookie=bookie,
            log=log,
            members=members,
            instance=None,
            extra_headers=dict(headers or {}),
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Raise AttributeError, except for attributes that Python sets, such as the traceback."""
        if not name.startswith("__"):
            raise AttributeError(f"{name} can't be set: errors are immutable, use `replace`")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        """The error's class, code and detail, for log lines."""
        return f"{type(self).__name__}({self.code}: {self.detail})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle class and fields, so that errors can be sent to other processes (Spark)."""
        return (_rebuild, (type(self), self.detail, self.__dict__))

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a response that reports this error."""
        headers = dict(self.extra_headers)
        if self.retry_after_s is not None:
            headers[header.RETRY_AFTER] = str(self.retry_after_s)
        for member, name in self.member_headers.items():
            if self.members.get(member) is not None:
                headers[name] = str(self.members[member])
        return headers

    def replace(self, **changes: Any) -> Self:
        """A copy of the error with some fields changed."""
        state = {**self.__dict__, **changes}
        if "__notes__" in state:
            state["__notes__"] = list(state["__notes__"])
        copy = _rebuild(type(self), state["detail"], state)
        if self.__cause__ is not None:
            copy.__cause__ = self.__cause__
        return copy

    def with_outcome(self, outcome: Outcome) -> Self:
        """A copy of the error with another outcome."""
        return self.replace(outcome=outcome)


E = TypeVar("E", bound=QuorumLogError)


def _rebuild(cls: type[E], detail: str, state: dict[str, Any]) -> E:
    error = cls(detail)
    error.__dict__.update(state)
    return error


def codes() -> dict[str, type[QuorumLogError]]:
    """The error class of every code, including the base class (`internal-error`)."""
    return {QuorumLogError.code: QuorumLogError, **_BY_CODE}


def by_code(code: str) -> type[QuorumLogError]:
    """The error class of a code; the base class for an unknown code, such as a newer server's."""
    return _BY_CODE.get(code, QuorumLogError)


# Families of errors. Only their subclasses are raised.


class Invalid(QuorumLogError, status=400, outcome=NOT_DONE):
    """The request itself is wrong. The same request would fail again."""


class Refused(QuorumLogError, status=403, outcome=NOT_DONE):
    """The caller is not allowed to make this request."""


class NotFound(QuorumLogError, status=404, outcome=NOT_DONE):
    """The request names something that does not exist."""


class Superseded(QuorumLogError, status=409, outcome=NOT_DONE):
    """Another client or process changed the state. Read the new state before a retry."""


class Unavailable(QuorumLogError, status=503, retryable=True, outcome=NOT_DONE, retry_after_s=1):
    """The cluster can't carry out the request now, but may be able to later."""


# 4xx: the request is wrong.


class BadRequest(Invalid, title="The request can't be parsed"):
    """The request can't be parsed, because of broken JSON, a malformed number or a repeated key."""


class InvalidRequest(Invalid, code="invalid", status=422, title="The request is not valid"):
    """The request was parsed, but a value in it is not allowed. `errors` lists each such value with
    a JSON pointer into the body, or with the name of the parameter or header.
    """


class WebhookUrlRejected(Invalid, title="The webhook's URL is not allowed"):
    """A webhook's URL must use https and must not name a host of a private network, unless the
    operator has allowed that network (`WEBHOOK_NETWORKS`).
    """


class KeyRequired(Invalid, status=422, title="The log needs a key with each record"):
    """The log's `cleanup_policy` has `compact`, so compaction keeps the newest record of each key,
    and a record without a key was rejected.
    """


class Unauthenticated(Refused, status=401, title="The caller is not authenticated"):
    """The request has no credentials, or its credentials are not valid for this cluster."""

    @property
    def headers(self) -> dict[str, str]:
        """The error's headers, with the challenge that HTTP requires for status 401."""
        return {"WWW-Authenticate": 'Bearer realm="quorumlog"', **super().headers}


class WakeTokenInvalid(Unauthenticated, title="The wake's token is not valid"):
    """The request must have the wake's token, as `Authorization: Bearer …`."""


class Forbidden(Refused, title="Not allowed"):
    """The caller may not make this request. For example, its token lacks a grant, or the origin of
    its web page is not in `CORS_ORIGINS`.
    """


class CallerRefused(Refused, title="The caller's certificate does not allow this"):
    """A service's request names a process or a host that is not in the service's certificate. A
    bookie may act only under its own name and at a host in its certificate, and only if
    `ALLOWED_BOOKIES` lists its name.
    """


class ForeignHost(Refused, status=421, title="The request is for another host"):
    """The header `Host` does not contain a host of this process. This check stops web pages whose
    host name resolves to the address of the process (DNS rebinding). A process accepts loopback
    names, IP addresses, the host of `ADVERTISED_URL`, and `ALLOWED_HOSTS`.
    """


class WrongPassword(Refused, title="The ledger's password is missing or wrong"):
    """The ledger has a password, and the header `Ledger-Password` is missing or wrong."""


class StaleProducer(Refused, title="A newer epoch of this producer exists"):
    """A producer with this id has written under a higher epoch, which `Producer-Epoch` contains."""

    member_headers = MappingProxyType({"producer_epoch": header.PRODUCER_EPOCH})


class RouteNotFound(NotFound, code="not-found", title="No such route"):
    """This server has no route with the request's path."""


class NoSuchLedger(NotFound, title="No such ledger"):
    """There is no ledger with this id; if `deleted` is true, the ledger existed and was deleted."""


class NoSuchEntry(NotFound, title="The ledger ends before this entry"):
    """The ledger is closed and ends before this entry."""


class NotYetConfirmed(NotFound, title="The entry is not confirmed yet", retryable=True):
    """The entry is not confirmed yet, and the ledger is not closed. The entry may exist later."""


class NoSuchLog(NotFound, title="No such log"):
    """There is no log with this name."""


class LogDeleted(NoSuchLog, status=410, title="The log is deleted, but has forks"):
    """The log was deleted, but forks of it exist. The name is free once all forks are deleted."""


class NoSuchConsumer(NotFound, title="No such consumer"):
    """The log has no consumer with this name."""


class NoSuchQueue(NotFound, title="No such queue"):
    """The log has no queue with this name."""


class NoSuchSubscription(NotFound, title="No such subscription"):
    """There is no subscription with this id: it was never created, or it was deleted."""


class NoSuchKey(NotFound, title="No record with this key"):
    """The log had no record with this key before the offset `next_offset`, or its newest record
    with the key was removed.
    """


class NoSuchBookie(NotFound, title="No such bookie"):
    """No bookie with this name is registered: it never registered, or it was decommissioned."""


class NoSuchRepair(NotFound, title="No such item in the queue of repairs"):
    """The queue of repairs has no such item: the repair is done, or the ledger was deleted."""


class NoSuchTransaction(NotFound, title="No such transaction"):
    """There is no transaction with this id."""


class NoSuchToken(NotFound, title="No such access token"):
    """No access token has this id: it never existed, was revoked, or expired long ago."""


class MethodNotAllowed(Invalid, status=405, title="The route does not have this method"):
    """The route exists, but not with this method. The header `Allow` lists the route's methods."""


class NotAcceptable(Invalid, status=406, title="None of the accepted media types is available"):
    """The route can't respond with any of the media types in the header `Accept`."""


class RequestTimeout(
    Invalid, status=408, title="The request did not arrive in time", retryable=True
):
    """The client took too long to send the headers or the body. The connection is closed."""


class TooLarge(Invalid, status=413, title="The request is too large"):
    """An entry, a batch or the body is too large. `detail` names the limit."""


class UnsupportedMediaType(Invalid, status=415, title="The body's media type is not supported"):
    """The route does not accept the body's `Content-Type`, or its `Content-Encoding`."""


class HeadersTooLarge(Invalid, status=431, title="The request's headers are too large"):
    """The request line or the headers are larger than the server's limit."""


class CodingUnknown(Invalid, status=501, title="The transfer coding is not supported"):
    """The only supported `Transfer-Encoding` of a request is `chunked` (RFC 9112, 6.1)."""


# 409, 410, 412: the request conflicts with the current state.


class CopyLost(Superseded, title="Bookies have ledger metadata that the database lacks"):
    """Bookies have copies of newer metadata of the ledger. The database lacks these changes, whose
    tokens are in `attempts`, or an operator accepted their loss. The database's older metadata
    can't be used for a deletion or recovery.
    """


class StaleMember(Superseded, title="A member is not the registered incarnation of its bookie"):
    """The change would add members that are not registered incarnations of bookies. `present` maps
    each such bookie to its registered incarnation, or to null if it is not registered. If
    `is_final` is true, all these members are older incarnations, so the change can never succeed.
    """


class IncarnationUsed(Superseded, title="The incarnation belongs to another directory"):
    """A bookie with a new directory would register as an incarnation that ledgers already name. The
    new directory may lack entries that were acknowledged under that incarnation. `named` is the
    highest incarnation of the bookie that ledgers name.
    """


class LedgerClosed(Superseded, title="The ledger is closed"):
    """The ledger is closed and accepts no entries. Its last entry (`last_entry`) is final."""


class LedgerFenced(Superseded, title="The ledger is fenced"):
    """The ledger is being recovered, so its writer can't continue. Entries in flight may become
    part of the ledger. The last entry that the recovery finds is final.
    """


class LedgerExists(Superseded, title="The ledger's id is already used"):
    """A ledger with this id exists or existed. Each id is used only once."""


class OwnedByLog(Superseded, title="The ledger belongs to a log"):
    """The ledger belongs to a log. Append to, close or delete the log instead of the ledger."""


class WriterLost(Superseded, title="The ledger's writer is gone", outcome=UNKNOWN):
    """The ledger's only writer is gone or silent. Recover the ledger to determine its end."""


class NotTheOwner(
    WriterLost, title="This gateway does not own the log", retryable=True, outcome=NOT_DONE
):
    """The gateway that got the request does not own the log, or is shutting down. Nothing was
    appended. A retry finds the owner.
    """


class EntryConflict(
    Superseded, title="Other bytes are stored under the entry's id", outcome=UNKNOWN
):
    """A bookie has other bytes under the id of an entry, so the ledger's writer can't continue."""


class LogExists(Superseded, title="The log exists with other settings"):
    """A log with this name exists, but its settings differ from the requested settings."""


class LogProtected(Superseded, title="The log is protected from deletion"):
    """The log has `deletion_protection`. Switch it off to delete, truncate or overwrite the log."""


class LogClosed(Superseded, title="The log is closed"):
    """The log is closed for ever. It accepts no more records."""


class LogFenced(Superseded, title="A newer writer opened the log"):
    """Another writer has opened the log, so this request's writer token is no longer valid."""


class LogReplaced(Superseded, title="The log was deleted and created again"):
    """The request is for a log that was deleted, and another log was created under the same name.
    Nothing was done. Offsets of the old log are not valid in the new log. Read the new log from
    `earliest`, or reset the consumer to it.
    """


class LeaseHeld(Superseded, title="Another holder has the lease"):
    """The worker `holder` has the consumer's lease for `expires_in_ms` ms, or longer if renewed."""


class LeaseLost(Superseded, title="The lease was lost"):
    """A newer fencing token exists (`fencing_token`), or the lease was released. Another worker may
    process the log as this consumer. Stop, and acquire the lease again.
    """


class PositionBehind(Superseded, title="The committed offset is already higher"):
    """The committed offset (`offset`) is above the requested offset. Only a reset can lower it."""


class RequestOutdated(Superseded, title="The request may be an old retry", outcome=UNKNOWN):
    """The header `Consumers-Version` is too old or missing. If the outcome is `not-done`, send the
    same request again, with this problem's `version` as `Consumers-Version`. If the outcome is
    `unknown`, the cluster may have carried out an earlier copy of this change: read the consumer.
    If the change was not made, send it with this problem's `version` and a new `Idempotency-Key`.
    """


class TooManyConsumers(Superseded, title="There are too many consumers"):
    """The cluster, the log or this access token has reached its limit of consumers. No consumer was
    created. Delete consumers that are no longer used.
    """


class QueueExists(Superseded, title="The queue exists with other settings"):
    """The queue exists, and the setting that differs can't be changed. To change this setting,
    delete the queue and create it again; its progress is then lost.
    """


class TooManyQueues(Superseded, title="There are too many queues"):
    """The cluster or the log has reached its limit of queues. No queue was created. Delete queues
    that are no longer used.
    """


class SubscriptionExists(Superseded, title="The subscription exists with other settings"):
    """The subscription exists with another configuration. To change the configuration, delete the
    subscription and create it again; its acknowledged offsets are then lost.
    """


class TooManySubscriptions(Superseded, title="There are too many subscriptions"):
    """The cluster has reached its limit of subscriptions, or of streams in subscriptions. Nothing
    was done.
    """


class WakeFenced(Superseded, title="The wake is no longer the current one"):
    """The lease of this wake ended, or the wake was acknowledged. Another worker may have the work.
    Nothing was acknowledged. `generation` is the generation of the current wake.
    """


class AlreadyClaimed(Superseded, title="Another worker has claimed the subscription"):
    """The worker `current_holder` has claimed the wake `generation` until its lease ends."""


class NoPendingWork(Superseded, title="The subscription has no pending work"):
    """All streams of the subscription are acknowledged up to their ends. Wait for the next wake."""


class InvalidOffset(Superseded, title="The offset can't be acknowledged"):
    """An acknowledged offset is below an earlier offset, beyond the stream's end, or for a stream
    that is not in the subscription. Nothing was acknowledged.
    """


class SequenceGap(
    Superseded, title="An earlier request of this producer is missing", retryable=True
):
    """An earlier request of this producer has not arrived. The header `Producer-Expected-Seq` has
    the missing request's sequence number.
    """

    member_headers = MappingProxyType({"producer_expected_seq": header.PRODUCER_EXPECTED_SEQ})


class StreamSeqRegression(Superseded, title="A higher stream sequence was appended already"):
    """`Stream-Seq` must be above the last value, compared by bytes. Nothing was appended."""


class StreamConflict(Superseded, title="The stream exists with other settings"):
    """The stream exists with another content type, expiry or closed state than requested, or its
    creation did not finish.
    """


class ExpiredProducer(Superseded, title="The producer is no longer known", outcome=UNKNOWN):
    """The log no longer remembers this producer or this request, so it can't decide whether the
    request is a retry. This attempt appended nothing. A new producer must send `Producer-Since`
    with the log's `next_offset`, read before the producer's first request.
    """


class TransactionCommitted(Superseded, title="The transaction is committed"):
    """The transaction is committed already."""


class TransactionAborted(Superseded, title="The transaction is aborted"):
    """The transaction is aborted."""


class OffsetTruncated(Superseded, status=410, title="The records at this offset were dropped"):
    """The offset is below `first_offset`. The log has dropped all records below `first_offset`."""


class OffsetBeyondEnd(Invalid, status=416, title="The log ends before this offset"):
    """The log never had a record with this offset. `next_offset` is the log's end: a
    reader may wait there for the next record.
    """


class EntryLost(Superseded, status=410, title="The entry is lost"):
    """The entry was acknowledged, but is lost for ever: no bookie has it, and an operator accepted
    the loss. Continue to read a ledger at the entry `next`, and a log at the offset `next_offset`.
    """


class LossNotProven(Superseded, title="It is not proven that the entries are lost"):
    """A loss is accepted only if the ledger is CLOSED and every bookie that could store the entries
    denies them. `answers` has the answer of each bookie.
    """


class VersionConflict(Superseded, status=412, title="The version has changed"):
    """The object's version differs from `If-Match`. `current` has the current state."""


class AlreadyDone(Superseded, title="An earlier copy of the request was carried out"):
    """A request with this `Idempotency-Key` was already carried out (rule 6a). `current` has the
    current metadata. Only services get this error; clients of a gateway get the metadata instead.
    """


class PreconditionRequired(Superseded, status=428, title="The request needs a precondition"):
    """A commit must name the state that it changes. Send `If-Match` with the consumer's version,
    `If-None-Match: *` to create the consumer, or `Fencing-Token` with the token of its lease.
    """


class UnexpectedEntryId(Superseded, status=412, title="The next entry has another id"):
    """The first entry would not get the id in `expect`, so nothing was appended. The header
    `Next-Entry-Id` and the member `next_entry_id` have the id that the next entry gets.
    """

    member_headers = MappingProxyType({"next_entry_id": header.NEXT_ENTRY_ID})


class UnexpectedOffset(Superseded, status=412, title="The next record has another offset"):
    """The first record would not get the offset in `expect`, so nothing was appended. The header
    `Next-Offset` and the member `next_offset` have the offset that the next record gets.
    """

    member_headers = MappingProxyType({"next_offset": header.NEXT_OFFSET})


class LogFull(Superseded, title="The log has too many ledgers"):
    """The log has reached its limit of ledgers, so the log can't roll, and transactions can't
    commit. A retry succeeds only after a truncation or the log's retention has dropped ledgers.
    """


# 429, 503, 504: the cluster can't carry out the request now.


class Overloaded(Unavailable, status=429, title="Too many requests at once"):
    """The server has too many requests in progress. The server has not begun this request."""


class NotEnoughBookies(Unavailable, title="Not enough bookies"):
    """Too few bookies accept entries for the ledger's ensemble, because other bookies are lost or
    read-only. Or too few bookies answer an operator's command.
    """


class ServiceUnavailable(Unavailable, title="No process of the service answers"):
    """The gateway can't forward the request to a bookie, autorecovery or the metadata service,
    because that service can't be reached or refuses the gateway. If the outcome is `unknown`, the
    connection broke, and the request may have been carried out.
    """


class EntryUnavailable(Unavailable, title="The entry can't be read now"):
    """The entry may exist, but can't be read now. `answers` has the answer of each bookie."""


class KeyScanLimit(
    Unavailable, retryable=False, title="The key is not in the newest records, but others are left"
):
    """No record from the offset `before` on has the key, and the older records are too many for one
    request. Send the request again with `before`, and with `created_at` as `created`.
    """


class MetadataUnavailable(Unavailable, title="The metadata can't be reached"):
    """The metadata service or its database can't be reached."""


class MetadataBusy(MetadataUnavailable, title="Too many listings at once"):
    """The metadata service has too many concurrent listings. Other requests are still served."""


class DatabaseWentBack(
    MetadataUnavailable, title="The database lost acknowledged changes", retryable=False
):
    """The metadata's database lacks an acknowledged change: the database was restored from a
    backup, or failed over to a standby that lagged. Changes and deletions are refused until the
    right database is back, or an operator accepts the loss. Reads continue, except reads before a
    deletion. `witnesses` lists the missing changes. See the runbook.
    """


class RecoveryBlocked(Unavailable, title="The ledger's recovery is blocked"):
    """The recovery can't finish, because too few bookies answer to decide whether an entry was
    acknowledged. `bookie` and `entry_id` show where the recovery is blocked.
    """


class ReadOnly(Unavailable, title="Bookies are read-only"):
    """The bookies that the request needs accept no new entries now."""


class ShuttingDown(ReadOnly, title="The process is shutting down"):
    """The process is shutting down. Send the request to another process."""


class QuorumTimeout(
    QuorumLogError, status=504, title="The ack quorum did not answer in time", outcome=UNKNOWN
):
    """Too few bookies acknowledged the entries in time. The entries may exist now or later."""


# Errors that only the client raises.


class ConnectionLost(
    QuorumLogError,
    travels=False,
    status=503,
    title="The connection to the gateway is lost",
    retryable=True,
):
    """No gateway could be reached (not-done), the connection broke during a request (unknown), or a
    load balancer responded with its own error (unknown).
    """


class NotAGateway(
    QuorumLogError, travels=False, status=502, title="The URL does not lead to a gateway"
):
    """The response is not from a gateway. The response is an error without a problem document, or a
    redirect, which the client never follows because the request carries credentials. A gateway
    behind a proxy may have received the request.
    """


class UntrustedServer(
    QuorumLogError,
    travels=False,
    status=502,
    title="The TLS handshake with this URL fails",
    outcome=NOT_DONE,
):
    """The server's certificate is not trusted or is for another host, or the server requires a
    client certificate or does not speak TLS. A retry does not help.
    """


class ClientClosed(
    QuorumLogError, travels=False, status=503, title="The client is not open", outcome=NOT_DONE
):
    """The client was used outside of its `with` block (not-done), or it was closed during a call
    (unknown).
    """


class ClientBroke(QuorumLogError, travels=False, title="The client failed"):
    """A defect of the client ended a call; the exception is the error's cause. The outcome of
    requests in progress is unknown. Appends queued behind these requests were not sent.
    """
