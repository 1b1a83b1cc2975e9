"""Find the ranks that hold up a stuck job, from the collectives that ranks wait in. Pure.

The rule (Kokolis, Kuchnik et al., HPCA 2025, arXiv 2410.21680, section on NCCL time-outs): in each group, find the
first collective that some ranks entered and others did not. A rank that misses it may itself be waiting in a collective
of another group. So each rank's first pending operation points at the ranks that are missing from it, and a suspect is
a rank that misses an operation and points at no rank. If all programs enter their collectives in consistent orders, no
rank can wait for itself: along the arrows the operations come earlier and earlier in that order. Sends and receives are
entered early and out of order; where only they close a ring, the collective that a rank misses counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

from healthd.fleet.collectives.dump import MOST_RANKS
from healthd.fleet.collectives.rank_view import Lane, Operation, Pair, View

OF_ANOTHER_RUN_SECONDS = 3600  # this long before all others: PyTorch's longest usual time-out is half of it
BEGUN_ANEW_SECONDS = 60
MOST_WITHOUT = 3  # ratio of ranks without a dump to ranks with one, from which dumps were not collected
# In these not every rank needs all others: one may finish before others arrive.
_ONE_SIDED = ("broadcast", "reduce", "scatter", "gather")
_SAME_SIZES = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "reducescatter", "broadcast")


class Group(NamedTuple):
    """A process group. ranks: its known global ranks, in the order of their group ranks if `has_rank_order`."""

    name: str
    description: str
    ranks: tuple[int, ...]
    told: bool = True


class Place(NamedTuple):
    """A collective of a group, or a send or receive from source to target (global ranks; else -1)."""

    group: int
    sequence: int
    source: int = -1
    target: int = -1

    @property
    def between(self) -> tuple[int, int, int]:
        return self.group, self.source, self.target


@dataclass(slots=True)
class Stall:
    """A pending operation, and the state of its group's ranks.

    operation                   as recorded by one of the ranks
    waiting                     ranks whose first pending operation this is
    entered, missing, finished  ranks that entered it, never arrived, finished it
    later                       ranks that entered it and still wait in an earlier one
    unknown                     ranks without a record
    behind                      ranks whose program entered it as their first pending operation, but whose GPU has not
                                reached it, unlike other GPUs: it is still in an earlier kernel
    """

    place: Place
    operation: Operation
    waiting: list[int] = field(default_factory=list)
    entered: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    later: list[int] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)

    @property
    def stuck(self) -> bool:
        """True if all ranks arrived and some finished: no rank holds up the others.

        In a rooted operation a rank that waits for the root's data only may finish before others arrive.
        """
        return not self.missing and bool(self.left) and (not self.later or not one_sided(self.operation.name))

    @property
    def points_at(self) -> list[int]:
        """Ranks that the waiting ranks wait for."""
        return self.missing or ([] if self.stuck else self.later or self.behind)

    @property
    def lost(self) -> bool:
        """True if all ranks entered it as their first pending operation, and none finished."""
        return not (self.missing or self.left or self.later or self.unknown or self.behind)


class Blame(NamedTuple):
    """Reason to suspect a rank.

    missing  it never entered `key`
    stayed   it did not leave `key`, which all entered and others left
    behind   it entered `key`, but its GPU did not reach it
    no_dump  it wrote no dump, and the ranks in `key` wait for it or for no rank

    operation, waiting: the operation, and the ranks that entered it; empty for `stayed`.
    """

    rank: int
    why: str
    place: Place
    operation: str = ""
    waiting: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Difference:
    """Ranks with different collectives under one number. descriptions: description -> its ranks."""

    place: Place
    said: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Judgement:
    """Result of the analysis.

    kind                missing, network, mismatch, none
    suspects            sorted by rank
    stalls              the first of each group, that of the cause first
    ranks_without_view  known ranks without a record
    unused_dumps        rank -> why its dump was not used
    ring                ranks that wait for each other
    blocked_ranks       number of ranks that wait for a suspect, directly or indirectly
    """

    kind: str
    suspects: tuple[Blame, ...]
    groups: tuple[Group, ...]
    stalls: tuple[Stall, ...]
    difference: Difference | None
    unseen: tuple[int, ...]
    aside: Mapping[int, str]
    ring: tuple[int, ...]
    held_up: int


def one_sided(name: str) -> bool:
    name = name.lower().lstrip("_")
    return name.startswith(_ONE_SIDED) and not name.startswith(("reduce_scatter", "reducescatter"))


def judge(views: Iterable[View]) -> Judgement:
    """Judge views, one per rank."""
    return _World({view.rank: view for view in views}).judged()


class _World:
    """The views together: groups, stalls and who waits for whom."""

    def __init__(self, views: dict[int, View]) -> None:
        self.aside = _of_other_times(views)
        self.views = {rank: view for rank, view in sorted(views.items()) if rank not in self.aside}
        self.groups: list[Group] = []
        self.group_of: dict[tuple[int, str], int] = {}  # (rank, name) -> index in groups
        self._find_groups()
        self._find_gaps()
        self.lanes: list[dict[int, Lane]] = [{} for _ in self.groups]
        self._find_lanes()
        known = {rank for group in self.groups for rank in group.ranks} | set(views)
        self.unseen = tuple(sorted(known - set(self.views)))
        self.places: dict[Place, Stall] = {}  # of collectives
        self.stalls: list[Stall] = []
        self.aligned: dict[tuple[str, int, int], bool] = {}
        self.first: dict[int, Stall | None] = {}

    # --- groups and lanes

    def _find_groups(self) -> None:
        """Collect the groups. Groups of one name with different ranks are different (split_group reuses names)."""
        places: dict[tuple[str, tuple[int, ...] | None], int] = {}
        seen: dict[tuple[str, tuple[int, ...] | None], set[int]] = defaultdict(set)
        for rank, view in self.views.items():
            for name, group in view.groups.items():
                ranks = group.ranks if group.ranks and rank in group.ranks else None
                key = name, ranks
                if key not in places:
                    places[key] = len(self.groups)
                    self.groups.append(Group(name, group.description, ranks or (), ranks is not None))
                self.group_of[rank, name] = places[key]
                seen[key].add(rank)
        for key, place in places.items():
            if not self.groups[place].told:
                self.groups[place] = self.groups[place]._replace(ranks=tuple(sorted(seen[key])))

    def _find_gaps(self) -> None:
        """If no rank records group members, add missing rank numbers to the groups that contain all others.

        Ranks are counted from 0.
        """
        highest = max(self.views, default=-1)
        if any(group.told for group in self.groups) or highest >= MOST_RANKS:
            return
        gaps = set(range(highest + 1)).difference(self.views)
        for place, group in enumerate(self.groups):
            if gaps and len(group.ranks) == len(self.views):
                self.groups[place] = group._replace(ranks=tuple(sorted(gaps.union(group.ranks))))

    def _find_lanes(self) -> None:
        """Collect the lanes. A group's progress replaces a missing lane, unless the group also sends (ambiguous)."""
        with_pairs = {self.group_of[rank, name] for rank, view in self.views.items() for name in view.with_pairs}
        for rank, view in self.views.items():
            for name in view.groups:
                group = self.group_of[rank, name]
                lane, last = view.lanes.get(name), view.progress.get(name)
                if lane is None and last is not None and group not in with_pairs:
                    after = last.done + 1
                    first = Operation(after, -1, "", started=last.started >= after) if after <= last.entered else None
                    lane = Lane(last.entered, first)
                if lane is not None:
                    self.lanes[group][rank] = lane

    # --- state of the ranks

    def stall(self, group: int, operation: Operation) -> Stall:
        """Return the stall of a collective. `waiting` and `later` are filled in by `_count_waiting`."""
        place = Place(group, operation.sequence)
        if place in self.places:
            found = self.places[place]
            if not found.operation.name and operation.name:
                found.operation = operation
            return found
        found = self.places[place] = Stall(place, operation)
        self.stalls.append(found)
        for rank in self.groups[group].ranks:
            entered = self._entered(rank, group, operation)
            if entered is None:
                found.unknown.append(rank)
            elif not entered:
                found.missing.append(rank)
            else:
                found.entered.append(rank)
                if self.lanes[group][rank].left(operation.sequence):
                    found.left.append(rank)
        if found.left and not one_sided(operation.name):  # so all arrived, even those without a record
            kept = [rank for rank in found.missing if rank in self.lanes[group]]
            found.unknown += [rank for rank in found.missing if rank not in self.lanes[group]]
            found.missing = kept
        return found

    def _entered(self, rank: int, group: int, operation: Operation) -> bool | None:
        lane, view = self.lanes[group].get(rank), self.views.get(rank)
        if lane is not None:
            return lane.entered >= operation.sequence
        if view is None:
            return None
        if view.only_waiting or not view.since_ns or view.since_ns < operation.created_ns:
            return False
        return None

    def _find_first(self) -> None:
        """Find the first pending operation of each rank."""
        for rank, view in self.views.items():
            waits = list(self._collectives(rank, view))
            for pair, operations in view.pairs.items():
                if (place := self._between(view, pair)) is not None:
                    for position, operation in enumerate(operations):
                        waits.append((operation.order, self._pair_stall(rank, place, pair, position, operation)))
            self.first[rank] = min(waits, key=lambda wait: wait[0], default=(0, None))[1]
        self._count_first()

    def _collectives(self, rank: int, view: View) -> Iterator[tuple[int, Stall]]:
        for name in view.groups:
            group = self.group_of[rank, name]
            lane = self.lanes[group].get(rank)
            if lane is not None and lane.first is not None and len(self.groups[group].ranks) > 1:
                stall = self.stall(group, lane.first)
                if lane.sure or stall.missing:
                    yield lane.first.order, stall

    def _count_first(self) -> None:
        for stall in self.stalls:
            stall.waiting, stall.later = [], []
        for rank, first in self.first.items():
            if first is not None:
                first.waiting.append(rank)
        for stall in self.stalls:
            here, through = set(stall.waiting), set(stall.left)
            if stall.place.source >= 0:  # the other side has its own stall
                firsts = ((rank, self.first.get(rank)) for rank in stall.entered)
                here |= {rank for rank, first in firsts if first and first.place.between == stall.place.between}
            stall.later = [rank for rank in stall.entered if rank not in here and rank not in through]
            if stall.place.source < 0 and not (stall.missing or stall.left or stall.later):
                lanes = self.lanes[stall.place.group]
                started = {rank for rank in stall.waiting if (one := lanes[rank].first) is not None and one.started}
                stall.behind = [rank for rank in stall.waiting if rank not in started] if started else []

    # --- sends and receives

    def _between(self, view: View, pair: Pair) -> Place | None:
        group = self.group_of[view.rank, pair.group]
        ranks = self.groups[group].ranks
        if not self.groups[group].told or max(pair.source, pair.target) >= len(ranks):
            return None
        return Place(group, 0, ranks[pair.source], ranks[pair.target])

    def _pair_stall(self, rank: int, place: Place, pair: Pair, position: int, operation: Operation) -> Stall:
        """Return the stall of a send or receive.

        Its numbers agree on both sides in some programs only (a pipeline whose stages send equally often). In others
        the first pending one of each side belong together.
        """
        place = place._replace(sequence=operation.sequence)
        stall = Stall(place, operation, entered=[rank])
        self.stalls.append(stall)  # one per side: their numbers cannot always be matched
        other = place.target if rank == place.source else place.source
        view = self.views.get(other)
        if view is None:
            stall.unknown.append(other)
            return stall
        theirs = view.pairs.get(pair, [])
        group = self.groups[place.group]
        if self._numbers_agree(_kind(group), pair):
            numbers = [one.sequence for one in theirs]
            last = max([*numbers, *self._entered_pairs(view, group.name)], default=-1)
            if operation.sequence in numbers:
                stall.entered.append(other)
            elif operation.sequence < last:
                stall.entered.append(other)
                stall.left.append(other)
            else:
                stall.missing.append(other)
        elif position < len(theirs):
            stall.entered.append(other)
        else:
            stall.missing.append(other)
        return stall

    @staticmethod
    def _entered_pairs(view: View, name: str) -> Iterator[int]:
        for pair, operations in view.pairs.items():
            if pair.group == name:
                yield operations[-1].sequence
        if name in view.progress and name not in view.lanes:
            yield view.progress[name].entered

    def _numbers_agree(self, kind: str, asked: Pair) -> bool:
        """Return True if sender and receiver use the same numbers between these positions of a group.

        Wherever both have numbers in the same range, they must have the same ones, and at least once. All groups of the
        kind are checked: the stages of one pipeline behave like those of another.
        """
        key = kind, asked.source, asked.target
        if key not in self.aligned:
            agree, seen = True, False
            for ours, theirs in self._both_sides(kind, asked):
                low, high = max(min(ours), min(theirs)), min(max(ours), max(theirs))
                here, there = ({one for one in side if low <= one <= high} for side in (ours, theirs))
                agree, seen = agree and here == there, seen or bool(here)
            self.aligned[key] = agree and seen
        return self.aligned[key]

    def _both_sides(self, kind: str, asked: Pair) -> Iterator[tuple[set[int], set[int]]]:
        for rank, view in self.views.items():
            for pair, operations in view.pairs.items():
                group, place = self.groups[self.group_of[rank, pair.group]], self._between(view, pair)
                if pair[1:] == asked[1:] and _kind(group) == kind and place is not None and rank == place.source:
                    other = self.views.get(place.target)
                    theirs = other.pairs.get(pair, []) if other else []
                    if theirs:
                        yield {one.sequence for one in operations}, {one.sequence for one in theirs}

    # --- suspects

    def judged(self) -> Judgement:
        self._find_first()
        difference = self._difference()
        suspects: dict[int, Blame] = {}
        ring: tuple[int, ...] = ()
        if difference is None:
            suspects = self._ends(self.first)
            suspects, ring = self._rings(suspects)
            suspects |= self._without_dump(suspects)
        lost = [stall for stall in self.stalls if stall.waiting and stall.lost]
        crossed = any(stall.place.source < 0 for rank in ring if (stall := self.first[rank]) is not None)
        if difference is not None or (ring and not suspects and crossed):
            kind = "mismatch"
        elif suspects:
            kind = "missing"
        else:
            kind = "network" if lost or ring else "none"
        return Judgement(
            kind,
            tuple(suspects[rank] for rank in sorted(suspects)),
            tuple(self.groups),
            tuple(self._of_groups(suspects)),
            difference,
            self.unseen,
            self.aside,
            ring if not suspects else (),
            len(self._explained(set(suspects), frozenset(self.unseen)) - set(suspects)),
        )

    def _missed(self) -> dict[int, Stall]:
        """Return rank -> the first collective that it misses, or a send or receive if it misses no collective."""
        missed: dict[int, Stall] = {}

        def before(stall: Stall) -> tuple[bool, bool, int, Place]:
            return stall.place.source >= 0, not stall.waiting, stall.operation.created_ns, stall.place

        for stall in sorted(self.stalls, key=before):
            for rank in stall.missing:
                missed.setdefault(rank, stall)
        return missed

    def _ends(self, first: Mapping[int, Stall | None]) -> dict[int, Blame]:
        """Return the ranks that wait for no other and miss an operation, or did not leave one that others left."""
        found = {}
        missed = self._missed()
        for rank in self.views:
            stall = first.get(rank)
            miss = missed.get(rank)
            if stall is not None and rank in stall.behind:
                found[rank] = _blame(rank, "behind", stall)
            elif stall is None or stall.stuck:
                if miss is not None and (stall is None or miss.place.source < 0):
                    found[rank] = _blame(rank, "missing", miss)
                elif stall is not None:
                    found[rank] = _blame(rank, "stayed", stall)
        return found

    def _explained(self, suspects: set[int], unseen: frozenset[int] = frozenset()) -> set[int]:
        """Return the ranks that wait for these, directly or indirectly.

        unseen: ranks that count as waited for if they are among the unknown ranks of a stall.
        """
        back: dict[int, list[Stall]] = defaultdict(list)
        for stall in self.stalls:
            silent = unseen.intersection(() if stall.stuck else stall.unknown)
            for rank in silent.union(stall.points_at) if stall.waiting else ():
                back[rank].append(stall)
        found, todo, done = set(suspects), list(suspects), set()
        while todo:
            for stall in back[todo.pop()]:
                if id(stall) not in done:
                    done.add(id(stall))
                    todo += [rank for rank in stall.waiting if rank not in found]
                    found.update(stall.waiting)
        return found

    def _rings(self, suspects: dict[int, Blame]) -> tuple[dict[int, Blame], tuple[int, ...]]:
        """Find suspects among ranks that wait in a ring none of whose members reaches a suspect.

        Sends and receives are ignored first: a rank that then waits for no other and misses a collective is a suspect.
        Otherwise, among ranks that miss sends only, the one that went silent first.
        """
        ends = set(suspects)
        for stall in self.stalls:
            if stall.waiting and not stall.points_at and (stall.lost or stall.unknown):
                ends |= set(stall.waiting)
        explained = self._explained(ends)
        left = [rank for rank, first in self.first.items() if first and rank not in explained]
        if not left:
            return suspects, ()
        strong: dict[int, Stall | None] = {}
        for rank in left:
            waits = list(self._collectives(rank, self.views[rank]))
            strong[rank] = min(waits, key=lambda wait: wait[0], default=(0, None))[1]
        missed = self._missed()
        free = [rank for rank in left if strong[rank] is None and rank in missed]
        firm = [rank for rank in free if missed[rank].place.source < 0]
        if not firm and free:
            earliest = min(self.views[rank].last_ns for rank in free)
            firm = [rank for rank in free if self.views[rank].last_ns == earliest]
        more = {rank: _blame(rank, "missing", missed[rank]) for rank in firm}
        return suspects | more, tuple(left)

    def _without_dump(self, suspects: dict[int, Blame]) -> dict[int, Blame]:
        """Return suspects among ranks without a dump.

        Such a rank is a suspect if ranks wait in an operation that all others entered, and no suspect explains the
        wait. It is not if it belongs to a group that another suspect holds up, since it may only wait. A node that died
        takes all its ranks, perhaps half of them. If three of four ranks have no dump, the dumps were lost or not
        collected.
        """
        if len(self.unseen) >= MOST_WITHOUT * len(self.views):
            return {}
        explained, gone = self._explained(set(suspects)), set(self.unseen)
        held = {rank for stall in self.stalls if explained & set(stall.points_at) for rank in stall.unknown}
        found: dict[int, Blame] = {}
        for stall in self.stalls:
            if stall.waiting and not stall.points_at and not stall.stuck and not explained & set(stall.waiting):
                for rank in stall.unknown:
                    if rank in gone - held:
                        found.setdefault(rank, _blame(rank, "no_dump", stall))
        return found

    # --- results

    def _of_groups(self, suspects: Mapping[int, Blame]) -> list[Stall]:
        """Return for each group the first operation that only some ranks entered, else one in which ranks wait."""
        best: dict[int, Stall] = {}
        for group, lanes in enumerate(self.lanes):
            if len(self.groups[group].ranks) > 1 and lanes:
                lowest = min(lane.entered for lane in lanes.values())
                if lowest < max(lane.entered for lane in lanes.values()):
                    self.stall(group, self._at(lanes, lowest + 1))

        def rank_of(stall: Stall) -> tuple[bool, bool, bool, bool, int]:
            lost = bool(not suspects and stall.waiting and not stall.missing)
            odd = not (stall.missing and stall.entered)
            return not lost, odd, not stall.waiting and odd, stall.place.source >= 0, stall.place.sequence

        for stall in self.stalls:
            if (stall.missing and stall.entered) or stall.waiting:
                held = best.get(stall.place.group)
                if held is None or rank_of(stall) < rank_of(held):
                    best[stall.place.group] = stall
        blamed = {blame.place for blame in suspects.values()}
        return sorted(
            best.values(),
            key=lambda stall: (
                stall.place not in blamed,
                not set(stall.missing) & set(suspects),
                stall.operation.created_ns,
                stall.place,
            ),
        )

    @staticmethod
    def _at(lanes: Mapping[int, Lane], sequence: int) -> Operation:
        told = [lane.kept[sequence] for lane in lanes.values() if sequence in lane.kept]
        return min(told, key=lambda one: one.created_ns, default=Operation(sequence, -1, ""))

    def _difference(self) -> Difference | None:
        """Return the first collective in which ranks wait and whose ranks recorded different operations."""
        waited = sorted(
            (stall for stall in self.stalls if stall.waiting and stall.place.source < 0),
            key=lambda stall: (stall.operation.created_ns, stall.place),
        )
        for stall in waited:
            said: dict[str, list[int]] = defaultdict(list)
            told = {
                rank: operation
                for rank, lane in self.lanes[stall.place.group].items()
                if (operation := lane.kept.get(stall.place.sequence)) is not None and operation.name
            }
            typed = all(any(operation.dtypes) for operation in told.values())
            for rank, operation in told.items():
                said[_words(operation, typed)].append(rank)
            if len(said) > 1 and any(set(ranks) & set(stall.waiting) for ranks in said.values()):
                return Difference(stall.place, {words: tuple(ranks) for words, ranks in sorted(said.items())})
        return None


def _blame(rank: int, why: str, stall: Stall) -> Blame:
    waiting = () if why == "stayed" else tuple(one for one in stall.entered if one not in stall.behind)
    return Blame(rank, why, stall.place, stall.operation.name, waiting)


def _kind(group: Group) -> str:
    return group.description or group.name


def _words(operation: Operation, typed: bool) -> str:
    """Describe what all ranks of a group must agree on: the name and, depending on the kind, the number of elements.

    The type is included only if every rank recorded one (`typed`): a root alone may have an input or an output.
    """
    words = [operation.name]
    alike_in, alike_out = _alike(operation.name)
    if operation.numel:
        words += [f"{operation.numel[0]:,} in"] if alike_in else []
        words += [f"{operation.numel[1]:,} out"] if alike_out else []
    if typed:
        words.append("/".join(sorted({kind for side in operation.dtypes for kind in side})))
    return " ".join(words)


def _alike(name: str) -> tuple[bool, bool]:
    """Return whether input and output have one size on all ranks, as in torch/distributed/flight_recorder."""
    plain = name.lower().strip("_")
    if any(word in plain for word in ("coalesced", "_v", "to_all", "toall")):
        return False, False
    if plain.startswith(_SAME_SIZES):
        return True, True
    return plain.startswith(("reduce", "gather")), plain.startswith("scatter")


def _of_other_times(views: Mapping[int, View]) -> dict[int, str]:
    """Find dumps of an earlier run in the same folder, and of processes that restarted after the others stopped."""
    times = [view.last_ns for view in views.values() if view.last_ns]
    if len(times) < 3:
        return {}
    usual = median_low(times)
    found = {}
    for rank, view in views.items():
        if view.last_ns and usual - view.last_ns > OF_ANOTHER_RUN_SECONDS * 10**9:
            found[rank] = "is of an earlier run: it ends over an hour before the others"
        elif view.first_ns - usual > BEGUN_ANEW_SECONDS * 10**9 and not view.since_ns and not view.only_waiting:
            found[rank] = "begins after the others stopped: its process restarted"
    return found
