"""Bookies of one ensemble are alike where every entry goes to all of them, and so are recoverers.

Worlds that differ only in names are one world: a search keeps the least of them. That the shipped
machines treat bookies alike is not believed but proven after the search (`refuted`): each step that
was taken is taken again under every other naming, and must come to the same.

A naming moves positions and names together, so that the first ensemble stays what it is. How a
machine's state looks under a naming is found by doing again, renamed, what led to it.
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
from tests.explore.parts import DELETION, LedgerParts, Message

_BITS = 16


class Naming:
    """One way to name bookies and recoverers anew."""

    def __init__(
        self, parts: LedgerParts, places: tuple[int, ...], clients: tuple[int, ...]
    ) -> None:
        """The bookie at position p goes to `places[p]`, client c becomes `clients[c]`."""
        self.parts = parts
        self.places = places
        self.clients = clients
        size = len(places)
        self._names = {parts.names[p]: parts.names[place] for p, place in enumerate(places)}
        back = sorted(range(size), key=places.__getitem__)
        self._from = (*back, *range(size, len(parts.names)))
        """By new index of a bookie: the old one. Spares stay."""
        back = sorted(range(len(clients)), key=clients.__getitem__)
        self._client_from = tuple(back)
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
        return tuple(self.member(bookies[old]) for old in self._from[: len(bookies)])

    def row_value(self, row: LedgerMetadata) -> LedgerMetadata:
        return replace(
            row,
            fragments=tuple(replace(f, bookies=self.bookies(f.bookies)) for f in row.fragments),
        )

    def value(self, what: Any) -> Any:
        """An event or effect. Lists that have no order are sorted."""
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
                return Failed(what.code, what.first)  # told to people, in their order
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
            todo = [number]  # a way back may be long
            while todo[-1] in self.parts.made_by and todo[-1] not in self._machines:
                todo.append(self.parts.made_by[todo[-1]][0])
            for one in reversed(todo):
                if one not in self.parts.made_by:
                    self._machines[one] = one  # the beginning: it looks the same to all
                elif one not in self._machines:
                    before, event = self.parts.made_by[one]
                    after, _ = self.parts.step(self._machines[before], self.value(event))
                    self._machines[one] = after
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

    # --- parts of a state ----------------------------------------------------------------------

    def all_machines(self, clients: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.machine(clients[old]) for old in self._client_from)

    def all_bookies(self, bookies: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.bookie(bookies[old]) for old in self._from)

    def flight(self, flight: int) -> int:
        """A mask of messages, sixteen at a time."""
        out, at, known = 0, 0, self._flights
        while flight:
            some = flight & 0xFFFF
            if some:
                key = some << 8 | at
                moved = known.get(key)
                if moved is None:
                    moved = 0
                    for bit in range(_BITS):
                        if some >> bit & 1:
                            moved |= 1 << self.message(at * _BITS + bit)
                    known[key] = moved
                out |= moved
            flight >>= _BITS
            at += 1
        return out


class Symmetry:
    """All namings of a world. The first one changes nothing."""

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
        """The same world under its least naming."""
        first = self._by_clients.get((clients, row))
        if first is None:
            first = self._by_clients[clients, row] = self._least_clients(clients, row)
        clients, row, which = first
        second = self._by_bookies.get((which, bookies))
        if second is None:
            second = self._by_bookies[which, bookies] = self._least_bookies(which, bookies)
        bookies, which = second
        namings = self.namings
        if len(which) == 1:
            index = which[0]
            return clients, bookies, row, namings[index].flight(flight) if index else flight
        return clients, bookies, row, min([namings[index].flight(flight) for index in which])

    def _least_clients(
        self, clients: tuple[int, ...], row: int
    ) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
        found = [(n.all_machines(clients), n.row(row)) for n in self.namings]
        least = min(found)
        return (*least, tuple(i for i, one in enumerate(found) if one == least))

    def _least_bookies(
        self, which: tuple[int, ...], bookies: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        found = [self.namings[index].all_bookies(bookies) for index in which]
        least = min(found)
        return least, tuple(i for i, one in zip(which, found, strict=True) if one == least)

    # --- the proof -----------------------------------------------------------------------------

    def refuted(self) -> str | None:
        """A step that comes to something else under another name, if there is one."""
        if len(self.namings) == 1:
            return None
        return self._steps_differ() or self._answers_differ() or self._namings_differ()

    def _steps_differ(self) -> str | None:
        plain = self.namings[0]
        for (machine, event), (after, effects) in list(self.parts.steps.items()):
            for naming in self.namings[1:]:
                there, told = self.parts.step(naming.machine(machine), naming.value(event))
                if there != naming.machine(after) or _set(naming, effects) != _set(plain, told):
                    return f"{self.parts.machines.values[machine]!r} and {event}"
        return None

    def _answers_differ(self) -> str | None:
        plain = self.namings[0]
        for (bookie, number), (after, event) in list(self.parts.answers.items()):
            for naming in self.namings[1:]:
                there, told = self.parts.answer(naming.bookie(bookie), naming.message(number))
                if there != naming.bookie(after) or naming.value(event) != plain.value(told):
                    return f"bookie and {self.parts.messages.values[number]}"
        for bookie, after in list(self.parts.losses.items()):
            for naming in self.namings[1:]:
                if self.parts.lost(naming.bookie(bookie)) != naming.bookie(after):
                    return "a bookie that lost all"
        for bookie, after in list(self.parts.deletions.items()):
            for naming in self.namings[1:]:
                if self.parts.deleted(naming.bookie(bookie)) != naming.bookie(after):
                    return "a bookie that gave the ledger up"
        return None

    def _namings_differ(self) -> str | None:
        """Namings, one after another, are a naming."""
        by_kind = {(n.places, n.clients): n for n in self.namings}
        for a, b in itertools.product(self.namings, repeat=2):
            places = tuple(b.places[place] for place in a.places)
            both = by_kind[places, tuple(b.clients[client] for client in a.clients)]
            for number in range(len(self.parts.machines.values)):
                if b.machine(a.machine(number)) != both.machine(number):
                    return f"names of machine {number}"
            for number in range(len(self.parts.bookies.values)):
                if b.bookie(a.bookie(number)) != both.bookie(number):
                    return f"names of bookie {number}"
        return None


def _set(naming: Naming, effects: tuple[Effect | Event, ...]) -> frozenset[Any]:
    """Effects of one step have no order."""
    return frozenset(naming.value(effect) for effect in effects)
