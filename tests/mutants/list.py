"""The mutants: one for each counterexample and rule whose part stands (reliability 1.3, rules.md)."""

from dataclasses import replace
from typing import Any, Final

from quorumlog.protocol.messages import Status
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.replica import Replica
from quorumlog.protocol.window import Window
from quorumlog.protocol.writer import Writer
from tests.explore.explorer import Scope
from tests.mutants.hunt import Mutant, Patch


def always(value: Any) -> Any:
    """A guard that says the same whatever it is asked."""

    def make(original: Any) -> Any:
        if isinstance(original, property):
            return property(lambda _self: value)
        return lambda *_args, **_kwargs: value

    return make


def unfenced_read(original: Any) -> Any:
    """X1: a recovery read that does not fence."""
    return lambda self, asked: original(self, replace(asked, fence=False))


def kept_acks(original: Any) -> Any:
    """Rule 7: acks of what was replaced are kept."""

    def ask(self: Window, mask: int, *, first: int, is_anew: bool) -> Any:
        del is_anew
        return original(self, mask, first=first, is_anew=False)

    return ask


def one_ack_less(original: Any) -> Any:
    """X14: an entry is confirmed one ack early."""

    def has(self: Quorum, acked: int, first: int, last: int) -> Any:
        less = Quorum(self.ensemble_size, self.write_quorum, max(1, self.ack_quorum - 1))
        return original(less, acked, first, last)

    return has


def forgotten_fence(original: Any) -> Any:
    """I13: the writer takes a fence for a slot that failed, and asks nobody."""

    def failed(self: Writer, position: int, status: Status) -> Any:
        return original(self, position, Status.UNKNOWN if status is Status.FENCED else status)

    return failed


ONE: Final = Scope("one entry, one recoverer")
SPARE: Final = Scope("one entry, a spare, one timeout", recoverers=0, spares=1, timeouts=1)
CRASH: Final = Scope("one entry, one crash with full loss", crashes=1)

MUTANTS: Final = (
    Mutant(
        "recovery reads do not fence", "X1", (Patch(Replica, "_read", unfenced_read),), scope=ONE
    ),
    Mutant(
        "an older incarnation takes normal adds",
        "X3, rule 15",
        (Patch(Replica, "_is_limbo_in_the_way", always(False)),),
        scope=CRASH,
    ),
    Mutant(
        "an older incarnation says no",
        "X4, I27, rule 15",
        (Patch(Replica, "_may_say_no", always(True)),),
        scope=CRASH,
    ),
    Mutant(
        "answers of replaced members count",
        "X7, I18, rule 7",
        (Patch(Writer, "_is_current", always(True)),),
        scope=SPARE,
    ),
    Mutant(
        "acks of replaced members are kept",
        "BK#3005, rule 7",
        (Patch(Window, "ask", kept_acks),),
        scope=SPARE,
    ),
    Mutant(
        "entries are confirmed while a change is under way",
        "X8, X9, I19, rule 6",
        (Patch(Writer, "_uncounted", always(0)),),
        scope=SPARE,
    ),
    Mutant(
        "the fence is not checked on add",
        "X12, I12",
        (Patch(Replica, "_is_fence_in_the_way", always(False)),),
        scope=ONE,
    ),
    Mutant(
        "an ack fewer confirms",
        "X14, I2",
        (Patch(Quorum, "has_ack_quorum", one_ack_less),),
        scope=ONE,
    ),
    Mutant(
        "a fence is told before it is on disk",
        "X20, I13, rule 3",
        (Patch(Replica, "_after_fence", always(0)),),
    ),
    Mutant(
        "an add is ok before it is on disk",
        "rule 3",
        (Patch(Replica, "_after_add", always(0)),),
    ),
    Mutant(
        "a repeated add is ok before it is on disk",
        "rule 3",
        (Patch(Replica, "_after_duplicate", always(0)),),
    ),
)
