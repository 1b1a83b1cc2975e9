"""Passes of transfers. A pass contains pairs of parts that transfer at the same time without sharing a part.

This method is from FALCON (arXiv 2410.12588, section 4.3). The number of passes does not depend on the number of parts:
2 for an even ring, 3 for an odd ring, 4 for a binary tree.
"""

from __future__ import annotations

from collections.abc import Callable

Pair = tuple[int, int]  # sender, receiver
Pass = tuple[Pair, ...]  # no part is in two pairs


def ring(parts: int) -> tuple[Pass, ...]:
    """Return the passes for a ring, in which each part sends to the next and the last part sends to the first.

    The passes are the even edges, the odd edges and, in an odd ring, the remaining edge. Two parts send to each other.
    With fewer parts there are no passes.
    """
    if parts < 2:
        return ()
    edges = [(part, (part + 1) % parts) for part in range(parts)]
    last_edge = [edges.pop()] if parts % 2 else []
    return tuple(tuple(group) for group in (edges[0::2], edges[1::2], last_edge) if group)


def tree(parts: int) -> tuple[Pass, ...]:
    """Return the passes for a binary tree, in which each part sends to its two children. Parts are numbered by level.

    A pass contains either the left or the right children on every other level, so the levels that send do not receive.
    """
    passes: list[list[Pair]] = [[], [], [], []]
    for child in range(1, parts):
        level = (child + 1).bit_length() - 1
        passes[2 * ((level - 1) % 2) + (child - 1) % 2].append(((child - 1) // 2, child))
    return tuple(tuple(group) for group in passes if group)


SHAPES: dict[str, Callable[[int], tuple[Pass, ...]]] = {"ring": ring, "tree": tree}
