"""Finds the ranks that block a stuck job, using the collectives in which ranks wait. All functions are pure.

The rule (Kokolis, Kuchnik et al., HPCA 2025, arXiv 2410.21680, section about NCCL time-outs): in each group, find the
first collective that some ranks entered and others did not. A rank that did not enter it may itself be waiting in a
collective of another group. Each rank therefore points at the ranks that are missing from its first pending operation.
A suspect is a rank that is missing from an operation and points at no rank.

If all programs enter their collectives in consistent orders, no rank can wait for itself: each step along the pointers
leads to an operation that is earlier in this order. Sends and receives are an exception, because they are entered early
and out of order. If ranks wait in a ring only because of sends and receives, these are ignored, and only missing
collectives count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

from healthd.fleet.collectives.dump import MAX_RANKS
from healthd.fleet.collectives.rank_view import Lane, Operation, Pair, RankView

# a dump that ends this long before all others is old; PyTorch's longest usual time-out is half of this
EARLIER_RUN_SECONDS = 3600
RESTARTED_SECONDS = 60
# if ranks without a dump exceed ranks with a dump by this factor, dumps were probably not collected
MAX_MISSING_DUMP_RATIO = 3
# In these operations, a rank does not need all other ranks, so it may finish before others arrive.
_ROOTED_PREFIXES = ("broadcast", "reduce", "scatter", "gather")
_SAME_SIZES = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "reducescatter", "broadcast")


class Group(NamedTuple):
    """A process group.

    `ranks` are the known global ranks, in the order of their group ranks if `has_rank_order` is True.
    """

    name: str
    description: str
    ranks: tuple[int, ...]
    has_rank_order: bool = True


class OperationKey(NamedTuple):
    """A group's collective, or a send or receive from source to target (global ranks; -1 for a collective)."""

    group: int
    sequence: int
    source: int = -1
    target: int = -1

    @property
    def pair_key(self) -> tuple[int, int, int]:
        return self.group, self.source, self.target


@dataclass(slots=True)
class Stall:
    """A pending operation, and the state of all ranks in its group.

    Attributes:
        operation: as recorded by one of the ranks.
        waiting: ranks whose first pending operation this is.
        entered, missing, finished: ranks that entered it, that never arrived, and that finished it.
        later: ranks that entered it and still wait in an earlier operation.
        unknown: ranks without a record.
        behind: ranks whose program waits in it, but whose GPU is still in an earlier kernel, while other GPUs have
            started it.
    """

    key: OperationKey
    operation: Operation
    waiting: list[int] = field(default_factory=list)
    entered: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    later: list[int] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)

    @property
    def is_stuck(self) -> bool:
        """True if all ranks arrived and some finished, so that no rank blocks the others.

        Operations with a root are an exception: a rank that needs only the root's data may finish before others arrive.
        """
        return not self.missing and bool(self.finished) and (not self.later or not is_rooted(self.operation.name))

    @property
    def waits_for(self) -> list[int]:
        """The ranks that the waiting ranks are waiting for."""
        return self.missing or ([] if self.is_stuck else self.later or self.behind)

    @property
    def is_lost(self) -> bool:
        """True if this is every rank's first pending operation and no rank finished it."""
        return not (self.missing or self.finished or self.later or self.unknown or self.behind)


class Blame(NamedTuple):
    """A reason to suspect a rank.

    The reasons are:
    - missing: the rank never entered `key`;
    - stayed: all ranks entered `key` and others left it, but this rank did not leave it;
    - behind: the rank entered `key`, but its GPU did not reach it;
    - no_dump: the rank wrote no dump, and no recorded rank explains why the ranks in `key` wait.

    Attributes:
        operation, waiting: the operation and the ranks that entered it; both are empty for `stayed`.
    """

    rank: int
    reason: str
    key: OperationKey
    operation: str = ""
    waiting: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Difference:
    """Different collectives that ranks entered under the same number.

    `descriptions` maps each collective's description to the ranks that entered it.
    """

    key: OperationKey
    descriptions: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Judgement:
    """Result of the analysis.

    Attributes:
        kind: missing, network, mismatch, none.
        suspects: sorted by rank.
        stalls: the first stall of each group; the stall that causes the others comes first.
        ranks_without_view: known ranks without a record.
        unused_dumps: for each rank, the reason why its dump was not used.
        ring: ranks that wait for each other.
        blocked_ranks: number of ranks that wait for a suspect, directly or indirectly.
    """

    kind: str
    suspects: tuple[Blame, ...]
    groups: tuple[Group, ...]
    stalls: tuple[Stall, ...]
    difference: Difference | None
    ranks_without_view: tuple[int, ...]
    unused_dumps: Mapping[int, str]
    ring: tuple[int, ...]
    blocked_ranks: int


def is_rooted(name: str) -> bool:
    name = name.lower().lstrip("_")
    return name.startswith(_ROOTED_PREFIXES) and not name.startswith(("reduce_scatter", "reducescatter"))


def judge(views: Iterable[RankView]) -> Judgement:
    """Find the cause of a stuck job.

    Args:
        views: one view for each rank.
    """
    return _Analysis({view.rank: view for view in views}).judgement()


class _Analysis:
    """All views together: the groups, the stalls, and which ranks wait for which others."""

    def __init__(self, views: dict[int, RankView]) -> None:
        self.unused_dumps = _outdated_dumps(views)
        self.views = {rank: view for rank, view in sorted(views.items()) if rank not in self.unused_dumps}
        self.groups: list[Group] = []
        self.group_of: dict[tuple[int, str], int] = {}  # (rank, name) -> index in groups
        self._find_groups()
        self._find_gaps()
        self.lanes: list[dict[int, Lane]] = [{} for _ in self.groups]
        self._find_lanes()
        all_ranks = {rank for group in self.groups for rank in group.ranks} | set(views)
        self.ranks_without_view = tuple(sorted(all_ranks - set(self.views)))
        self.stalls_by_key: dict[OperationKey, Stall] = {}  # of collectives
        self.stalls: list[Stall] = []
        self.numbers_agree_cache: dict[tuple[str, int, int], bool] = {}
        self.first_pending: dict[int, Stall | None] = {}

    # --- groups and lanes

    def _find_groups(self) -> None:
        """Collect the groups.

        Groups with the same name but different ranks are separate groups, because split_group reuses names.
        """
        indices: dict[tuple[str, tuple[int, ...] | None], int] = {}
        ranks_by_group: dict[tuple[str, tuple[int, ...] | None], set[int]] = defaultdict(set)
        for rank, view in self.views.items():
            for name, group in view.groups.items():
                ranks = group.ranks if group.ranks and rank in group.ranks else None
                key = name, ranks
                if key not in indices:
                    indices[key] = len(self.groups)
                    self.groups.append(Group(name, group.description, ranks or (), ranks is not None))
                self.group_of[rank, name] = indices[key]
                ranks_by_group[key].add(rank)
        for key, index in indices.items():
            if not self.groups[index].has_rank_order:
                self.groups[index] = self.groups[index]._replace(ranks=tuple(sorted(ranks_by_group[key])))

    def _find_gaps(self) -> None:
        """Add the missing rank numbers, counted from 0, to the groups that contain all other ranks.

        This applies to groups whose members no rank records.
        """
        highest = max(self.views, default=-1)
        if any(group.has_rank_order for group in self.groups) or highest >= MAX_RANKS:
            return
        gaps = set(range(highest + 1)).difference(self.views)
        for index, group in enumerate(self.groups):
            if gaps and len(group.ranks) == len(self.views):
                self.groups[index] = group._replace(ranks=tuple(sorted(gaps.union(group.ranks))))

    def _find_lanes(self) -> None:
        """Collect the lanes.

        If a lane is missing, use the group's progress. If the group also has sends, its progress is ambiguous and is
        not used.
        """
        with_pairs = {self.group_of[rank, name] for rank, view in self.views.items() for name in view.with_pairs}
        for rank, view in self.views.items():
            for name in view.groups:
                group = self.group_of[rank, name]
                lane, last = view.lanes.get(name), view.progress.get(name)
                if lane is None and last is not None and group not in with_pairs:
                    next_number = last.done + 1
                    first = (
                        Operation(next_number, -1, "", started=last.started >= next_number)
                        if next_number <= last.entered
                        else None
                    )
                    lane = Lane(last.entered, first)
                if lane is not None:
                    self.lanes[group][rank] = lane

    # --- state of the ranks

    def get_stall(self, group: int, operation: Operation) -> Stall:
        """Return the stall for a collective. `_count_waiting` fills in `waiting` and `later`."""
        key = OperationKey(group, operation.sequence)
        if key in self.stalls_by_key:
            found = self.stalls_by_key[key]
            if not found.operation.name and operation.name:
                found.operation = operation
            return found
        found = self.stalls_by_key[key] = Stall(key, operation)
        self.stalls.append(found)
        for rank in self.groups[group].ranks:
            entered = self._entered(rank, group, operation)
            if entered is None:
                found.unknown.append(rank)
            elif not entered:
                found.missing.append(rank)
            else:
                found.entered.append(rank)
                if self.lanes[group][rank].has_finished(operation.sequence):
                    found.finished.append(rank)
        if found.finished and not is_rooted(operation.name):  # all ranks arrived, including ranks without a record
            still_missing = [rank for rank in found.missing if rank in self.lanes[group]]
            found.unknown += [rank for rank in found.missing if rank not in self.lanes[group]]
            found.missing = still_missing
        return found

    def _entered(self, rank: int, group: int, operation: Operation) -> bool | None:
        lane, view = self.lanes[group].get(rank), self.views.get(rank)
        if lane is not None:
            return lane.entered >= operation.sequence
        if view is None:
            return None
        if view.has_only_pending or not view.since_ns or view.since_ns < operation.created_ns:
            return False
        return None

    def _find_first_pending(self) -> None:
        """Find the first pending operation of each rank."""
        for rank, view in self.views.items():
            pending_stalls = list(self._collectives(rank, view))
            for pair, operations in view.pairs.items():
                if (key := self._pair_operation_key(view, pair)) is not None:
                    for position, operation in enumerate(operations):
                        pending_stalls.append((operation.order, self._pair_stall(rank, key, pair, position, operation)))
            self.first_pending[rank] = min(pending_stalls, key=lambda pending: pending[0], default=(0, None))[1]
        self._count_waiting()

    def _collectives(self, rank: int, view: RankView) -> Iterator[tuple[int, Stall]]:
        for name in view.groups:
            group = self.group_of[rank, name]
            lane = self.lanes[group].get(rank)
            if lane is not None and lane.first is not None and len(self.groups[group].ranks) > 1:
                stall = self.get_stall(group, lane.first)
                if lane.has_completions or stall.missing:
                    yield lane.first.order, stall

    def _count_waiting(self) -> None:
        for stall in self.stalls:
            stall.waiting, stall.later = [], []
        for rank, first in self.first_pending.items():
            if first is not None:
                first.waiting.append(rank)
        for stall in self.stalls:
            waiting_here, finished = set(stall.waiting), set(stall.finished)
            if stall.key.source >= 0:  # the other rank of the pair has its own stall
                firsts = ((rank, self.first_pending.get(rank)) for rank in stall.entered)
                waiting_here |= {rank for rank, first in firsts if first and first.key.pair_key == stall.key.pair_key}
            stall.later = [rank for rank in stall.entered if rank not in waiting_here and rank not in finished]
            if stall.key.source < 0 and not (stall.missing or stall.finished or stall.later):
                lanes = self.lanes[stall.key.group]
                started = {
                    rank
                    for rank in stall.waiting
                    if (lane_first := lanes[rank].first) is not None and lane_first.started
                }
                stall.behind = [rank for rank in stall.waiting if rank not in started] if started else []

    # --- sends and receives

    def _pair_operation_key(self, view: RankView, pair: Pair) -> OperationKey | None:
        group = self.group_of[view.rank, pair.group]
        ranks = self.groups[group].ranks
        if not self.groups[group].has_rank_order or max(pair.source, pair.target) >= len(ranks):
            return None
        return OperationKey(group, 0, ranks[pair.source], ranks[pair.target])

    def _pair_stall(self, rank: int, key: OperationKey, pair: Pair, position: int, operation: Operation) -> Stall:
        """Return the stall for a send or receive.

        In some programs (a pipeline whose stages send equally often), sender and receiver use the same sequence
        numbers. In other programs, the first pending operations of sender and receiver belong together.
        """
        key = key._replace(sequence=operation.sequence)
        stall = Stall(key, operation, entered=[rank])
        # one stall for the sender and one for the receiver, because their numbers cannot always be matched
        self.stalls.append(stall)
        peer = key.target if rank == key.source else key.source
        view = self.views.get(peer)
        if view is None:
            stall.unknown.append(peer)
            return stall
        peer_operations = view.pairs.get(pair, [])
        group = self.groups[key.group]
        if self._numbers_agree(_group_kind(group), pair):
            numbers = [peer_operation.sequence for peer_operation in peer_operations]
            last = max([*numbers, *self._entered_pairs(view, group.name)], default=-1)
            if operation.sequence in numbers:
                stall.entered.append(peer)
            elif operation.sequence < last:
                stall.entered.append(peer)
                stall.finished.append(peer)
            else:
                stall.missing.append(peer)
        elif position < len(peer_operations):
            stall.entered.append(peer)
        else:
            stall.missing.append(peer)
        return stall

    @staticmethod
    def _entered_pairs(view: RankView, name: str) -> Iterator[int]:
        for pair, operations in view.pairs.items():
            if pair.group == name:
                yield operations[-1].sequence
        if name in view.progress and name not in view.lanes:
            yield view.progress[name].entered

    def _numbers_agree(self, kind: str, pair: Pair) -> bool:
        """Return True if sender and receiver use the same numbers for this pair of positions in a group.

        In the range of numbers that both recorded, both must have the same numbers, and at least one. All groups of
        this kind are checked together, because the stages of all pipelines behave alike.
        """
        key = kind, pair.source, pair.target
        if key not in self.numbers_agree_cache:
            agree, has_common = True, False
            for sender_numbers, receiver_numbers in self._paired_numbers(kind, pair):
                low, high = (
                    max(min(sender_numbers), min(receiver_numbers)),
                    min(max(sender_numbers), max(receiver_numbers)),
                )
                common_ours, common_theirs = (
                    {number for number in side if low <= number <= high} for side in (sender_numbers, receiver_numbers)
                )
                agree, has_common = agree and common_ours == common_theirs, has_common or bool(common_ours)
            self.numbers_agree_cache[key] = agree and has_common
        return self.numbers_agree_cache[key]

    def _paired_numbers(self, kind: str, pair_of_ranks: Pair) -> Iterator[tuple[set[int], set[int]]]:
        for rank, view in self.views.items():
            for pair, operations in view.pairs.items():
                group, key = self.groups[self.group_of[rank, pair.group]], self._pair_operation_key(view, pair)
                if (
                    pair[1:] == pair_of_ranks[1:]
                    and _group_kind(group) == kind
                    and key is not None
                    and rank == key.source
                ):
                    peer = self.views.get(key.target)
                    peer_operations = peer.pairs.get(pair, []) if peer else []
                    if peer_operations:
                        yield (
                            {operation_entry.sequence for operation_entry in operations},
                            {operation_entry.sequence for operation_entry in peer_operations},
                        )

    # --- suspects

    def judgement(self) -> Judgement:
        self._find_first_pending()
        difference = self._difference()
        suspects: dict[int, Blame] = {}
        ring: tuple[int, ...] = ()
        if difference is None:
            suspects = self._final_blames(self.first_pending)
            suspects, ring = self._ring_blames(suspects)
            suspects |= self._no_dump_blames(suspects)
        lost = [stall for stall in self.stalls if stall.waiting and stall.is_lost]
        crossed = any(stall.key.source < 0 for rank in ring if (stall := self.first_pending[rank]) is not None)
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
            tuple(self._stalls_by_group(suspects)),
            difference,
            self.ranks_without_view,
            self.unused_dumps,
            ring if not suspects else (),
            len(self._ranks_waiting_for(set(suspects), frozenset(self.ranks_without_view)) - set(suspects)),
        )

    def _missed(self) -> dict[int, Stall]:
        """Return the first collective from which each rank is missing, or else a send or receive."""
        missed: dict[int, Stall] = {}

        def before(stall: Stall) -> tuple[bool, bool, int, OperationKey]:
            return stall.key.source >= 0, not stall.waiting, stall.operation.created_ns, stall.key

        for stall in sorted(self.stalls, key=before):
            for rank in stall.missing:
                missed.setdefault(rank, stall)
        return missed

    def _final_blames(self, first: Mapping[int, Stall | None]) -> dict[int, Blame]:
        """Return the suspects that wait for no other rank.

        These ranks are missing from an operation, or did not leave an operation that other ranks left.
        """
        found = {}
        missed = self._missed()
        for rank in self.views:
            stall = first.get(rank)
            miss = missed.get(rank)
            if stall is not None and rank in stall.behind:
                found[rank] = _blame(rank, "behind", stall)
            elif stall is None or stall.is_stuck:
                if miss is not None and (stall is None or miss.key.source < 0):
                    found[rank] = _blame(rank, "missing", miss)
                elif stall is not None:
                    found[rank] = _blame(rank, "stayed", stall)
        return found

    def _ranks_waiting_for(self, suspects: set[int], unseen: frozenset[int] = frozenset()) -> set[int]:
        """Return the ranks that wait for these suspects, directly or indirectly.

        Args:
            unseen: further ranks; a rank also waits for them if its stall lists them as unknown.
        """
        stalls_by_rank: dict[int, list[Stall]] = defaultdict(list)
        for stall in self.stalls:
            silent_ranks = unseen.intersection(() if stall.is_stuck else stall.unknown)
            for rank in silent_ranks.union(stall.waits_for) if stall.waiting else ():
                stalls_by_rank[rank].append(stall)
        found, pending, visited = set(suspects), list(suspects), set()
        while pending:
            for stall in stalls_by_rank[pending.pop()]:
                if id(stall) not in visited:
                    visited.add(id(stall))
                    pending += [rank for rank in stall.waiting if rank not in found]
                    found.update(stall.waiting)
        return found

    def _ring_blames(self, suspects: dict[int, Blame]) -> tuple[dict[int, Blame], tuple[int, ...]]:
        """Find suspects among ranks that wait for each other in a ring and for no suspect.

        First, sends and receives are ignored. A rank that is missing from a collective and then waits for no other rank
        is a suspect. If there is none, the suspect is the rank that became silent first among the ranks that are
        missing only from sends.
        """
        ends = set(suspects)
        for stall in self.stalls:
            if stall.waiting and not stall.waits_for and (stall.is_lost or stall.unknown):
                ends |= set(stall.waiting)
        explained = self._ranks_waiting_for(ends)
        unexplained = [rank for rank, first in self.first_pending.items() if first and rank not in explained]
        if not unexplained:
            return suspects, ()
        collectives_only: dict[int, Stall | None] = {}
        for rank in unexplained:
            waits = list(self._collectives(rank, self.views[rank]))
            collectives_only[rank] = min(waits, key=lambda wait: wait[0], default=(0, None))[1]
        missed = self._missed()
        unblocked = [rank for rank in unexplained if collectives_only[rank] is None and rank in missed]
        blamed = [rank for rank in unblocked if missed[rank].key.source < 0]
        if not blamed and unblocked:
            earliest = min(self.views[rank].last_ns for rank in unblocked)
            blamed = [rank for rank in unblocked if self.views[rank].last_ns == earliest]
        more = {rank: _blame(rank, "missing", missed[rank]) for rank in blamed}
        return suspects | more, tuple(unexplained)

    def _no_dump_blames(self, suspects: dict[int, Blame]) -> dict[int, Blame]:
        """Return suspects among ranks without a dump.

        Such a rank is a suspect if ranks wait in an operation that all ranks with a dump entered, and no other suspect
        explains the wait. It is not a suspect if another suspect blocks one of its groups, because it may only be
        waiting. If a node died, the dumps of all its ranks are missing; these may be half of the job's ranks. But if
        three of four ranks have no dump, the dumps were lost or not collected.
        """
        if len(self.ranks_without_view) >= MAX_MISSING_DUMP_RATIO * len(self.views):
            return {}
        explained, missing_ranks = self._ranks_waiting_for(set(suspects)), set(self.ranks_without_view)
        blocked = {rank for stall in self.stalls if explained & set(stall.waits_for) for rank in stall.unknown}
        found: dict[int, Blame] = {}
        for stall in self.stalls:
            if stall.waiting and not stall.waits_for and not stall.is_stuck and not explained & set(stall.waiting):
                for rank in stall.unknown:
                    if rank in missing_ranks - blocked:
                        found.setdefault(rank, _blame(rank, "no_dump", stall))
        return found

    # --- results

    def _stalls_by_group(self, suspects: Mapping[int, Blame]) -> list[Stall]:
        """Return each group's first operation that only some ranks entered.

        If there is none, return an operation in which ranks wait.
        """
        best: dict[int, Stall] = {}
        for group, lanes in enumerate(self.lanes):
            if len(self.groups[group].ranks) > 1 and lanes:
                lowest = min(lane.entered for lane in lanes.values())
                if lowest < max(lane.entered for lane in lanes.values()):
                    self.get_stall(group, self._operation_at(lanes, lowest + 1))

        def rank_of(stall: Stall) -> tuple[bool, bool, bool, bool, int]:
            lost = bool(not suspects and stall.waiting and not stall.missing)
            odd = not (stall.missing and stall.entered)
            return not lost, odd, not stall.waiting and odd, stall.key.source >= 0, stall.key.sequence

        for stall in self.stalls:
            if (stall.missing and stall.entered) or stall.waiting:
                current = best.get(stall.key.group)
                if current is None or rank_of(stall) < rank_of(current):
                    best[stall.key.group] = stall
        blamed = {blame.key for blame in suspects.values()}
        return sorted(
            best.values(),
            key=lambda stall: (
                stall.key not in blamed,
                not set(stall.missing) & set(suspects),
                stall.operation.created_ns,
                stall.key,
            ),
        )

    @staticmethod
    def _operation_at(lanes: Mapping[int, Lane], sequence: int) -> Operation:
        recorded = [lane.operations[sequence] for lane in lanes.values() if sequence in lane.operations]
        return min(
            recorded, key=lambda recorded_operation: recorded_operation.created_ns, default=Operation(sequence, -1, "")
        )

    def _difference(self) -> Difference | None:
        """Return the first collective in which ranks wait and for which they recorded different operations."""
        waited = sorted(
            (stall for stall in self.stalls if stall.waiting and stall.key.source < 0),
            key=lambda stall: (stall.operation.created_ns, stall.key),
        )
        for stall in waited:
            ranks_by_description: dict[str, list[int]] = defaultdict(list)
            operations = {
                rank: operation
                for rank, lane in self.lanes[stall.key.group].items()
                if (operation := lane.operations.get(stall.key.sequence)) is not None and operation.name
            }
            typed = all(any(operation.dtypes) for operation in operations.values())
            for rank, operation in operations.items():
                ranks_by_description[_describe_operation(operation, typed)].append(rank)
            if len(ranks_by_description) > 1 and any(
                set(ranks) & set(stall.waiting) for ranks in ranks_by_description.values()
            ):
                return Difference(
                    stall.key,
                    {description: tuple(ranks) for description, ranks in sorted(ranks_by_description.items())},
                )
        return None


def _blame(rank: int, why: str, stall: Stall) -> Blame:
    waiting = (
        ()
        if why == "stayed"
        else tuple(entered_rank for entered_rank in stall.entered if entered_rank not in stall.behind)
    )
    return Blame(rank, why, stall.key, stall.operation.name, waiting)


def _group_kind(group: Group) -> str:
    return group.description or group.name


def _describe_operation(operation: Operation, typed: bool) -> str:
    """Describe a collective by the values that must be equal on all ranks of its group.

    These are the name and, for some kinds, the numbers of elements. The data type is included only if every rank
    recorded one (`typed`), because sometimes only the root has an input or an output.
    """
    parts = [operation.name]
    has_same_input, has_same_output = _has_uniform_sizes(operation.name)
    if operation.numel:
        parts += [f"{operation.numel[0]:,} in"] if has_same_input else []
        parts += [f"{operation.numel[1]:,} out"] if has_same_output else []
    if typed:
        parts.append("/".join(sorted({kind for side in operation.dtypes for kind in side})))
    return " ".join(parts)


def _has_uniform_sizes(name: str) -> tuple[bool, bool]:
    """Return True if input and output have the same size on all ranks, as in torch/distributed/flight_recorder."""
    plain = name.lower().strip("_")
    if any(word in plain for word in ("coalesced", "_v", "to_all", "toall")):
        return False, False
    if plain.startswith(_SAME_SIZES):
        return True, True
    return plain.startswith(("reduce", "gather")), plain.startswith("scatter")


def _outdated_dumps(views: Mapping[int, RankView]) -> dict[int, str]:
    """Return the reason for each outdated dump.

    It is from an earlier run, or from a process that restarted after the others stopped.
    """
    times = [view.last_ns for view in views.values() if view.last_ns]
    if len(times) < 3:
        return {}
    usual = median_low(times)
    found = {}
    for rank, view in views.items():
        if view.last_ns and usual - view.last_ns > EARLIER_RUN_SECONDS * 10**9:
            found[rank] = "ends over an hour before the others, so it is from an earlier run"
        elif view.first_ns - usual > RESTARTED_SECONDS * 10**9 and not view.since_ns and not view.has_only_pending:
            found[rank] = "begins after the others stopped, so its process restarted"
    return found
