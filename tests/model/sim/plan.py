"""What a seed draws: the ledger, the work, the speeds and the faults (swarm testing).

Every class of fault is on or off by itself, so that rare combinations are not drowned by common
ones, and all speeds are drawn anew. The faults of a run are a list made up front: a failing seed
is shrunk by dropping from that list. Times are virtual microseconds.
"""

import random
from dataclasses import dataclass, field, replace

from quorumlog.protocol.quorum import Quorum

MS = 1_000
SECOND = 1_000_000

SHAPES = (
    (3, 3, 2),
    (3, 3, 2),
    (3, 3, 2),
    (3, 2, 2),
    (3, 2, 1),
    (3, 3, 1),
    (3, 3, 3),
    (2, 2, 1),
    (2, 2, 2),
    (1, 1, 1),
    (4, 3, 2),
    (4, 2, 2),
    (5, 3, 2),
    (5, 4, 3),
)

FAULT_KINDS = (
    "kill",
    "power-cut",
    "wipe",
    "partition",
    "one-way",
    "clog",
    "pause",
    "slow",
    "full",
    "store-down",
    "lies",
    "corrupt",
    "flip",
    "writer-dies",
    "clock",
)
STORE_BACK = "store-back"
"""The metadata store goes back to an earlier state: in every seed."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: when it begins, how long it lasts and whom it hits (an index, taken modulo)."""

    at: int
    kind: str
    lasts: int
    target: int
    other: int = 0

    def __str__(self) -> str:
        """For the story of a failed seed."""
        return f"{self.at / SECOND:.3f}s {self.kind} #{self.target} for {self.lasts / SECOND:.3f}s"


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a run is made of, apart from the dice thrown on the way (`seed`)."""

    seed: int
    quorum: Quorum
    bookies: int
    appends: tuple[tuple[int, int], ...]
    """(when, how many payloads) of each append."""
    close_at: int | None
    recoveries: tuple[int, ...]
    replaces: tuple[int, ...]
    reads: tuple[int, ...]
    repairs: tuple[int, ...]
    heal_at: int
    loss: float = 0.0
    duplicate: float = 0.0
    late_answers: bool = False
    in_order: bool = True
    delay: tuple[int, int] = (200, 2 * MS)
    straggler: float = 0.0
    """The share of messages that take up to `straggler_max` longer."""
    straggler_max: int = 0
    sync: tuple[int, int] = (100, 3 * MS)
    request_timeout: int = 2 * SECOND
    timers: float = 1.0
    """Factor on the machines' timers: far below 1 they fire before answers can come."""
    store_delay: tuple[int, int] = (500, 5 * MS)
    store_answer_loss: float = 0.0
    max_lost_copies: int = 0
    """How many copies faults may destroy. From an ack quorum on, nothing promises that the ledger
    can be closed or read; but what is acknowledged must not be denied even then.
    """
    read_entries: int = 1000
    """How many entries a recovery asks for at a time."""
    faults: tuple[Fault, ...] = field(default=())
    is_deferred: bool = False
    """Bookies acknowledge entries before they are synced (rule 31)."""

    def without(self, index: int) -> "Plan":
        """The plan without one of its faults."""
        return replace(self, faults=(*self.faults[:index], *self.faults[index + 1 :]))


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    rng = random.Random(f"plan-{seed}")
    quorum = Quorum(*rng.choice(SHAPES))
    is_churning = rng.random() < 0.3  # long writing while bookies come and go: many fragments
    spares = rng.choice((1, 2, 3) if is_churning else (0, 1, 1, 2, 3))
    heal_at = rng.choice((2, 8, 20)) * SECOND
    pace = rng.choice((2 * MS, 40 * MS, 400 * MS) if is_churning else (300, 2 * MS, 40 * MS))
    appends = []
    at = 0
    for _ in range(rng.choice((20, 40) if is_churning else (1, 2, 3, 8, 20))):
        at += rng.randint(0, pace)
        appends.append((at, rng.choice((1, 1, 1, 2, 5))))
    busy = at + SECOND // rng.choice((1, 10, 500))

    def on(share: float) -> bool:
        return rng.random() < share

    recoveries: tuple[int, ...] = ()
    if on(0.55):
        window = rng.choice((busy, busy, heal_at))
        recoveries = tuple(sorted(rng.randint(0, window) for _ in range(rng.choice((1, 1, 2, 3)))))
    always = ("kill", "full") if is_churning else ()
    enabled = [kind for kind in FAULT_KINDS if on(0.3) or kind in always]
    faults: list[Fault] = []
    span = busy if is_churning else rng.choice((busy, heal_at))
    for kind in enabled:
        for _ in range(rng.choice((2, 4, 8) if is_churning else (1, 1, 2, 4))):
            lasts = rng.choice((5 * MS, 100 * MS, SECOND, 5 * SECOND, 30 * SECOND))
            faults.append(
                Fault(rng.randint(0, span), kind, lasts, rng.randint(0, 59), rng.randint(0, 59))
            )
    plan = Plan(
        seed=seed,
        quorum=quorum,
        bookies=quorum.ensemble_size + spares,
        appends=tuple(appends),
        close_at=rng.randint(0, busy * 2) if on(0.4) else None,
        recoveries=recoveries,
        replaces=tuple(rng.randint(0, busy) for _ in range(rng.choice((1, 2)))) if on(0.35) else (),
        reads=tuple(rng.randint(0, heal_at) for _ in range(rng.choice((1, 3)))) if on(0.5) else (),
        repairs=(
            tuple(rng.randint(0, 2 * heal_at) for _ in range(rng.choice((1, 2, 4))))
            if on(0.4)
            else ()
        ),
        heal_at=heal_at,
        loss=rng.choice((0.01, 0.1, 0.3)) if on(0.4) else 0.0,
        duplicate=rng.choice((0.02, 0.2)) if on(0.3) else 0.0,
        late_answers=on(0.5),
        in_order=on(0.6),
        delay=rng.choice(((200, 2 * MS), (50, 60 * MS), (100, 300 * MS))),
        straggler=rng.choice((0.02, 0.2)) if on(0.4) else 0.0,
        straggler_max=rng.choice((100 * MS, 3 * SECOND, 15 * SECOND)),
        sync=rng.choice(((100, 3 * MS), (100, 100 * MS))),
        request_timeout=rng.choice((20 * MS, 300 * MS, 2 * SECOND)),
        timers=rng.choice((1.0, 1.0, 0.05, 0.005)),
        store_delay=rng.choice(((500, 5 * MS), (500, 500 * MS))),
        store_answer_loss=rng.choice((0.2, 0.6)) if on(0.3) else 0.0,
        max_lost_copies=99 if on(0.15) else quorum.ack_quorum - 1,
        read_entries=rng.choice((1, 2, 5, 1000)),
        faults=_in_order([*faults, *_backs(seed, busy, heal_at)]),
        is_deferred=on(0.25),
    )
    return _with_overlapping_repairs(plan, rng) if on(0.03) else plan


def _backs(seed: int, busy: int, heal_at: int) -> list[Fault]:
    """When the metadata store goes back. The dice are its own: all else is as without it."""
    rng = random.Random(f"backs-{seed}")
    span = rng.choice((busy, 2 * busy, heal_at))
    return [
        Fault(
            min(rng.randint(0, span), heal_at - 1),
            STORE_BACK,
            rng.choice((10 * MS, 200 * MS, 2 * SECOND)),
            rng.randint(0, 59),
            rng.randint(0, 59),
        )
        for _ in range(rng.choice((1, 1, 2, 3)))
    ]


def draw_repairs(seed: int) -> Plan:
    """The plan of a seed, with repairs that overlap."""
    return _with_overlapping_repairs(draw(seed), random.Random(f"repairs-{seed}"))


def _with_overlapping_repairs(plan: Plan, rng: random.Random) -> Plan:
    """Many repairs, most of which stand still for a while: members leave a fragment and come back
    at another place while somebody still copies. Copies are damaged where no member counts them yet.
    """
    span = 20 * SECOND
    busy = plan.appends[-1][0]
    repairs = tuple(busy + rng.randint(0, span) for _ in range(16))
    pauses = [
        Fault(at + rng.randint(0, SECOND // 2), "pause", lasts * SECOND, rng.randint(0, 59), 0)
        for at in repairs
        for lasts in rng.choices((5, 30), k=2)
    ]
    # What a target holds of an earlier repair, or of a place that it had, is no proof of a copy.
    damages = [
        Fault(at + rng.randint(0, 4 * SECOND), "damage-target", 0, rng.randint(0, 59), 0)
        for at in rng.sample(repairs, 2)
    ]
    faults = _in_order([*plan.faults, *pauses, *damages])
    return replace(plan, repairs=repairs, faults=faults, heal_at=busy + span)


def draw_moves(seed: int) -> Plan:
    """The plan of a seed in which nothing happens but repairs of a closed ledger: every other one stands still
    between its steps, and bookies come back as later incarnations, so that a place is another's when it goes on.
    """
    rng = random.Random(f"moves-{seed}")
    quorum = Quorum(*rng.choice([shape for shape in SHAPES if shape[0] > shape[1]]))
    repairs, at = [], 2 * SECOND
    for _ in range(24):
        at += rng.randint(20 * MS, 150 * MS)
        repairs.append(at)
    pauses = [
        Fault(at + rng.randint(2 * MS, 25 * MS), "pause", rng.choice((1, 3)) * SECOND, number + 1)
        for number, at in enumerate(repairs)
        if number % 2 == 0
    ]
    cuts = [
        Fault(rng.randint(repairs[0], at), "power-cut", 50 * MS, rng.randint(0, 59))
        for _ in range(8)
    ]
    return Plan(
        seed=seed,
        quorum=quorum,
        bookies=quorum.ensemble_size + 2,
        appends=((MS, 8),),
        close_at=SECOND,
        recoveries=(),
        replaces=(),
        reads=(),
        repairs=tuple(repairs),
        heal_at=12 * SECOND,
        max_lost_copies=quorum.ack_quorum - 1,
        faults=_in_order([*pauses, *cuts]),
        is_deferred=True,
    )


def draw_forks(seed: int) -> Plan:
    """The plan of a seed whose row gets two lines of history: the ensemble changes often, a single bookie hears of the
    last change, and is away while the store goes back and the ledger is closed. Then the store is rebuilt once more.
    """
    rng = random.Random(f"forks-{seed}")
    quorum = Quorum(*rng.choice(((2, 2, 2), (3, 3, 2), (3, 2, 2))))
    bookies = quorum.ensemble_size + 3
    names = rng.sample(range(bookies), bookies)
    writes = [20 * MS * number + rng.randint(0, 20 * MS) for number in range(8)]
    changes = [200 * MS + rng.randint(0, 100 * MS) for _ in range(6)]
    faults = [
        *(Fault(310 * MS, "kill", 60 * MS, name) for name in names[: rng.choice((1, 2, 2, 3))]),
        Fault(345 * MS, "kill", rng.choice((800, 1200)) * MS, names[-1]),
        Fault(350 * MS, STORE_BACK, 5 * MS, 4 * rng.randint(8, 14), 4 * rng.randint(0, 14)),
        Fault(2 * SECOND, STORE_BACK, 5 * MS, 32, 0),
    ]
    return Plan(
        seed=seed,
        quorum=quorum,
        bookies=bookies,
        appends=tuple((at, 1) for at in (*writes, 315 * MS, 325 * MS)),
        close_at=None,
        recoveries=(460 * MS, 600 * MS, 2500 * MS),
        replaces=tuple(changes),
        reads=(),
        repairs=(),
        heal_at=4 * SECOND,
        request_timeout=20 * MS,
        timers=0.02,
        max_lost_copies=quorum.ack_quorum - 1,
        faults=_in_order(faults),
    )


def draw_early(seed: int) -> Plan:
    """The plan of a seed in which the store goes back before the ledger's creation, a disk is lost at that moment, and its
    bookie may register before anybody knows. Another bookie was slow and loses its power, so that one copy is left of
    what was acknowledged last.
    """
    rng = random.Random(f"early-{seed}")
    quorum = Quorum(3, 3, 2)
    # tests/model/sim/restores.py reads these numbers so: all is lost, the operator waits for bookies, one registers early.
    target, other = 4 * rng.randint(2, 7) + 1, rng.choice((1, 3, 17, 19, 33, 35, 49, 51))
    slow = rng.choice([n for n in range(3) if n != (target + 1) % 3])
    faults = [
        Fault(200 * MS, "slow", 200 * MS, slow),
        Fault(345 * MS, "writer-dies", SECOND, 0),
        Fault(349 * MS, "power-cut", 5 * MS, slow),
        Fault(350 * MS, STORE_BACK, rng.choice((20, 40)) * MS, target, other),
    ]
    return Plan(
        seed=seed,
        quorum=quorum,
        bookies=3,
        appends=tuple((20 * MS * n + rng.randint(0, 20 * MS), 1) for n in range(16)),
        close_at=None,
        recoveries=(400 * MS, 500 * MS, 2500 * MS),
        replaces=(),
        reads=(),
        repairs=(),
        heal_at=4 * SECOND,
        request_timeout=20 * MS,
        timers=0.02,
        max_lost_copies=quorum.ack_quorum - 1,
        faults=_in_order(faults),
    )


def _in_order(faults: list[Fault]) -> tuple[Fault, ...]:
    return tuple(sorted(faults, key=lambda fault: (fault.at, fault.kind, fault.target)))
