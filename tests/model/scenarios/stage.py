"""A stage on which a scenario is played: machines, bookies and metadata, moved by hand.

Nothing moves unless the script says so: requests wait until a bookie answers, fails or loses them.
Bookies are the replica that ships; they sync at once, but for those that the script gives a disk.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from quorumlog.protocol import loss
from quorumlog.protocol.ids import member_incarnation, member_name
from quorumlog.protocol.messages import (
    AddAnswered,
    AppendRequested,
    Begin,
    BookiesFound,
    CasStatus,
    Closed,
    CloseRequested,
    Confirmed,
    Effect,
    EntriesRead,
    Event,
    Failed,
    FenceAnswered,
    FindBookies,
    MetadataAnswered,
    MissedRange,
    ReadAnswered,
    ReadMetadata,
    RecoverRequested,
    RecoveryNeeded,
    Repaired,
    ReplaceRequested,
    RowAnswered,
    SendAdd,
    SendFence,
    SendRead,
    SendRow,
    StartTimer,
    Status,
    Timer,
    TimerFired,
    UpdateMetadata,
)
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata, State
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.ranges import Ranges, ranges_of
from quorumlog.protocol.reader import RangeReader
from quorumlog.protocol.record import Codec
from quorumlog.protocol.recovery import Recovery
from quorumlog.protocol.repair import FragmentRepair
from quorumlog.protocol.writer import LedgerWriter
from tests.model.explore.bookies import ModelBookie
from tests.model.scenarios.disks import DiskBookie
from tests.support.replicas import HeldEntries

Request = SendAdd | SendFence | SendRead | SendRow
CODEC = Codec(DigestKind.CRC32C)


class Wrong(Exception):
    """A line of a script that cannot be played."""


@dataclass
class Actor:
    """One machine, and what it asked for that was not answered."""

    name: str
    machine: Any
    requests: list[Request] = field(default_factory=list)
    metadata: list[UpdateMetadata | ReadMetadata] = field(default_factory=list)
    finds: list[FindBookies] = field(default_factory=list)
    timers: dict[Timer, int] = field(default_factory=dict)


class Stage:
    """Plays one line of a script at a time; see the patterns at the end of this class."""

    def __init__(self) -> None:
        self.bookies: dict[str, ModelBookie] = {}
        self.actors: dict[str, Actor] = {}
        self.row: LedgerMetadata | None = None
        self.is_deleted = False
        """There is a tombstone in the row's place."""
        self.said: list[str] = []
        self.missed: list[MissedRange] = []
        self.held: dict[tuple[str, str], list[Event]] = {}

    def play(self, line: str) -> list[str]:
        """What comes of one line."""
        self.said = []
        for pattern, action in self.PATTERNS:
            found = re.fullmatch(pattern, line)
            if found:
                action(self, *found.groups())
                return self.said
        raise Wrong(f"nobody knows how to play: {line}")

    # --- the script's verbs --------------------------------------------------------------------

    def ledger(self, e: str, qw: str, qa: str, fragments: str, key: str | None) -> None:
        """Another one with the same id, where there was one: its bookies know the first one."""
        made = []
        for part in fragments.split():
            first, members = part.split(":")
            made.append(Fragment(int(first), tuple(map(self.member, members.split(",")))))
        self.row = LedgerMetadata(
            ledger_id=1,
            quorum=Quorum(int(e), int(qw), int(qa)),
            digest=DigestKind.CRC32C,
            fragments=tuple(made),
            ledger_key=(key or "key").encode(),
        )
        self.row.check()
        self.actors["W"] = Actor("W", LedgerWriter(self.row, CODEC))

    def append(self, name: str, words: str) -> None:
        many = re.fullmatch(r"(\d+) entries", words)
        payloads = [b"x"] * int(many[1]) if many else [word.encode() for word in words.split()]
        self.step(self.actors[name], AppendRequested(tuple(payloads)))

    def close(self, name: str) -> None:
        self.step(self.actors[name], CloseRequested())

    def asked_to_replace(self, name: str, member: str) -> None:
        self.step(self.actors[name], ReplaceRequested(self.member(member)))

    def recover(self, name: str, lost: str | None) -> None:
        declared = tuple(map(self.member, (lost or "").split()))
        actor = self.actors[name] = Actor(name, Recovery(declare_lost=declared))
        self.step(actor, RecoverRequested(self.known()))

    def read(self, name: str, first: str, last: str) -> None:
        reader = RangeReader(self.known(), first=int(first), last=int(last))
        self.actors[name] = Actor(name, reader)
        self.step(self.actors[name], Begin())

    def repair(self, name: str, fragment: str, leaving: str, target: str) -> None:
        row, member = self.known(), self.member(target)
        held: Ranges = ()
        if member != self.member(leaving) and member in row.all_members:
            # As a worker asks, so that it goes on where an earlier one ended.
            holdings = self.holdings(member_name(member))
            held = holdings.present(0, holdings.highest)
        machine = FragmentRepair(
            row,
            fragment=int(fragment),
            leaving=self.member(leaving),
            target=member,
            held=held,
        )
        self.actors[name] = Actor(name, machine)
        self.step(self.actors[name], Begin())

    def answer(self, names: str, client: str) -> None:
        for name in names.split():
            actor, request = self.take(name, client)
            self.said.append(f"{name} <- {client}: {reported(request)}")
            event = self.bookies[name].answer(request)
            self.step(actor, event)

    def misdirected(self, name: str, client: str, other: str) -> None:
        """What is asked of one bookie reaches another one, which answers."""
        actor, request = self.take(other, client)
        self.said.append(f"{name} <- {client}, for {other}: {reported(request)}")
        self.step(actor, self.bookies[name].answer(request))

    def late(self, name: str, client: str) -> None:
        """The bookie does what is asked; its answer is on the way."""
        _, request = self.take(name, client)
        self.held.setdefault((name, client), []).append(self.bookies[name].answer(request))

    def arrives(self, name: str, client: str) -> None:
        self.step(self.actors[client], self.held[name, client].pop(0))

    def fail(self, names: str, client: str) -> None:
        for name in names.split():
            actor, request = self.take(name, client)
            self.step(actor, unknown(request))

    def breaks(self, name: str, client: str) -> None:
        """What was done there is not told: its answers on the way are lost."""
        for event in self.held.pop((name, client)):
            assert isinstance(event, AddAnswered)
            self.step(self.actors[client], replace(event, status=Status.UNKNOWN))

    def lose(self, names: str, client: str) -> None:
        for name in names.split():
            self.take(name, client)

    def metadata(self, client: str) -> None:
        actor = self.actors[client]
        self.step(actor, self.at_metadata(actor.metadata.pop(0)))

    def metadata_away(self, client: str) -> None:
        actor = self.actors[client]
        effect = actor.metadata.pop(0)
        self.step(actor, MetadataAnswered(effect.attempt, CasStatus.UNKNOWN))

    def found(self, client: str, names: str) -> None:
        actor = self.actors[client]
        find = actor.finds.pop(0)
        members = tuple(map(self.member, [n for n in names.split() if n != "none"]))
        free = tuple(member for member in members if member not in find.exclude)
        self.step(actor, BookiesFound(find.attempt, free))

    def timer(self, client: str, name: str) -> None:
        actor, timer = self.actors[client], Timer(name)
        if timer not in actor.timers:
            raise Wrong(f"{client} has not started that timer")
        self.step(actor, TimerFired(timer, actor.timers.pop(timer)))

    def settle(self, client: str) -> None:
        """All bookies and metadata answer until nothing is asked any more."""
        actor = self.actors[client]
        for _ in range(10_000):
            if actor.requests:
                request = actor.requests.pop(0)
                self.step(actor, self.bookies[member_name(request.member)].answer(request))
            elif actor.metadata:
                self.step(actor, self.at_metadata(actor.metadata.pop(0)))
            else:
                break
        self.said = [line for line in self.said if " -> b" not in line]

    def loses_entry(self, name: str, entry_id: str) -> None:
        del self.holdings(name).entries[int(entry_id)]

    def damages_entry(self, name: str, entry_id: str) -> None:
        entries = self.holdings(name).entries
        entries[int(entry_id)] = replace(entries[int(entry_id)], payload=b"damaged")

    def loses_disk(self, name: str) -> None:
        self.bookies[name].lose_all()

    def defers(self, names: str) -> None:
        for name in names.split():
            self.bookies[name] = DiskBookie(name, is_deferred=True)

    def may_lose_power(self, names: str) -> None:
        for name in names.split():
            self.bookies[name] = DiskBookie(name, is_deferred=False)

    def syncs(self, names: str) -> None:
        for name in names.split():
            self.disk(name).sync()

    def takes(self, name: str, client: str) -> None:
        """The bookie has an add in its memory; the client still waits."""
        actor, request = self.take(name, client)
        assert isinstance(request, SendAdd)
        actor.requests.append(request)
        self.disk(name).take(request)

    def loses_power(self, names: str) -> None:
        for name in names.split():
            self.said.append(self.disk(name).lose_power(self.known()))

    def drops_copy(self, name: str) -> None:
        self.said.append(self.disk(name).drop_copy())

    def deletes(self) -> None:
        self.is_deleted = True

    def drops_deleted(self, names: str) -> None:
        if not self.is_deleted:
            raise Wrong("there is no tombstone")
        for name in names.split():
            self.bookies[name].delete()

    def ends_limbo(self, name: str) -> None:
        self.said.append(self.disk(name).end_limbo(self.known()))

    def gives_up(self, first: str, last: str, silent: str | None, gone: str | None) -> None:
        """An operator asks that these entries are lost; all who could have them are asked."""
        row, ids = self.known(), range(int(first), int(last) + 1)
        reported = {
            member: None
            if member_name(member) in (silent or "").split()
            else loss.Holding(self.holdings(member_name(member)).present(ids[0], ids[-1]), ())
            for entry_id in ids
            for member in loss.holders(row, entry_id)
        }
        declared = tuple(map(self.member, (gone or "").split()))
        found = list(loss.answers(row, ids, reported))
        self.said.extend(str(answers) for answers in found)
        if not all(answers.is_lost(declared) for answers in found):
            self.said.append("refused, loss-not-proven")
            return
        self.row = replace(row.given_up(ids[0], ids[-1], declared), version=row.version + 1)
        self.row.check()
        self.said.append(f"metadata: {row_text(self.row)}")

    def show(self) -> None:
        row = self.known()
        self.said.append(f"metadata: {'deleted' if self.is_deleted else row_text(row)}")
        for name, bookie in sorted(self.bookies.items()):
            if bookie.replica.is_deleted:
                self.said.append(f"{short(bookie.replica.me)}: deleted")
                continue
            held = ranges_text(ranges_of(sorted(self.holdings(name).entries))) or "nothing"
            fenced = ", fenced" if bookie.replica.is_fenced else ""
            self.said.append(
                f"{short(bookie.replica.me)}: {held}, lac {bookie.replica.last_add_confirmed}{fenced}"
            )
        if self.missed:
            self.said.append(f"repair queue: {missed_text(self.missed)}")

    # --- the world -----------------------------------------------------------------------------

    def known(self) -> LedgerMetadata:
        if self.row is None:
            raise Wrong("the script begins with a ledger")
        return self.row

    def member(self, name: str) -> str:
        member = name if "@" in name else f"{name}@1"
        self.bookies.setdefault(member_name(member), ModelBookie.new(member_name(member)))
        return member

    def holdings(self, name: str) -> HeldEntries:
        holdings = self.bookies[name].replica.holdings
        assert isinstance(holdings, HeldEntries)
        return holdings

    def disk(self, name: str) -> DiskBookie:
        bookie = self.bookies[name]
        if not isinstance(bookie, DiskBookie):
            raise Wrong(f"{name} syncs at once")
        return bookie

    def take(self, name: str, client: str) -> tuple[Actor, Request]:
        actor = self.actors[client]
        for request in actor.requests:
            if member_name(request.member) == name:
                actor.requests.remove(request)
                return actor, request
        raise Wrong(f"{client} asks nothing of {name}")

    def at_metadata(self, effect: UpdateMetadata | ReadMetadata) -> Event:
        row = self.known()
        if self.is_deleted:
            self.said.append("metadata: deleted")
            return MetadataAnswered(effect.attempt, CasStatus.MISSING)
        if isinstance(effect, ReadMetadata):
            return MetadataAnswered(effect.attempt, CasStatus.OK, row)
        if effect.metadata.version != row.version:
            self.said.append(f"metadata: conflict, it is {row_text(row)}")
            return MetadataAnswered(effect.attempt, CasStatus.CONFLICT, row)
        self.row = replace(effect.metadata, version=row.version + 1)
        self.row.check()
        self.missed.extend(effect.missed)
        self.said.append(f"metadata: {row_text(self.row)}")
        return MetadataAnswered(effect.attempt, CasStatus.OK, self.row)

    def step(self, actor: Actor, event: Event) -> None:
        effects = actor.machine.step(event)
        actor.machine.check()
        for effect in effects:
            self.perform(actor, effect)
        self.said.extend(sends_text(actor.name, effects))

    def perform(self, actor: Actor, effect: Effect) -> None:
        name = actor.name
        match effect:
            case SendAdd() | SendFence() | SendRead() | SendRow():
                actor.requests.append(effect)
            case UpdateMetadata(_, row, missed):
                actor.metadata.append(effect)
                also = f"; missed: {missed_text(missed)}" if missed else ""
                self.said.append(f"{name} -> metadata: {row_text(row)}{also}")
            case ReadMetadata():
                actor.metadata.append(effect)
                self.said.append(f"{name} -> metadata: read")
            case FindBookies(_, _, exclude):
                actor.finds.append(effect)
                besides = f", not {' '.join(map(short, exclude))}" if exclude else ""
                self.said.append(f"{name} looks for bookies{besides}")
            case StartTimer(timer, tag):
                actor.timers[timer] = tag
            case Confirmed(first, last):
                self.said.append(f"{name}: confirmed {range_text(first, last)}")
            case Failed():
                parts = [effect.code]
                if effect.first is not None:
                    parts.append(f"from {effect.first}")
                if effect.bookie is not None:
                    parts.append(f"at {short(effect.bookie)}")
                if effect.entry_id is not None:
                    parts.append(f"entry {effect.entry_id}")
                if effect.detail:
                    parts.append(f"({effect.detail.replace('@1', '')})")
                self.said.append(f"{name}: failed, {' '.join(parts)}")
            case Closed(row) | Repaired(row):
                self.said.append(f"{name}: {type(effect).__name__.lower()}, {row_text(row)}")
            case RecoveryNeeded():
                self.said.append(f"{name}: the ledger is to be recovered")
            case EntriesRead(run, is_last):
                payloads = [bytes(run.payload(index)) for index in range(run.count)]
                words = (
                    f"{run.count} entries"
                    if run.count > 4
                    else " ".join(payload.decode() for payload in payloads)
                )
                end = ", the end" if is_last else ""
                self.said.append(f"{name}: read {range_text(run.first, run.last)} {words}{end}")

    PATTERNS: tuple[tuple[str, Callable[..., None]], ...] = (
        (r"ledger E=(\d+) Qw=(\d+) Qa=(\d+) on (.+?)(?:, key (\w+))?", ledger),
        (r"(\w+) appends (.+)", append),
        (r"(\w+) closes", close),
        (r"(\w+) is asked to replace (\S+)", asked_to_replace),
        (r"(\w+) recovers(?:, lost: (.+))?", recover),
        (r"(\w+) reads (\d+)\.\.(\d+)", read),
        (r"(\w+) repairs fragment (\d+), (\S+) by (\S+)", repair),
        (r"((?:b\d+ ?)+) answers? (\w+)", answer),
        (r"(b\d+) does it, its answer to (\w+) is late", late),
        (r"the late answer of (b\d+) reaches (\w+)", arrives),
        (r"((?:b\d+ ?)+) fails? for (\w+)", fail),
        (r"(b\d+)'s connection to (\w+) breaks", breaks),
        (r"((?:b\d+ ?)+) never hears? (\w+)", lose),
        (r"metadata answers (\w+)", metadata),
        (r"metadata is away for (\w+)", metadata_away),
        (r"(\w+) finds (.+)", found),
        (r"(\w+)'s (\w+) timer fires", timer),
        (r"all answer (\w+)", settle),
        (r"(b\d+) loses entry (\d+)", loses_entry),
        (r"(b\d+) damages entry (\d+)", damages_entry),
        (r"(b\d+) loses its disk", loses_disk),
        (r"((?:b\d+ ?)+) defers? syncs", defers),
        (r"((?:b\d+ ?)+) may lose power", may_lose_power),
        (r"(b\d+) takes what (\w+) asks, and says nothing", takes),
        (r"(b\d+) drops its copy, and keeps a stub", drops_copy),
        (r"the ledger is deleted", deletes),
        (r"((?:b\d+ ?)+) drops? the deleted ledger", drops_deleted),
        (r"(b\d+) answers (\w+) in place of (b\d+)", misdirected),
        (r"((?:b\d+ ?)+) syncs?", syncs),
        (r"((?:b\d+ ?)+) loses? power", loses_power),
        (r"(b\d+) looks whether its limbo ends", ends_limbo),
        (
            r"the operator gives up (\d+)\.\.(\d+)(?:, silent: ((?:b\d+ ?)+))?(?:, gone: (.+))?",
            gives_up,
        ),
        (r"show", show),
    )


# --- words -----------------------------------------------------------------------------------------


def short(member: str) -> str:
    """A member's name; the first incarnation goes without saying."""
    return member if member_incarnation(member) > 1 else member_name(member)


def range_text(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}..{last}"


def ranges_text(ranges: Iterable[tuple[int, int]]) -> str:
    return ",".join(range_text(*pair) for pair in ranges)


def missed_text(missed: Iterable[MissedRange]) -> str:
    return " ".join(f"{short(m.member)} {range_text(m.first, m.last)}" for m in missed)


def row_text(row: LedgerMetadata) -> str:
    fragments = " ".join(
        f"{f.first_entry}:{','.join(map(short, f.bookies))}" for f in row.fragments
    )
    words = [f"v{row.version}", row.state.value]
    if row.state is State.CLOSED:
        words.append(f"at {row.last_entry} with {row.length} bytes")
    words.append(fragments)
    for repair in row.repairs:
        kind = "kept" if repair in row.placed_repairs else "repair"
        words.append(f"{kind} {repair.first_entry}:{short(repair.leaving)}>{short(repair.target)}")
    if row.declared_lost:
        words.append(f"lost {','.join(map(short, row.declared_lost))}")
    if row.lost_entries:
        words.append(f"lost entries {ranges_text(row.lost_entries)}")
    if row.may_lack_entries:
        words.append("may lack entries")
    return " ".join(words)


def reported(request: Request) -> str:
    match request:
        case SendAdd():
            verb = "write back" if request.recovery else "add"
            return f"{verb} {ranges_text(ranges_of(request.run.ids))}"
        case SendFence():
            return "fence"
        case SendRead():
            verb = "fencing read" if request.fence else "read"
            if request.from_disk:
                verb = "read back"
            return f"{verb} {range_text(request.first, request.last)}"
        case SendRow(_, row):
            return f"keep row v{row.version}"


def sends_text(name: str, effects: list[Effect]) -> list[str]:
    """One line for all bookies that are asked the same."""
    lines: dict[str, list[str]] = {}
    for effect in effects:
        if isinstance(effect, SendAdd | SendFence | SendRead | SendRow):
            lines.setdefault(reported(effect), []).append(short(effect.member))
    return [f"{name} -> {' '.join(members)}: {what}" for what, members in lines.items()]


def unknown(request: Request) -> Event:
    match request:
        case SendAdd(position, member, generation, run):
            return AddAnswered(position, member, generation, run.first, run.last, Status.UNKNOWN)
        case SendFence(position, member):
            return FenceAnswered(position, member, Status.UNKNOWN)
        case SendRead(position, member, _, first, last):
            return ReadAnswered(position, member, first, last, Status.UNKNOWN)
        case SendRow(member, row):
            return RowAnswered(member, row.version, Status.UNKNOWN)
