"""A network namespace for each service, joined by a bridge, and links that are cut one way.

A cut is silent, as a lost route is: a permanent neighbour entry sends what goes to the other side
to a hardware address that nobody has. Nothing is refused, and nobody is told.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from loadtest.cluster import ServicePlace
from tests.cluster.chaos.machine import call

Link = tuple[str, str]
"""From whom, to whom."""

ROOT: Final = "metadata-1"
"""Stays where we are, with the stores and the clients: what cuts it off cuts those off too."""

_BRIDGE: Final = "ql0"
_NET: Final = "10.77.0"
_NOBODY: Final = "02:00:00:ff:ff:ff"


@dataclass(frozen=True, slots=True)
class _Host:
    name: str
    number: int

    @property
    def address(self) -> str:
        return f"{_NET}.{self.number}"

    @property
    def hardware(self) -> str:
        return f"02:00:00:00:00:{self.number:02x}"

    @property
    def is_root(self) -> bool:
        return self.number == 1


class Network:
    """All hosts, each of which knows how to reach each other."""

    def __init__(self, names: Iterable[str]) -> None:
        """Builds it; `own_network` comes before. Raises: Unusable."""
        others = (name for name in names if name != ROOT)
        self._hosts = {
            name: _Host(name, number) for number, name in enumerate((ROOT, *others), start=1)
        }
        root = self._hosts[ROOT]
        call("ip", "link", "add", _BRIDGE, "address", root.hardware, "type", "bridge")
        call("ip", "address", "add", f"{root.address}/24", "dev", _BRIDGE)
        call("ip", "link", "set", _BRIDGE, "up")
        for host in self._hosts.values():
            if not host.is_root:
                self._add(host)
        self.heal()

    def _add(self, host: _Host) -> None:
        port, inside = f"ql{host.number}", "eth0"
        call("ip", "netns", "add", host.name)
        call(
            *("ip", "link", "add", port, "type", "veth", "peer", "name", inside),
            *("address", host.hardware, "netns", host.name),
        )
        call("ip", "link", "set", port, "master", _BRIDGE, "up")
        for words in (
            f"address add {host.address}/24 dev {inside}",
            f"link set {inside} up",
            "link set lo up",
        ):
            call("ip", "-n", host.name, *words.split())

    @property
    def names(self) -> list[str]:
        """All hosts."""
        return list(self._hosts)

    def places(self) -> dict[str, ServicePlace]:
        """Where the services run."""
        places = {}
        for host in self._hosts.values():
            prefix = () if host.is_root else ("nsenter", f"--net=/run/netns/{host.name}")
            places[host.name] = ServicePlace(host.address, prefix)
        return places

    def cut(self, links: Iterable[Link]) -> None:
        """These links, and no others, are cut from now on."""
        gone = set(links)
        for source in self._hosts.values():
            device = _BRIDGE if source.is_root else "eth0"
            orders = "".join(
                f"neigh replace {target.address} dev {device} nud permanent lladdr"
                f" {_NOBODY if (source.name, target.name) in gone else target.hardware}\n"
                for target in self._hosts.values()
                if target is not source
            )
            where = () if source.is_root else ("-n", source.name)
            call("ip", *where, "-batch", "-", stdin=orders)

    def heal(self) -> None:
        """All links are there."""
        self.cut(())


def one_way(dice: random.Random, names: list[str]) -> set[Link]:
    """One side is heard and hears nothing, or the other way round."""
    few = set(dice.sample(names, dice.randint(1, 2)))
    links = {(a, b) for a in few for b in names if b not in few}
    return links if dice.random() < 0.5 else {(b, a) for a, b in links}


def isolated(dice: random.Random, names: list[str]) -> set[Link]:
    """Some are alone, both ways."""
    few = set(dice.sample(names, dice.randint(1, 2)))
    return _between(few, names)


def halves(dice: random.Random, names: list[str]) -> set[Link]:
    """Two groups that do not hear each other."""
    return _between(set(dice.sample(names, len(names) // 2)), names)


def ring(dice: random.Random, names: list[str]) -> set[Link]:
    """Each sees only its neighbours to both sides; there are majorities, and no two are equal."""
    order = dice.sample(names, len(names))
    near = {frozenset((a, b)) for a, b in zip(order, order[1:] + order[:1], strict=True)}
    return {(a, b) for a in names for b in names if a != b and frozenset((a, b)) not in near}


def bookies_apart(dice: random.Random, names: list[str]) -> set[Link]:
    """Most bookies are away from one gateway: no ack quorum there."""
    gateway = dice.choice([name for name in names if name.startswith("gateway")])
    bookies = [name for name in names if name.startswith("bookie")]
    away = dice.sample(bookies, len(bookies) - 1)
    return {link for name in away for link in ((gateway, name), (name, gateway))}


SHAPES: Final = (one_way, one_way, isolated, halves, ring, bookies_apart)


def _between(some: set[str], names: list[str]) -> set[Link]:
    return {(a, b) for a in names for b in names if (a in some) != (b in some)}
