"""Every error that a caller of quorumlog can meet: one class for each code of the HTTP API.

The server raises a class, `wire/problems.py` turns it into `application/problem+json`, and the
client raises the same class again. Three questions decide which class it is: may the same request
be sent again (`retryable`), was it done (`outcome`), and whose fault is it (the families, and
`status`). A class's docstring is what `/problems/<code>` shows to people. Pure: no IO, no clock.

A class that says more precisely what another one says is a subclass of that, with a code of its own:
who catches the broader class, or decides by `retryable` and `outcome`, need not know it.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, Self, TypeVar

from quorumlog import header

Outcome = Literal["not-done", "unknown"]
"""What became of the request: certainly nothing, or nobody can say."""

NOT_DONE: Final[Outcome] = "not-done"
UNKNOWN: Final[Outcome] = "unknown"

_BY_CODE: dict[str, type["QuorumLogError"]] = {}


class QuorumLogError(Exception):
    """The service met something that it should never meet; its log says more."""

    # Invariant: an error is not changed once it is made. It may be raised in one task and read in
    # another; who knows more of what happened raises another error (`replace`).

    code: str = "internal-error"
    status: int = 500
    title: str = "Internal error"
    retryable: bool = False
    outcome: Outcome = UNKNOWN
    retry_after_s: int | None = None
    """Seconds to wait before a retry; answers 429 and 503 always carry it."""

    detail: str
    ledger_id: int | None
    entry_id: int | None
    bookie: str | None
    log: str | None
    members: Mapping[str, Any]
    """What else the document says."""
    instance: str | None
    """The request's id."""
    extra_headers: Mapping[str, str]

    member_headers: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Members of the document that the answer carries as a header too: name to header."""

    def __init_subclass__(cls, *, travels: bool = True) -> None:
        """Register a class that names a code. A family names none and is never raised; a class of the
        client's own does not travel, and is in no table of the HTTP API.
        """
        code = cls.__dict__.get("code")
        if code is None or not travels:
            return
        if code in _BY_CODE or code == QuorumLogError.code:
            raise TypeError(f"two error classes with the code {code}")
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
        """`detail` says what happened this time; `members` are further members of the document.

        `outcome` and `retryable` replace what holds for most errors of the class.
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
        """Refuse, but for what Python itself notes of an exception: its traceback, its cause."""
        if not name.startswith("__"):
            raise AttributeError(f"{name}: an error is not changed; raise another one")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        """Code and detail, as a log line wants them."""
        return f"{type(self).__name__}({self.code}: {self.detail})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors cross process borders (multiprocessing, Spark) as what they are."""
        return (_rebuild, (type(self), self.detail, self.__dict__))

    @property
    def headers(self) -> dict[str, str]:
        """The headers that an answer with this error carries."""
        headers = dict(self.extra_headers)
        if self.retry_after_s is not None:
            headers[header.RETRY_AFTER] = str(self.retry_after_s)
        for member, name in self.member_headers.items():
            if self.members.get(member) is not None:
                headers[name] = str(self.members[member])
        return headers

    def replace(self, **changes: Any) -> Self:
        """A copy with other fields, for who knows more of what happened than who raised this one."""
        state = {**self.__dict__, **changes}
        if "__notes__" in state:
            state["__notes__"] = list(state["__notes__"])
        return _rebuild(type(self), state["detail"], state)

    def with_outcome(self, outcome: Outcome) -> Self:
        """A copy, of which more is known about what became of the request."""
        return self.replace(outcome=outcome)


E = TypeVar("E", bound=QuorumLogError)


def _rebuild(cls: type[E], detail: str, state: dict[str, Any]) -> E:
    error = cls(detail)
    error.__dict__.update(state)
    return error


def codes() -> dict[str, type[QuorumLogError]]:
    """Every code with its class, the base class (`internal-error`) included."""
    return {QuorumLogError.code: QuorumLogError, **_BY_CODE}


def by_code(code: str) -> type[QuorumLogError]:
    """The class of a code; the base class where the code is not known (a newer server)."""
    return _BY_CODE.get(code, QuorumLogError)


# --- the families --------------------------------------------------------------------------------


class Invalid(QuorumLogError):
    """The request itself is wrong: sent again as it is, it fails again."""

    status = 400
    outcome = NOT_DONE


class Refused(QuorumLogError):
    """The caller may not do this."""

    status = 403
    outcome = NOT_DONE


class NotFound(QuorumLogError):
    """What the request names is not there."""

    status = 404
    outcome = NOT_DONE


class Superseded(QuorumLogError):
    """Somebody else decided otherwise; the caller must look again first."""

    status = 409
    outcome = NOT_DONE


class Unavailable(QuorumLogError):
    """The cluster can't do it now; later it may."""

    status = 503
    outcome = NOT_DONE
    retryable = True
    retry_after_s = 1


# --- 4xx: the request ----------------------------------------------------------------------------


class BadRequest(Invalid):
    """The request can't be parsed: broken JSON, a number that is no number, a repeated key."""

    code = "bad-request"
    title = "The request can't be parsed"


class InvalidRequest(Invalid):
    """The request was parsed, but a value in it is not allowed. `errors` lists each one with a
    JSON pointer into the body, or with the name of the parameter or header.
    """

    code = "invalid"
    status = 422
    title = "The request is not valid"


class Unauthenticated(Refused):
    """The request names no caller, or one that is not known."""

    code = "unauthenticated"
    status = 401
    title = "Who asks is not known"

    @property
    def headers(self) -> dict[str, str]:
        """With the challenge that a 401 must carry."""
        return {"WWW-Authenticate": 'Bearer realm="quorumlog"', **super().headers}


class Forbidden(Refused):
    """The caller may not do this: a page of another origin, say, that `CORS_ORIGINS` does not name."""

    code = "forbidden"
    title = "Not allowed"


class WrongPassword(Refused):
    """The ledger has a password, and the header `Ledger-Password` is missing or another."""

    code = "wrong-password"
    title = "The ledger's password is missing or wrong"


class StaleProducer(Refused):
    """A producer of the same id with a higher epoch has written since; `Producer-Epoch` names it."""

    code = "stale-producer"
    title = "A newer epoch of this producer exists"
    member_headers = MappingProxyType({"producer_epoch": header.PRODUCER_EPOCH})


class RouteNotFound(NotFound):
    """There is no such route."""

    code = "not-found"
    title = "No such route"


class NoSuchLedger(NotFound):
    """There is no ledger with this id, or it was deleted (`deleted` says which)."""

    code = "no-such-ledger"
    title = "No such ledger"


class NoSuchEntry(NotFound):
    """The ledger is closed and ends before this entry."""

    code = "no-such-entry"
    title = "The ledger ends before this entry"


class NotYetConfirmed(NotFound):
    """The entry is beyond the last add confirmed of a ledger that is not closed: it may come."""

    code = "not-yet-confirmed"
    title = "The entry is not confirmed yet"
    retryable = True


class NoSuchLog(NotFound):
    """There is no log of this name."""

    code = "no-such-log"
    title = "No such log"


class NoSuchBookie(NotFound):
    """No bookie of this name is registered: it never was, or it was decommissioned."""

    code = "no-such-bookie"
    title = "No such bookie"


class NoSuchRepair(NotFound):
    """The queue of repairs has no such item: it was done, or the ledger is gone."""

    code = "no-such-repair"
    title = "No such item in the queue of repairs"


class NoSuchTransaction(NotFound):
    """There is no transaction with this id."""

    code = "no-such-transaction"
    title = "No such transaction"


class MethodNotAllowed(Invalid):
    """The route exists, but not with this method; `Allow` names those that it has."""

    code = "method-not-allowed"
    status = 405
    title = "The route does not have this method"


class NotAcceptable(Invalid):
    """None of the media types in `Accept` is one that the route can answer with."""

    code = "not-acceptable"
    status = 406
    title = "None of the accepted media types is available"


class RequestTimeout(Invalid):
    """The client took too long to send its headers or its body; the connection is closed."""

    code = "request-timeout"
    status = 408
    title = "The request did not arrive in time"
    retryable = True


class TooLarge(Invalid):
    """An entry, a batch or the body is larger than the limit that the detail names."""

    code = "too-large"
    status = 413
    title = "The request is too large"


class UnsupportedMediaType(Invalid):
    """The body's `Content-Type` is not one that the route takes, or the body is compressed."""

    code = "unsupported-media-type"
    status = 415
    title = "The body's media type is not supported"


class HeadersTooLarge(Invalid):
    """The request's line or its headers are larger than the limit."""

    code = "headers-too-large"
    status = 431
    title = "The request's headers are too large"


# --- 409, 410, 412: somebody else decided --------------------------------------------------------


class LedgerClosed(Superseded):
    """The ledger is closed: it takes no more entries, and its end is final (`last_entry`)."""

    code = "ledger-closed"
    title = "The ledger is closed"


class LedgerFenced(Superseded):
    """Somebody recovers the ledger: its writer can't go on. What was in flight may be in it; where
    the recovery ends, that end is the truth.
    """

    code = "ledger-fenced"
    title = "The ledger is fenced"


class LedgerExists(Superseded):
    """There is, or was, a ledger with this id: ids are used once."""

    code = "ledger-exists"
    title = "The ledger's id is taken"


class OwnedByLog(Superseded):
    """The ledger belongs to a log; append, close and delete go through that."""

    code = "owned-by-log"
    title = "The ledger belongs to a log"


class WriterLost(Superseded):
    """The process that could write to this ledger is gone. Recover the ledger to learn its end."""

    code = "writer-lost"
    title = "The ledger's writer is gone"
    outcome = UNKNOWN


class NotTheOwner(WriterLost):
    """The log is not owned by the gateway that was asked for it by another one, or that is about to
    end. Nothing was appended; the next try finds the owner.
    """

    code = "not-the-owner"
    title = "This gateway does not own the log"
    outcome = NOT_DONE
    retryable = True


class EntryConflict(Superseded):
    """Bookies hold other bytes under an entry's id than its writer sent: the handle is over."""

    code = "entry-conflict"
    title = "Other bytes are stored under the entry's id"
    outcome = UNKNOWN


class LogExists(Superseded):
    """There is a log of this name with other settings."""

    code = "log-exists"
    title = "The log exists with other settings"


class LogClosed(Superseded):
    """The log is closed for good."""

    code = "log-closed"
    title = "The log is closed"


class LogFenced(Superseded):
    """Somebody else opened the log for writing since; this writer token is over."""

    code = "log-fenced"
    title = "A newer writer opened the log"


class SequenceGap(Superseded):
    """A request of this producer with a lower sequence number is missing; `Producer-Expected-Seq`
    names it.
    """

    code = "sequence-gap"
    title = "A request of this producer is missing before this one"
    retryable = True
    member_headers = MappingProxyType({"producer_expected_seq": header.PRODUCER_EXPECTED_SEQ})


class ExpiredProducer(Superseded):
    """What was known of this producer, or of this request of it, has expired, so nobody can say whether
    this is a repeat. Nothing was appended now. A new producer says in `Producer-Since` where the log
    ended before its first request.
    """

    code = "expired-producer"
    title = "The producer is no longer known"
    outcome = UNKNOWN


class TransactionCommitted(Superseded):
    """The transaction is committed already."""

    code = "transaction-committed"
    title = "The transaction is committed"


class TransactionAborted(Superseded):
    """The transaction is aborted."""

    code = "transaction-aborted"
    title = "The transaction is aborted"


class OffsetTruncated(Superseded):
    """The offset is below the log's first one: those records were dropped (`first_offset`)."""

    code = "offset-truncated"
    status = 410
    title = "The records at this offset were dropped"


class EntryLost(Superseded):
    """Nobody can serve the entry any more, and an operator has accepted that: it was acknowledged,
    and it never comes back. Reading goes on at the entry `next`; in a log, at `next_offset`.
    """

    code = "entry-lost"
    status = 410
    title = "The entry is lost"


class LossNotProven(Superseded):
    """Entries are given up only where the ledger is CLOSED and all who could hold them answer that
    they do not; `answers` says what each of them answered.
    """

    code = "loss-not-proven"
    title = "It is not proven that the entries are lost"


class VersionConflict(Superseded):
    """The row has another version than `If-Match` says; `current` is the row as it is now."""

    code = "version-conflict"
    status = 412
    title = "The row changed since"


class UnexpectedEntryId(Superseded):
    """The first entry would not get the id that `expect` names; nothing was written. The header
    `Next-Entry-Id` and `next_entry_id` tell the id that the next entry gets.
    """

    code = "unexpected-entry-id"
    status = 412
    title = "The next entry has another id"
    member_headers = MappingProxyType({"next_entry_id": header.NEXT_ENTRY_ID})


class UnexpectedOffset(Superseded):
    """The first record would not get the offset that `expect` names; nothing was written. The
    header `Next-Offset` and `next_offset` tell the offset that the next record gets.
    """

    code = "unexpected-offset"
    status = 412
    title = "The next record has another offset"
    member_headers = MappingProxyType({"next_offset": header.NEXT_OFFSET})


# --- 429, 503, 504: the cluster ------------------------------------------------------------------


class Overloaded(Unavailable):
    """Too much is asked at once; nothing of this request was begun."""

    code = "overloaded"
    status = 429
    title = "Too many requests at once"


class NotEnoughBookies(Unavailable):
    """Fewer bookies live than the ledger's ensemble needs."""

    code = "not-enough-bookies"
    title = "Not enough bookies"


class EntryUnavailable(Unavailable):
    """The entry may be there, but can't be read now; `answers` says what each bookie answered."""

    code = "entry-unavailable"
    title = "The entry can't be read now"


class MetadataUnavailable(Unavailable):
    """The metadata service can't be reached, or its database can't."""

    code = "metadata-unavailable"
    title = "The metadata can't be reached"


class DatabaseWentBack(MetadataUnavailable):
    """The metadata's database lacks a change that it had answered: it was restored from a backup, or
    failed over to a standby that lagged. Nothing is changed or deleted until the right database is
    back, or an operator accepts the loss; reads on which no deletion rests go on. `witnesses` names
    what is missing. See the runbook.
    """

    code = "database-went-back"
    title = "The database lost changes that it had answered"
    retryable = False


class RecoveryBlocked(Unavailable):
    """A recovery can't end because nobody can say whether an entry was acknowledged: too many of
    its bookies do not answer. `bookie` and `entry_id` name where it stands.
    """

    code = "recovery-blocked"
    title = "The ledger's recovery is blocked"


class ReadOnly(Unavailable):
    """Bookies take no new entries now."""

    code = "read-only"
    title = "Bookies are read-only"


class ShuttingDown(ReadOnly):
    """The process that was asked is about to end and takes nothing new: ask another one."""

    code = "shutting-down"
    title = "The process is shutting down"


class QuorumTimeout(QuorumLogError):
    """Too few bookies acknowledged in time. The entries may be there, now or later."""

    code = "quorum-timeout"
    status = 504
    title = "The ack quorum did not answer in time"
    outcome = UNKNOWN


# --- the client's own ----------------------------------------------------------------------------


class ConnectionLost(QuorumLogError, travels=False):
    """No gateway could be reached (not-done), or the connection broke under a request (unknown)."""

    code = "connection-lost"
    title = "The connection to the gateway is lost"
    status = 503
    retryable = True
