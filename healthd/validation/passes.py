"""Passes of transfers: pairs of parts that transfer at the same time without sharing a part.

The rule is FALCON's (arXiv 2410.12588, section 4.3): a ring or a tree over all parts is covered in a number of passes
that does not grow with the parts: an even ring in 2, an odd ring in 3, a binary tree in 4.
"""

from __future__ import annotations

from collections.abc import Callable

Pair = tuple[int, int]  # sender, receiver
Pass = tuple[Pair, ...]  # no part is in two of its pairs


def ring(parts: int) -> tuple[Pass, ...]:
    """Return the passes of a ring, in which each part sends to the next and the last to the first: the even edges, the
    odd edges, and the remaining edge of an odd ring. Two parts send to each other; for fewer parts there is no pass."""
    if parts < 2:
        return ()
    edges = [(part, (part + 1) % parts) for part in range(parts)]
    last_edge = [edges.pop()] if parts % 2 else []
    return tuple(tuple(group) for group in (edges[0::2], edges[1::2], last_edge) if group)


def tree(parts: int) -> tuple[Pass, ...]:
    """Return the passes of a binary tree, numbered by level from 0: each part sends to its two children. A pass has the
    left, or the right, children of every second level: its senders are on none of the levels that receive."""
    passes: list[list[Pair]] = [[], [], [], []]
    for child in range(1, parts):
        level = (child + 1).bit_length() - 1
        passes[2 * ((level - 1) % 2) + (child - 1) % 2].append(((child - 1) // 2, child))
    return tuple(tuple(group) for group in passes if group)


SHAPES: dict[str, Callable[[int], tuple[Pass, ...]]] = {"ring": ring, "tree": tree}
