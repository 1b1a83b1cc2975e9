"""Where in a log the literals of the rules stand, by which a line is told from the many that say nothing. Pure.

Most lines of a log repeat an earlier one with other numbers. So a line is looked up by its skeleton (the line without
digits and a-f): only a new skeleton is searched for the literals. With re2 (the extra healthd[scan]) the text is
searched for all of them at once, and is not cut into lines at all. Both find the same (tests/scan/test_scan_fast.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import accumulate, compress, count

from healthd.agent.kernel_log import parse as kernel_parse

SKELETON_BYTES = 2048  # a longer skeleton is not kept
SKELETONS_BYTES = 8 << 20  # for all skeletons
A_SKELETON = 100  # bytes that one takes beside its own

VARIES = b"0123456789abcdef"
# journalctl -o json writes a message that is no UTF-8 as the numbers of its bytes: any literal may be in it.
IN_NUMBERS = tuple(f'"MESSAGE"{before}:{after}[' for before in ("", " ") for after in ("", " "))


def of_rules() -> tuple[str, ...]:
    """The literals of all rules, the site's included."""
    return tuple(kernel_parse.LITERALS)


def _searched() -> tuple[tuple[bytes, bytes, str], ...]:
    """(skeleton, bytes, text) of each literal."""
    return tuple((text.encode().translate(None, VARIES), text.encode(), text) for text in (*of_rules(), *IN_NUMBERS))


Search = Callable[[bytes, int], "Iterator[tuple[int, int]]"]


class Skeletons:
    """The literals of lines, by what is left of a line without numbers. `search` is a Search."""

    def __init__(self) -> None:
        self._literals = _searched()
        self._known: dict[bytes, tuple[tuple[bytes, str], ...]] = {}
        self._size = 0

    def of(self, line: bytes) -> tuple[str, ...]:
        """The literals in a line, in their order."""
        skeleton = line.translate(None, VARIES)
        literals = self._known.get(skeleton)
        if literals is None:
            literals = self._learn(skeleton)
        return tuple([text for literal, text in literals if literal in line]) if literals else ()

    def search(self, text: bytes, start: int) -> Iterator[tuple[int, int]]:
        """Where the lines begin and end that have a literal, from `start` on, where a line begins."""
        rest = text[start:] if start else text
        skeletons = rest.translate(None, VARIES).split(b"\n")
        here, known = set(skeletons), self._known
        there = {skeleton for skeleton in here if known.get(skeleton)}
        new = here.difference(known)
        if not new and not there:
            return
        there.update(skeleton for skeleton in new if self._learn(skeleton))
        if there:
            lines = rest.split(b"\n")
            ends = list(accumulate(map(len, lines)))  # without the ends of lines
            for place in compress(count(), map(there.__contains__, skeletons)):
                line, literals = lines[place], known.get(skeletons[place])
                if literals is not None:  # None: it had no room
                    for literal, _ in literals:
                        if literal in line:
                            break
                    else:
                        continue
                end = start + ends[place] + place
                yield end - len(line), end

    def _learn(self, skeleton: bytes) -> tuple[tuple[bytes, str], ...]:
        literals = tuple((literal, text) for left, literal, text in self._literals if left in skeleton)
        if self._has_room(skeleton):
            self._known[skeleton] = literals
        return literals

    def _has_room(self, skeleton: bytes) -> bool:
        if len(skeleton) > SKELETON_BYTES:
            return False
        self._size += len(skeleton) + A_SKELETON
        if self._size > SKELETONS_BYTES:
            self._known.clear()
            self._size = len(skeleton) + A_SKELETON
        return True


def by_re2() -> Search | None:
    """A Search that finds the literals themselves; None without google-re2."""
    try:
        import re2

        options = re2.Options()
        options.encoding = re2.Options.Encoding.LATIN1  # bytes are bytes
        pattern = re2.compile(b"|".join(re.escape(literal) for _, literal, _ in _searched()), options)
    except (ImportError, AttributeError, TypeError):  # other packages have a module of this name (pyre2, fb-re2)
        return None

    def search(text: bytes, start: int) -> Iterator[tuple[int, int]]:
        while (found := pattern.search(text, start)) is not None:
            begins, end = text.rfind(b"\n", 0, found.start()) + 1, text.find(b"\n", found.end())
            end = len(text) if end < 0 else end
            yield begins, end
            if end == len(text):
                return
            start = end + 1

    return search
