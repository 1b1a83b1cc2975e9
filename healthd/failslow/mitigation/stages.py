"""S3: exchange of ranks' positions, so that a slow GPU or link costs the job as little as possible. Pure functions.

FALCON (arXiv 2410.12588, S3): a pipeline is as fast as its slowest stage. Stragglers are therefore packed into as few
stages as possible, ceil(stragglers / GPUs of a stage). Interior stages are preferred, because the first and the last
stage have more work (embedding, loss). A slow link should carry only what two neighbouring stages send each other, or
nothing, rather than the gradients of a data-parallel group, which are many times larger.

Whole tensor-parallel groups move: their ranks communicate in each layer, so they are on one node and stay together. A
straggler counts with its group: there are ceil(slow groups / groups of a stage) stages. This is the paper's number if a
group is one GPU, or all of it is slow. Two groups that exchange positions exchange their weights and the positions of
all their ranks. No rank is without a position in between.

For stragglers, the number of moves is minimal. For links, one move is found if one is enough. If several are needed,
each next one is the most effective, which is not necessarily minimal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from healthd.common.errors import HealthdError

MOST_RANKS = 65_536
MOST_LINKS = 256


class WrongTopology(HealthdError):
    """The positions do not form stages x data-parallel groups x tensor-parallel ranks. The message is one sentence."""


class Place(NamedTuple):
    """Position of a rank in the job: pipeline stage, data-parallel group, tensor-parallel rank, all from 0."""

    stage: int
    dp: int
    tp: int


class Swap(NamedTuple):
    """Ranks a[i] and b[i] exchange positions, for all i."""

    a: tuple[int, ...]
    b: tuple[int, ...]
    why: str  # "straggler", "link"


class Topology(NamedTuple):
    """Result of the rearrangement.

    stages: stages that contain all stragglers now, ascending. positions: of each rank, after the swaps in order.
    limitations: sentences without a full stop about problems that no move solves.
    """

    stages: tuple[int, ...]
    swaps: tuple[Swap, ...]
    places: Mapping[int, Place]
    remains: tuple[str, ...]


Cell = tuple[int, int]  # (stage, dp) of a tensor-parallel group
Link = tuple[int, int]  # two tensor-parallel groups, by number


def rearranged(
    places: Mapping[int, Place], stragglers: Collection[int], slow_links: Collection[tuple[int, int]] = ()
) -> Topology:
    """Return the swaps for these stragglers and slow links. Raises InvalidTopology.

    Args:
        positions: of each rank.
        stragglers: ranks.
        slow_links: pairs of ranks with a slow connection.
    """
    stages, width, depth = _shape(places)
    groups: dict[Cell, list[int]] = defaultdict(lambda: [0] * depth)
    for rank, place in places.items():
        groups[place.stage, place.dp][place.tp] = rank
    cells = sorted(groups)
    ranks = [groups[cell] for cell in cells]  # of each group; from here on a group is identified by its number
    group_of = {rank: group for group, its in enumerate(ranks) for rank in its}
    _check_named(group_of, stragglers, slow_links)
    slow = {group_of[rank] for rank in stragglers}
    links, within = _links(slow_links, group_of)

    where = list(cells)  # cell of each group
    chosen = _chosen(where, slow, stages, width)
    moves = [(*pair, "straggler") for pair in _packing(where, slow, chosen, links)]
    for a, b, _ in moves:
        where[a], where[b] = where[b], where[a]
    while (move := _best_for_links(where, slow, chosen, links)) is not None:
        a, b = move
        where[a], where[b] = where[b], where[a]
        moves.append((a, b, "link"))
    return Topology(
        tuple(sorted(chosen)),
        tuple(Swap(tuple(ranks[a]), tuple(ranks[b]), why) for a, b, why in moves),
        {rank: Place(*where[group], tp) for group, its in enumerate(ranks) for tp, rank in enumerate(its)},
        tuple(_remains(where, ranks, chosen, stages, links, within)),
    )


def _shape(places: Mapping[int, Place]) -> tuple[int, int, int]:
    """Return the number of stages, data-parallel groups and tensor-parallel ranks."""
    if not places:
        raise WrongTopology("no rank given")
    if len(places) > MOST_RANKS:
        raise WrongTopology(f"there are {len(places):,} ranks; the maximum is {MOST_RANKS:,}")
    least = Place(*map(min, zip(*places.values(), strict=True)))
    most = Place(*map(max, zip(*places.values(), strict=True)))
    shape = (most.stage + 1, most.dp + 1, most.tp + 1)
    if least != (0, 0, 0) or len(set(places.values())) < len(places) or len(places) != shape[0] * shape[1] * shape[2]:
        raise WrongTopology(
            f"{len(places):,} ranks do not fill {shape[0]:,} stages x {shape[1]:,} data-parallel groups x "
            f"{shape[2]:,} tensor-parallel ranks, each position once and from 0"
        )
    return shape


def _check_named(
    group_of: Mapping[int, int], stragglers: Collection[int], slow_links: Collection[tuple[int, int]]
) -> None:
    named = {*stragglers, *(rank for link in slow_links for rank in link)}
    unknown = sorted(named - set(group_of))
    if unknown:
        raise WrongTopology(f"rank {unknown[0]} has no position in the job")
    if len(slow_links) > MOST_LINKS:
        raise WrongTopology(f"{len(slow_links):,} slow links are too many; the maximum is {MOST_LINKS:,}")


def _links(slow: Collection[tuple[int, int]], group_of: Mapping[int, int]) -> tuple[list[Link], list[tuple[int, int]]]:
    """Return the links between two groups, each once, and the links within one group, which no move improves."""
    links, within = set(), []
    for one, other in sorted(slow):
        a, b = sorted((group_of[one], group_of[other]))
        if a == b:
            within.append((one, other))
        else:
            links.add((a, b))
    return sorted(links), within


def _chosen(where: Sequence[Cell], slow: Collection[int], stages: int, width: int) -> set[int]:
    """Return the stages for the slow groups: as few as possible, interior first, then those with most slow groups."""
    held = [0] * stages
    for group in slow:
        held[where[group][0]] += 1
    outer = {0, stages - 1}
    order = sorted(range(stages), key=lambda stage: (stage in outer, -held[stage], stage))
    return set(order[: -(-len(slow) // width)])


def _packing(
    where: Sequence[Cell], slow: Collection[int], chosen: Collection[int], links: Sequence[Link]
) -> list[tuple[int, int]]:
    """Return the moves of slow groups into the chosen stages, each with the healthy group for the exchange.

    There is one move for each slow group outside the chosen stages, which is the minimum. The healthy group is the one
    with the fewest slow links that carry gradients, preferably of the same pipeline.
    """
    now, pairs = list(where), []
    free = [group for group, (stage, _) in enumerate(where) if stage in chosen and group not in slow]
    for group in sorted(slow):
        if where[group][0] in chosen:
            continue
        best = min(free, key=lambda other: (_change(now, group, other, links), now[other][1] != now[group][1], other))
        free.remove(best)
        now[group], now[best] = now[best], now[group]
        pairs.append((group, best))
    return pairs


def _change(where: Sequence[Cell], a: int, b: int, links: Sequence[Link]) -> tuple[int, int]:
    """Return the increase of slow links that carry gradients, and of slow links between neighbouring stages, after a
    swap.
    """
    if not links:
        return 0, 0
    touched = [link for link in links if a in link or b in link]
    new = {a: where[b], b: where[a]}
    before = [_carries(where[one], where[other]) for one, other in touched]
    after = [_carries(new.get(one, where[one]), new.get(other, where[other])) for one, other in touched]
    return after.count("gradients") - before.count("gradients"), after.count("pipeline") - before.count("pipeline")


def _carries(one: Cell, other: Cell) -> str:
    if one[0] == other[0]:
        return "gradients"
    return "pipeline" if one[1] == other[1] and abs(one[0] - other[0]) == 1 else "nothing"


def _best_for_links(
    where: Sequence[Cell], slow: Collection[int], chosen: Collection[int], links: Sequence[Link]
) -> tuple[int, int] | None:
    """Return the move that frees most slow links from gradients, or None. The stragglers stay packed."""
    bad = sorted({group for link in links if _carries(*(where[one] for one in link)) == "gradients" for group in link})
    best: tuple[tuple[int, int], bool, int, int] | None = None
    for group in bad:
        for other, cell in enumerate(where):
            if cell[0] == where[group][0]:
                continue
            if (group in slow) != (other in slow) and not {cell[0], where[group][0]} <= set(chosen):
                continue
            more = _change(where, group, other, links)
            rank = (more, cell[1] != where[group][1], group, other)
            if more[0] < 0 and (best is None or rank < best):
                best = rank
    return best and (best[2], best[3])


def _remains(
    where: Sequence[Cell],
    ranks: Sequence[Sequence[int]],
    chosen: Collection[int],
    stages: int,
    links: Sequence[Link],
    within: Sequence[tuple[int, int]],
) -> list[str]:
    said = []
    if chosen:
        names = ", ".join(map(str, sorted(chosen)))
        stay = f"stages {names} of {stages} stay" if len(chosen) > 1 else f"stage {names} of {stages} stays"
        said.append(f"{stay} slow: packing limits the damage to them")
    outer = sorted({0, stages - 1} & set(chosen))
    if outer:
        names = " and ".join(map(str, outer))
        said.append(f"stage{'s' * (len(outer) > 1)} {names}, at an end of the pipeline, must contain stragglers too")
    for a, b in links:
        carries = _carries(where[a], where[b])
        if carries == "nothing":
            continue
        what = "still carries gradients" if carries == "gradients" else "carries the traffic between two stages"
        said.append(f"the link of ranks {ranks[a][0]} and {ranks[b][0]} {what}")
    said += [f"the link of ranks {a} and {b} lies within a tensor-parallel group" for a, b in within]
    return said
