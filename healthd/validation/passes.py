"""Passes of transfers. In a pass, several pairs of GPUs or nodes transfer data at the same time, each in only one pair.

This method is from FALCON (arXiv 2410.12588, section 4.3). The number of passes does not depend on the number of GPUs
or nodes: 2 for an even ring, 3 for an odd ring, 4 for a binary tree.
"""

from __future__ import annotations

from collections.abc import Callable

Pair = tuple[int, int]  # sender, receiver
Pass = tuple[Pair, ...]  # no part is in two pairs


def ring(parts: int) -> tuple[Pass, ...]:
    """Return the passes for a ring: each GPU or node sends to the next one, and the last sends to the first.

    The first pass has the even edges, the second the odd edges. An odd ring has a third pass with the remaining edge.
    Two members send to each other. With fewer members, there are no passes.
    """
    if parts < 2:
        return ()
    edges = [(part, (part + 1) % parts) for part in range(parts)]
    last_edge = [edges.pop()] if parts % 2 else []
    return tuple(tuple(group) for group in (edges[0::2], edges[1::2], last_edge) if group)


def tree(parts: int) -> tuple[Pass, ...]:
    """Return the passes for a binary tree: each GPU or node sends to its two children. The GPUs or nodes are numbered
    by level. In a pass, every other level sends, either to its left or to its right children. A level that sends does
    not receive.
    """
    passes: list[list[Pair]] = [[], [], [], []]
    for child in range(1, parts):
        level = (child + 1).bit_length() - 1
        passes[2 * ((level - 1) % 2) + (child - 1) % 2].append(((child - 1) // 2, child))
    return tuple(tuple(group) for group in passes if group)


SHAPES: dict[str, Callable[[int], tuple[Pass, ...]]] = {"ring": ring, "tree": tree}
