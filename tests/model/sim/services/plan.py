"""What a seed of whole services draws: the cluster, its work, speeds and faults."""

import random
from dataclasses import dataclass, replace

from tests.model.sim.plan import MS, SECOND, Fault

SHAPES = ((3, 3, 2), (3, 3, 2), (3, 2, 2), (3, 3, 3), (2, 2, 1), (3, 3, 1), (4, 3, 2))

FAULT_KINDS = (
    "bookie-killed",
    "bookie-power-cut",
    "bookie-wiped",
    "bookie-full",
    "bookie-slow",
    "bookie-drained",
    "damage",
    "gateway-killed",
    "gateway-paused",
    "healer-killed",
    "metadata-down",
    "partition",
    "one-way",
    "clog",
    "lies",
)
"""Of every seed."""
CUT = "metadata-cut"
"""A gateway loses metadata and nothing else; it comes with what that takes (`_with_cuts`)."""

BACK = "database-back"
"""The metadata's database goes back to an earlier state."""
BOTH_LOST = "database-and-disk-lost"
"""The same, two of three times to the empty database, and a bookie loses its disk at the same moment."""
ENDED = "metadata-killed"
"""A metadata process dies, and another one begins."""


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """All that a run is made of, apart from the dice thrown on the way."""

    seed: int
    quorum: tuple[int, int, int]
    bookies: int
    gateways: int
    clients: int
    work: int
    """Things that each client does."""
    heal_at: int
    dead: int
    """Bookies that go for good in the storm; what only they held is lost by design."""
    loss: float
    delay: tuple[int, int]
    straggler: float
    straggler_max: int
    answer_loss: float
    """The share of HTTP answers that get lost, after the work was done."""
    sync: tuple[int, int]
    request_timeout: int
    max_lost_copies: int
    faults: tuple[Fault, ...]
    collect: tuple[float, float] = (3.0, 5.0)
    """How often bookies look for garbage, and what passes between the two looks; seconds."""
    pauses: tuple[float, ...] = (0.001, 0.05, 1.0)
    """Of clients between two things that they do; seconds."""
    is_stubborn: bool = False
    """Clients go on with a ledger until a gateway refuses it: of a deletion by others they hear
    nothing. They also choose ids, those of deleted ledgers among them.
    """
    metadatas: int = 1
    """Processes of the metadata service."""
    stream_s: float = 600.0
    """For how long who follows changes waits for a stream to begin."""

    @property
    def has_restores(self) -> bool:
        """Whether the database goes back. Only then processes exchange witnesses each second:
        elsewhere nothing comes of it, and it would take as much time as all the rest.
        """
        return any(fault.kind in (BACK, BOTH_LOST) for fault in self.faults)


def draw(seed: int) -> ServicePlan:
    """The plan of a seed: the database of each goes back, and takes a bookie's disk along; every third one cuts gateways
    off from metadata, and every fourth one is made for what a database that went back does.
    """
    plan = _drawn(seed)
    rng = random.Random(f"cuts-{seed}")
    plan = _with_cuts(plan, rng) if rng.random() < 0.33 else plan
    rng = random.Random(f"restores-{seed}")
    return (_with_restores if rng.random() < 0.25 else _with_return)(plan, rng)


def draw_restores(seed: int) -> ServicePlan:
    """The plan of a seed that is made for what a database that went back does."""
    return _with_restores(_drawn(seed), random.Random(f"restores-{seed}"))


def _with_return(plan: ServicePlan, rng: random.Random) -> ServicePlan:
    """The metadata's database goes back, whatever else happens."""
    more = [(BOTH_LOST, plan.heal_at // 8, plan.heal_at)]
    more += [(ENDED, 0, plan.heal_at)] * rng.choice((0, 0, 1, 2))
    return _with_faults(replace(plan, metadatas=rng.choice((1, 2))), rng, more)


def _with_faults(
    plan: ServicePlan, rng: random.Random, more: list[tuple[str, int, int]]
) -> ServicePlan:
    """More faults, each of a kind, and between two moments."""
    faults = [
        Fault(
            rng.randint(first, last),
            kind,
            rng.choice((2, 10, 30)) * SECOND,
            rng.randint(0, 59),
            rng.randint(0, 59),
        )
        for kind, first, last in more
    ]
    both = sorted([*plan.faults, *faults], key=lambda f: (f.at, f.kind, f.target))
    return replace(plan, faults=tuple(both))


def _with_cuts(plan: ServicePlan, rng: random.Random) -> ServicePlan:
    """Gateways lose metadata and nothing else, for longer than bookies take to drop what is deleted
    meanwhile (rule 16a); clients come back to ledgers after a while.
    """
    heal_at = max(plan.heal_at, 20 * SECOND)
    cuts = [
        Fault(
            rng.randint(0, heal_at // 2),
            CUT,
            rng.choice((2, 10, 30)) * SECOND,
            rng.randint(0, 59),
            rng.randint(0, 59),
        )
        for _ in range(rng.choice((1, 2, 4)))
    ]
    faults = sorted([*plan.faults, *cuts], key=lambda f: (f.at, f.kind, f.target))
    return replace(
        plan,
        gateways=max(plan.gateways, 2),
        clients=max(plan.clients, 2),
        work=rng.choice((15, 30)),
        heal_at=heal_at,
        faults=tuple(faults),
        collect=rng.choice(((0.3, 0.3), (1.0, 0.5), (3.0, 5.0))),
        pauses=rng.choice(((0.05, 0.5, 2.0), (0.05, 1.0, 5.0))),
        is_stubborn=True,
    )


def _with_restores(plan: ServicePlan, rng: random.Random) -> ServicePlan:
    """The metadata's database goes back (rule 18a), for longer than bookies take to drop what it
    says is garbage; places move before that, and who knows better dies meanwhile.
    """
    heal_at = max(plan.heal_at, 30 * SECOND)
    more = [
        (BOTH_LOST, heal_at // 4, heal_at),
        *((BACK, heal_at // 4, heal_at) for _ in range(rng.choice((0, 1)))),
        *((ENDED, heal_at // 4, heal_at) for _ in range(rng.choice((0, 1, 2)))),
        *(("bookie-drained", 0, heal_at // 2) for _ in range(rng.choice((1, 2)))),
        *(("bookie-killed", 0, heal_at // 2) for _ in range(rng.choice((0, 1)))),
        *(("bookie-killed", heal_at // 4, heal_at) for _ in range(rng.choice((0, 1)))),
        *(("gateway-killed", heal_at // 4, heal_at) for _ in range(rng.choice((0, 1, 2)))),
    ]
    plan = replace(
        plan,
        bookies=max(plan.bookies, plan.quorum[0] + 1 + plan.dead),
        clients=max(plan.clients, 2),
        work=rng.choice((15, 30)),
        heal_at=heal_at,
        metadatas=rng.choice((1, 2)),
        collect=rng.choice(((0.3, 0.3), (1.0, 0.5), (3.0, 5.0))),
        pauses=rng.choice(((0.05, 0.5, 2.0), (0.05, 1.0, 5.0))),
    )
    return _with_faults(plan, rng, more)


def _drawn(seed: int) -> ServicePlan:
    rng = random.Random(f"services-plan-{seed}")
    quorum = rng.choice(SHAPES)

    def on(share: float) -> bool:
        return rng.random() < share

    heal_at = rng.choice((5, 20, 60)) * SECOND
    dead = rng.choice((1, 2)) if on(0.25) else 0
    faults = []
    for kind in FAULT_KINDS:
        if on(0.4):
            for _ in range(rng.choice((1, 1, 2, 4))):
                lasts = rng.choice((50 * MS, SECOND, 5 * SECOND, 30 * SECOND))
                at = rng.randint(0, heal_at)
                faults.append(Fault(at, kind, lasts, rng.randint(0, 59), rng.randint(0, 59)))
    faults.sort(key=lambda fault: (fault.at, fault.kind, fault.target))
    return ServicePlan(
        seed=seed,
        quorum=quorum,
        bookies=quorum[0] + rng.choice((0, 1, 2)) + dead,
        gateways=rng.choice((1, 2, 3)),
        clients=rng.choice((1, 2, 4)),
        work=rng.choice((5, 15)),
        heal_at=heal_at,
        dead=dead,
        loss=rng.choice((0.01, 0.1)) if on(0.4) else 0.0,
        delay=rng.choice(((200, 2 * MS), (100, 60 * MS))),
        straggler=rng.choice((0.02, 0.1)) if on(0.3) else 0.0,
        straggler_max=rng.choice((100 * MS, 3 * SECOND)),
        answer_loss=rng.choice((0.05, 0.3)) if on(0.3) else 0.0,
        sync=rng.choice(((100, 3 * MS), (100, 100 * MS))),
        request_timeout=rng.choice((300 * MS, 2 * SECOND)),
        max_lost_copies=quorum[2] - 1,
        faults=tuple(faults),
        stream_s=15.0,
    )


def draw_losses(seed: int) -> ServicePlan:
    """The plan of a seed in which two copies of an entry may be gone: a bookie dies for good, another
    one's disk is wiped, and writers end while bookies are slow.
    """
    plan = _drawn(seed)
    rng = random.Random(f"losses-{seed}")
    more = [
        Fault(
            rng.randint(0, plan.heal_at),
            kind,
            rng.choice((1, 5)) * SECOND,
            rng.randint(0, 59),
            rng.randint(0, 59),
        )
        for kind in ("bookie-wiped", "bookie-slow", "gateway-killed", "gateway-paused")
    ]
    faults = sorted([*plan.faults, *more], key=lambda f: (f.at, f.kind, f.target))
    quorum = (3, 2, 2)
    return replace(
        plan,
        quorum=quorum,
        bookies=max(plan.bookies, quorum[0] + 1),
        dead=1,
        max_lost_copies=quorum[2] - 1,
        faults=tuple(faults),
    )


def draw_both_lost(seed: int) -> ServicePlan:
    """The plan of a seed in which the database is lost together with a disk. Another bookie is slow and loses its power
    at that moment, so that one copy is left of much that was acknowledged.
    """
    plan = _drawn(seed)
    rng = random.Random(f"both-lost-{seed}")
    at, (slow, wiped) = rng.randint(2, 6) * SECOND, rng.sample(range(3), 2)
    faults = (
        Fault(at - SECOND, "bookie-slow", SECOND, slow, 0),
        Fault(at, "bookie-power-cut", SECOND, slow, 0),
        # The odd target: nobody has the right database. The last number: the database is empty.
        Fault(at, BOTH_LOST, 2 * SECOND, 8 * wiped + 1, rng.choice((1, 2))),
        *(Fault(at, "gateway-killed", SECOND, gateway, 0) for gateway in range(plan.gateways)),
    )
    return replace(
        plan,
        quorum=(3, 3, 2),
        bookies=3,
        clients=4,
        work=30,
        heal_at=20 * SECOND,
        dead=0,
        max_lost_copies=1,
        faults=faults,
        pauses=(0.001, 0.05),
    )
