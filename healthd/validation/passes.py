"""Who sends to whom in which pass: pairs of parts that transfer at the same time without sharing one.

The rule is that of FALCON (arXiv 2410.12588, section 4.3): a ring or a tree over all parts is covered in a number of
passes that does not grow with them: an even ring in 2, an odd ring in 3, a binary tree in 4.
"""

from __future__ import annotations

from collections.abc import Callable

Pair = tuple[int, int]  # the sender, the receiver
Pass = tuple[Pair, ...]  # no part is in two pairs of it


def ring(parts: int) -> tuple[Pass, ...]:
    """Each part sends to the next one, the last one to the first: the even edges, the odd ones, and of an odd ring the
    edge that is left over. Of two parts each sends to the other one; one alone, or none, has nobody to send to."""
    if parts < 2:
        return ()
    edges = [(part, (part + 1) % parts) for part in range(parts)]
    left_over = [edges.pop()] if parts % 2 else []
    return tuple(tuple(some) for some in (edges[0::2], edges[1::2], left_over) if some)


def tree(parts: int) -> tuple[Pass, ...]:
    """Each part sends to its two children in a binary tree, numbered by level from 0. A pass has the left, or the
    right, children of every second level: who sends in it is on none of the levels that receive."""
    passes: list[list[Pair]] = [[], [], [], []]
    for child in range(1, parts):
        level = (child + 1).bit_length() - 1
        passes[2 * ((level - 1) % 2) + (child - 1) % 2].append(((child - 1) // 2, child))
    return tuple(tuple(some) for some in passes if some)


SHAPES: dict[str, Callable[[int], tuple[Pass, ...]]] = {"ring": ring, "tree": tree}
