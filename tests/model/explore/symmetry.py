"""Symmetry reduction: states that differ only in the names of bookies or recoverers count once.

Bookies are interchangeable where the write set is the whole ensemble, and recoverers always are. Of the
states that a renaming maps onto each other, the search keeps the least. The search proves afterwards that
the shipped machines do not tell bookies apart (`counterexample`): it repeats each step under every other
naming, and compares the results.

A naming permutes positions and names together, so that the first ensemble keeps its order of names. The
image of a machine's state under a naming is computed by a replay: the renamed events that led to the state.
"""

import itertools
from dataclasses import replace
from typing import Any

from quorumlog.protocol.ids import member_incarnation, member_name, member_of
from quorumlog.protocol.messages import (
    AddAnswered,
    BookiesFound,
    Closed,
    Effect,
    Event,
    Failed,
    FenceAnswered,
    FindBookies,
    MetadataAnswered,
    ReadAnswered,
    RecoverRequested,
    SendAdd,
    SendFence,
    SendRead,
    UpdateMetadata,
)
from quorumlog.protocol.metadata import LedgerMetadata
from tests.model.explore.parts import DELETION, LedgerParts, Message

_BITS = 16


class Naming:
    """One permutation of bookies and recoverers. Each method returns the image of its argument."""

    def __init__(
        self, parts: LedgerParts, places: tuple[int, ...], clients: tuple[int, ...]
    ) -> None:
        """The bookie at position p moves to position `places[p]`; client c becomes `clients[c]`."""
        self.parts = parts
        self.places = places
        self.clients = clients
        size = len(places)
        self._names = {parts.names[p]: parts.names[place] for p, place in enumerate(places)}
        inverse = sorted(range(size), key=places.__getitem__)
        self._old_indices = (*inverse, *range(size, len(parts.names)))
        """By the new index of a bookie: its old index. Spares keep theirs."""
        self._old_clients = tuple(sorted(range(len(clients)), key=clients.__getitem__))
        self._machines: dict[int, int] = {}
        self._bookies: dict[int, int] = {}
        self._rows: dict[int, int] = {}
        self._messages: dict[int, int] = {}
        self._flights: dict[int, int] = {}

    # --- values ------------------------------------------------------------------------------

    def member(self, member: str) -> str:
        name = member_name(member)
        return member_of(self._names.get(name, name), member_incarnation(member))

    def bookies(self, bookies: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(self.member(bookies[old]) for old in self._old_indices[: len(bookies)])

    def row_value(self, row: LedgerMetadata) -> LedgerMetadata:
        return replace(
            row,
            fragments=tuple(replace(f, bookies=self.bookies(f.bookies)) for f in row.fragments),
        )

    def value(self, what: Any) -> Any:
        """The image of an event or effect. Lists whose order means nothing are sorted."""
        match what:
            case SendAdd(row=LedgerMetadata() as row):
                place = self.places[what.position]
                named = self.row_value(row)
                return replace(what, position=place, member=self.member(what.member), row=named)
            case SendAdd() | SendFence() | SendRead() | AddAnswered() | FenceAnswered():
                place = self.places[what.position]
                return replace(what, position=place, member=self.member(what.member))
            case ReadAnswered():
                place = self.places[what.position]
                return replace(what, position=place, member=self.member(what.member))
            case UpdateMetadata():
                missed = (replace(m, member=self.member(m.member)) for m in what.missed)
                return replace(
                    what,
                    metadata=self.row_value(what.metadata),
                    missed=tuple(sorted(missed, key=lambda m: (m.member, m.first))),
                )
            case MetadataAnswered(metadata=LedgerMetadata() as row):
                return replace(what, metadata=self.row_value(row))
            case Closed(row) | RecoverRequested(row):
                return replace(what, metadata=self.row_value(row))
            case FindBookies():
                return replace(
                    what,
                    ensemble=tuple(sorted(map(self.member, what.ensemble))),
                    exclude=tuple(sorted(map(self.member, what.exclude))),
                )
            case BookiesFound():
                return replace(what, members=tuple(map(self.member, what.members)))
            case Failed():
                return Failed(
                    what.code, what.first
                )  # `detail` is text for people, and lists members in order
            case _:
                return what

    # --- numbers -----------------------------------------------------------------------------

    def row(self, number: int) -> int:
        known = self._rows.get(number)
        if known is None:
            row = self.row_value(self.parts.rows.values[number])
            known = self._rows[number] = self.parts.row(row)
        return known

    def message(self, number: int) -> int:
        known = self._messages.get(number)
        if known is None:
            message: Message = self.parts.messages.values[number]
            known = self._messages[number] = self.parts.message(
                message.kind, self.clients[message.client], self.value(message.what)
            )
        return known

    def machine(self, number: int) -> int:
        known = self._machines.get(number)
        if known is None:
            history = [number]  # a loop, not a recursion: a history may be long
            while history[-1] in self.parts.made_by and history[-1] not in self._machines:
                history.append(self.parts.made_by[history[-1]][0])
            for state in reversed(history):
                if state not in self.parts.made_by:
                    self._machines[state] = state  # an initial state is its own image
                elif state not in self._machines:
                    before, event = self.parts.made_by[state]
                    after, _ = self.parts.step(self._machines[before], self.value(event))
                    self._machines[state] = after
            known = self._machines[number]
        return known

    def bookie(self, number: int) -> int:
        known = self._bookies.get(number)
        if known is None:
            made = self.parts.bookie_made_by.get(number)
            if made is None:
                fresh = self.parts.fresh
                index = fresh.index(number)
                known = fresh[self.places[index]] if index < len(self.places) else number
            elif made[1] is None:
                known = self.parts.lost(self.bookie(made[0]))
            elif made[1] == DELETION:
                known = self.parts.deleted(self.bookie(made[0]))
            else:
                known, _ = self.parts.answer(self.bookie(made[0]), self.message(made[1]))
            self._bookies[number] = known
        return known

    # --- components of a world ----------------------------------------------------------------------

    def all_machines(self, clients: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.machine(clients[old]) for old in self._old_clients)

    def all_bookies(self, bookies: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.bookie(bookies[old]) for old in self._old_indices)

    def flight(self, flight: int) -> int:
        """The image of a mask of messages. Images of 16-bit chunks are cached."""
        image, index, known = 0, 0, self._flights
        while flight:
            chunk = flight & 0xFFFF
            if chunk:
                key = chunk << 8 | index
                moved = known.get(key)
                if moved is None:
                    moved = 0
                    for bit in range(_BITS):
                        if chunk >> bit & 1:
                            moved |= 1 << self.message(index * _BITS + bit)
                    known[key] = moved
                image |= moved
            flight >>= _BITS
            index += 1
        return image


class Symmetry:
    """All namings of a world. The first is the identity."""

    def __init__(self, parts: LedgerParts, *, is_trivial: bool) -> None:
        size, count = parts.scope.shape[0], parts.scope.recoverers
        places = list(itertools.permutations(range(size)))
        recoverers = list(itertools.permutations(range(1, count + 1)))
        if is_trivial:
            places, recoverers = places[:1], recoverers[:1]
        self.parts = parts
        self.namings = [Naming(parts, p, (0, *r)) for p in places for r in recoverers]
        self._by_clients: dict[
            tuple[tuple[int, ...], int], tuple[tuple[int, ...], int, tuple[int, ...]]
        ] = {}
        self._by_bookies: dict[
            tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]
        ] = {}

    def least(
        self, clients: tuple[int, ...], bookies: tuple[int, ...], row: int, flight: int
    ) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
        """The least of the world's images: by machines and row, then by bookies, then by messages."""
        by_clients = self._by_clients.get((clients, row))
        if by_clients is None:
            by_clients = self._by_clients[clients, row] = self._least_clients(clients, row)
        clients, row, tied = by_clients
        by_bookies = self._by_bookies.get((tied, bookies))
        if by_bookies is None:
            by_bookies = self._by_bookies[tied, bookies] = self._least_bookies(tied, bookies)
        bookies, tied = by_bookies
        namings = self.namings
        if len(tied) == 1:
            index = tied[0]
            return clients, bookies, row, namings[index].flight(flight) if index else flight
        return clients, bookies, row, min([namings[index].flight(flight) for index in tied])

    def _least_clients(
        self, clients: tuple[int, ...], row: int
    ) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
        """The least machines and row, and the indices of the namings that lead to them."""
        images = [(n.all_machines(clients), n.row(row)) for n in self.namings]
        least = min(images)
        return (*least, tuple(i for i, image in enumerate(images) if image == least))

    def _least_bookies(
        self, tied: tuple[int, ...], bookies: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The least bookies among the images under the `tied` namings, and the namings still tied."""
        images = [self.namings[index].all_bookies(bookies) for index in tied]
        least = min(images)
        return least, tuple(i for i, image in zip(tied, images, strict=True) if image == least)

    # --- the proof -----------------------------------------------------------------------------

    def counterexample(self) -> str | None:
        """A step whose result depends on names, or None: the machines are symmetric."""
        if len(self.namings) == 1:
            return None
        return self._asymmetric_step() or self._asymmetric_answer() or self._broken_composition()

    def _asymmetric_step(self) -> str | None:
        identity = self.namings[0]
        for (machine, event), (after, effects) in list(self.parts.steps.items()):
            for naming in self.namings[1:]:
                renamed, reported = self.parts.step(naming.machine(machine), naming.value(event))
                if renamed != naming.machine(after) or _set(naming, effects) != _set(
                    identity, reported
                ):
                    return f"{self.parts.machines.values[machine]!r} and {event}"
        return None

    def _asymmetric_answer(self) -> str | None:
        identity = self.namings[0]
        for (bookie, number), (after, event) in list(self.parts.answers.items()):
            for naming in self.namings[1:]:
                renamed, reported = self.parts.answer(naming.bookie(bookie), naming.message(number))
                if renamed != naming.bookie(after) or naming.value(event) != identity.value(
                    reported
                ):
                    return f"bookie and {self.parts.messages.values[number]}"
        for bookie, after in list(self.parts.losses.items()):
            for naming in self.namings[1:]:
                if self.parts.lost(naming.bookie(bookie)) != naming.bookie(after):
                    return "a bookie that lost all"
        for bookie, after in list(self.parts.deletions.items()):
            for naming in self.namings[1:]:
                if self.parts.deleted(naming.bookie(bookie)) != naming.bookie(after):
                    return "a bookie that dropped the ledger"
        return None

    def _broken_composition(self) -> str | None:
        """A number whose image under two namings in turn is not that of their composition."""
        by_kind = {(n.places, n.clients): n for n in self.namings}
        for a, b in itertools.product(self.namings, repeat=2):
            places = tuple(b.places[place] for place in a.places)
            both = by_kind[places, tuple(b.clients[client] for client in a.clients)]
            for number in range(len(self.parts.machines.values)):
                if b.machine(a.machine(number)) != both.machine(number):
                    return f"the images of machine {number}"
            for number in range(len(self.parts.bookies.values)):
                if b.bookie(a.bookie(number)) != both.bookie(number):
                    return f"the images of bookie {number}"
        return None


def _set(naming: Naming, effects: tuple[Effect | Event, ...]) -> frozenset[Any]:
    """The images of effects, as a set: effects of one step have no order."""
    return frozenset(naming.value(effect) for effect in effects)
