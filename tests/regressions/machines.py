"""Plans of machines that found a defect once. They stay, whatever seeds come to mean."""

from typing import Final

from quorumlog.protocol.quorum import Quorum
from tests.sim.plan import Fault, Plan

MACHINES: Final[tuple[tuple[str, Plan], ...]] = (
    (
        "a member left a fragment during its repair and came back at another place, which was given what had been copied for the first one",
        Plan(
            seed=133237,
            quorum=Quorum(ensemble_size=3, write_quorum=2, ack_quorum=2),
            bookies=6,
            appends=(
                (120358, 1),
                (274627, 5),
                (460132, 1),
                (495293, 2),
                (651308, 5),
                (713991, 2),
                (1038902, 1),
                (1420141, 1),
                (1648064, 1),
            ),
            close_at=None,
            recoveries=(),
            replaces=(),
            reads=(),
            repairs=(8932778, 980903, 10183186, 12535880),
            heal_at=8000000,
            loss=0.01,
            duplicate=0.2,
            late_answers=True,
            in_order=True,
            delay=(50, 60000),
            straggler=0.0,
            straggler_max=15000000,
            sync=(100, 100000),
            request_timeout=300000,
            timers=1.0,
            store_delay=(500, 500000),
            store_answer_loss=0.0,
            max_lost_copies=1,
            read_entries=2,
            faults=(
                Fault(at=272140, kind="power-cut", lasts=100000, target=33, other=32),
                Fault(at=713036, kind="clock", lasts=100000, target=11, other=31),
                Fault(at=909724, kind="power-cut", lasts=1000000, target=3, other=15),
                Fault(at=926572, kind="kill", lasts=30000000, target=26, other=57),
                Fault(at=1086546, kind="pause", lasts=30000000, target=3, other=30),
                Fault(at=1521080, kind="power-cut", lasts=100000, target=11, other=41),
                Fault(at=1784655, kind="full", lasts=1000000, target=10, other=23),
                Fault(at=1852686, kind="pause", lasts=30000000, target=32, other=38),
                Fault(at=2475086, kind="corrupt", lasts=5000000, target=54, other=26),
                Fault(at=2692614, kind="wipe", lasts=1000000, target=25, other=1),
                Fault(at=3456632, kind="power-cut", lasts=1000000, target=3, other=32),
                Fault(at=4112314, kind="power-cut", lasts=5000, target=46, other=53),
                Fault(at=6547939, kind="power-cut", lasts=5000000, target=21, other=15),
                Fault(at=6685628, kind="power-cut", lasts=1000000, target=4, other=0),
            ),
            is_deferred=False,
        ),
    ),
)
