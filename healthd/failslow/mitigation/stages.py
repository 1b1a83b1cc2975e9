"""Remedy S3: exchanges ranks' positions so that a slow GPU or link costs the job as little as possible.

All functions are pure.

FALCON (arXiv 2410.12588, S3): a pipeline is as fast as its slowest stage. Stragglers are therefore packed into as few
stages as possible, ceil(stragglers / GPUs per stage). Interior stages are preferred, because the first and last stages
have more work (embedding, loss). A slow link should carry nothing, or only the data that two neighbouring stages
exchange. It should not carry the gradients of a data-parallel group, which are many times larger.

Only whole tensor-parallel groups move: their ranks communicate in each layer, so they are on one node and stay
together. A group with a straggler counts as slow. The stragglers are packed into ceil(slow groups / groups per stage)
stages. This equals the paper's number if a group is one GPU or is entirely slow. When two groups exchange positions,
they exchange their weights and the positions of all their ranks. A rank always has a position.

For stragglers, the number of moves is minimal. For links, a single move is found if one is enough. If several moves are
needed, each move is the most effective one at that time, and the number of moves may not be minimal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from healthd.common.errors import HealthdError

MAX_RANKS = 65_536
MAX_LINKS = 256


class InvalidTopology(HealthdError):
    """The positions do not form stages x data-parallel groups x tensor-parallel ranks. The message is one sentence."""


class RankPosition(NamedTuple):
    """A rank's position in the job: pipeline stage, data-parallel group and tensor-parallel rank, all from 0."""

    stage: int
    dp: int
    tp: int


class Swap(NamedTuple):
    """Ranks a[i] and b[i] exchange positions, for all i."""

    a: tuple[int, ...]
    b: tuple[int, ...]
    reason: str  # "straggler", "link"


class Topology(NamedTuple):
    """The result of the rearrangement.

    Attributes:
        stages: stages that contain all stragglers after the swaps, ascending.
        positions: each rank's position after all swaps were applied in order.
        limitations: sentences without a full stop about problems that no move solves.
    """

    stages: tuple[int, ...]
    swaps: tuple[Swap, ...]
    positions: Mapping[int, RankPosition]
    limitations: tuple[str, ...]


Cell = tuple[int, int]  # stage and data-parallel group of a tensor-parallel group
Link = tuple[int, int]  # two tensor-parallel groups, by number


def rearrange(
    positions: Mapping[int, RankPosition], stragglers: Collection[int], slow_links: Collection[tuple[int, int]] = ()
) -> Topology:
    """Return the swaps for these stragglers and slow links. Raises InvalidTopology.

    Args:
        positions: position of each rank.
        stragglers: straggling ranks.
        slow_links: pairs of ranks with a slow connection.
    """
    stages, width, depth = _shape(positions)
    groups: dict[Cell, list[int]] = defaultdict(lambda: [0] * depth)
    for rank, position in positions.items():
        groups[position.stage, position.dp][position.tp] = rank
    cells = sorted(groups)
    # ranks in each tensor-parallel group; from here on, a group is identified by its number
    ranks = [groups[cell] for cell in cells]
    group_by_rank = {rank: group for group, group_ranks in enumerate(ranks) for rank in group_ranks}
    _check_ranks(group_by_rank, stragglers, slow_links)
    slow = {group_by_rank[rank] for rank in stragglers}
    links, within = _group_links(slow_links, group_by_rank)

    cell_by_group = list(cells)  # cell of each group
    chosen = _choose_stages(cell_by_group, slow, stages, width)
    moves = [(*pair, "straggler") for pair in _pack_stragglers(cell_by_group, slow, chosen, links)]
    for a, b, _ in moves:
        cell_by_group[a], cell_by_group[b] = cell_by_group[b], cell_by_group[a]
    while (move := _best_link_move(cell_by_group, slow, chosen, links)) is not None:
        a, b = move
        cell_by_group[a], cell_by_group[b] = cell_by_group[b], cell_by_group[a]
        moves.append((a, b, "link"))
    return Topology(
        tuple(sorted(chosen)),
        tuple(Swap(tuple(ranks[a]), tuple(ranks[b]), reason) for a, b, reason in moves),
        {
            rank: RankPosition(*cell_by_group[group], tp)
            for group, group_ranks in enumerate(ranks)
            for tp, rank in enumerate(group_ranks)
        },
        tuple(_limitations(cell_by_group, ranks, chosen, stages, links, within)),
    )


def _shape(positions: Mapping[int, RankPosition]) -> tuple[int, int, int]:
    """Return the number of stages, data-parallel groups and tensor-parallel ranks."""
    if not positions:
        raise InvalidTopology("no rank given")
    if len(positions) > MAX_RANKS:
        raise InvalidTopology(f"there are {len(positions):,} ranks; the maximum is {MAX_RANKS:,}")
    lowest = RankPosition(*map(min, zip(*positions.values(), strict=True)))
    highest = RankPosition(*map(max, zip(*positions.values(), strict=True)))
    shape = (highest.stage + 1, highest.dp + 1, highest.tp + 1)
    if (
        lowest != (0, 0, 0)
        or len(set(positions.values())) < len(positions)
        or len(positions) != shape[0] * shape[1] * shape[2]
    ):
        raise InvalidTopology(
            f"{len(positions):,} ranks do not fill {shape[0]:,} stages x {shape[1]:,} data-parallel groups x "
            f"{shape[2]:,} tensor-parallel ranks, with each position used once and counted from 0"
        )
    return shape


def _check_ranks(
    group_by_rank: Mapping[int, int], stragglers: Collection[int], slow_links: Collection[tuple[int, int]]
) -> None:
    named = {*stragglers, *(rank for link in slow_links for rank in link)}
    unknown = sorted(named - set(group_by_rank))
    if unknown:
        raise InvalidTopology(f"rank {unknown[0]} has no position in the job")
    if len(slow_links) > MAX_LINKS:
        raise InvalidTopology(f"{len(slow_links):,} slow links are too many; the maximum is {MAX_LINKS:,}")


def _group_links(
    slow: Collection[tuple[int, int]], group_by_rank: Mapping[int, int]
) -> tuple[list[Link], list[tuple[int, int]]]:
    """Return the slow links between groups, each once, and the slow links within a group, which no move can improve."""
    links, within = set(), []
    for first, second in sorted(slow):
        a, b = sorted((group_by_rank[first], group_by_rank[second]))
        if a == b:
            within.append((first, second))
        else:
            links.add((a, b))
    return sorted(links), within


def _choose_stages(cell_by_group: Sequence[Cell], slow: Collection[int], stages: int, width: int) -> set[int]:
    """Return the stages, as few as possible, into which the slow groups are packed. Interior stages are preferred, then
    stages with the most slow groups.
    """
    slow_counts = [0] * stages
    for group in slow:
        slow_counts[cell_by_group[group][0]] += 1
    outer = {0, stages - 1}
    order = sorted(range(stages), key=lambda stage: (stage in outer, -slow_counts[stage], stage))
    return set(order[: -(-len(slow) // width)])


def _pack_stragglers(
    cell_by_group: Sequence[Cell], slow: Collection[int], chosen: Collection[int], links: Sequence[Link]
) -> list[tuple[int, int]]:
    """Return the moves of slow groups into the chosen stages. Each slow group is exchanged with a healthy group.

    There is one move for each slow group outside the chosen stages, which is the minimum. The healthy group is chosen
    so that the fewest slow links carry gradients, preferably in the same pipeline.
    """
    cells, pairs = list(cell_by_group), []
    free = [group for group, (stage, _) in enumerate(cell_by_group) if stage in chosen and group not in slow]
    for group in sorted(slow):
        if cell_by_group[group][0] in chosen:
            continue
        best = min(
            free,
            key=lambda candidate: (
                _link_change(cells, group, candidate, links),
                cells[candidate][1] != cells[group][1],
                candidate,
            ),
        )
        free.remove(best)
        cells[group], cells[best] = cells[best], cells[group]
        pairs.append((group, best))
    return pairs


def _link_change(cell_by_group: Sequence[Cell], a: int, b: int, links: Sequence[Link]) -> tuple[int, int]:
    """Return the changes in two numbers after a swap: slow links that carry gradients, and slow links between
    neighbouring stages."""
    if not links:
        return 0, 0
    touched = [link for link in links if a in link or b in link]
    new = {a: cell_by_group[b], b: cell_by_group[a]}
    before = [_link_traffic(cell_by_group[first], cell_by_group[second]) for first, second in touched]
    after = [
        _link_traffic(new.get(first, cell_by_group[first]), new.get(second, cell_by_group[second]))
        for first, second in touched
    ]
    return after.count("gradients") - before.count("gradients"), after.count("pipeline") - before.count("pipeline")


def _link_traffic(first: Cell, second: Cell) -> str:
    if first[0] == second[0]:
        return "gradients"
    return "pipeline" if first[1] == second[1] and abs(first[0] - second[0]) == 1 else "nothing"


def _best_link_move(
    cell_by_group: Sequence[Cell], slow: Collection[int], chosen: Collection[int], links: Sequence[Link]
) -> tuple[int, int] | None:
    """Return the move after which the fewest slow links carry gradients, or None. The stragglers stay packed."""
    gradient_groups = sorted(
        {
            group
            for link in links
            if _link_traffic(*(cell_by_group[end] for end in link)) == "gradients"
            for group in link
        }
    )
    best: tuple[tuple[int, int], bool, int, int] | None = None
    for group in gradient_groups:
        for candidate, cell in enumerate(cell_by_group):
            if cell[0] == cell_by_group[group][0]:
                continue
            if (group in slow) != (candidate in slow) and not {cell[0], cell_by_group[group][0]} <= set(chosen):
                continue
            change = _link_change(cell_by_group, group, candidate, links)
            rank = (change, cell[1] != cell_by_group[group][1], group, candidate)
            if change[0] < 0 and (best is None or rank < best):
                best = rank
    return best and (best[2], best[3])


def _limitations(
    cell_by_group: Sequence[Cell],
    ranks: Sequence[Sequence[int]],
    chosen: Collection[int],
    stages: int,
    links: Sequence[Link],
    within: Sequence[tuple[int, int]],
) -> list[str]:
    sentences = []
    if chosen:
        names = ", ".join(map(str, sorted(chosen)))
        stay = f"stages {names} of {stages} stay" if len(chosen) > 1 else f"stage {names} of {stages} stays"
        sentences.append(f"{stay} slow; packing limits the damage to {'these' if len(chosen) > 1 else 'this stage'}")
    outer = sorted({0, stages - 1} & set(chosen))
    if outer:
        names = " and ".join(map(str, outer))
        sentences.append(
            f"stage{'s' * (len(outer) > 1)} {names}, at an end of the pipeline, must also contain stragglers"
        )
    for a, b in links:
        carries = _link_traffic(cell_by_group[a], cell_by_group[b])
        if carries == "nothing":
            continue
        effect = "still carries gradients" if carries == "gradients" else "carries the traffic between two stages"
        sentences.append(f"the link between ranks {ranks[a][0]} and {ranks[b][0]} {effect}")
    sentences += [f"the link between ranks {a} and {b} lies within a tensor-parallel group" for a, b in within]
    return sentences
