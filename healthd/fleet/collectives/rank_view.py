"""What one rank told of its collectives: values, the same from a flight recorder's dump and from a log.

A lane is what runs in order: the collectives of one process group on one rank. Sends and receives run beside them, in
order only between two ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

Numel = tuple[int, int] | tuple[()]
Dtypes = tuple[tuple[str, ...], tuple[str, ...]] | tuple[()]


class Operation(NamedTuple):
    """sequence     of its lane, as PyTorch numbers it
    order           in what order this rank entered its operations, over all lanes
    name            all_reduce, broadcast, send, ... (without "nccl:")
    numel, dtypes   of input and output; () where they are not told
    created_ns      when it was entered, epoch; 0: not known
    started         whether its GPU is known to have come to it (only where TORCH_NCCL_ENABLE_TIMING was set)
    """

    sequence: int
    order: int
    name: str
    numel: Numel = ()
    dtypes: Dtypes = ()
    created_ns: int = 0
    started: bool = False


@dataclass(slots=True)
class Lane:
    """entered   the highest sequence number that was entered
    first        the first operation that is not done; None: all that were entered are done
    kept         sequence -> operation, of some: the first that are not done, and the last ones
    sure         False: of a log that tells what was entered and never what was done; `first` is the last one entered
    """

    entered: int
    first: Operation | None
    kept: dict[int, Operation] = field(default_factory=dict)
    sure: bool = True

    def left(self, sequence: int) -> bool:
        """Whether this rank is through with it: the collectives of a group run in their order, on one stream."""
        return self.sure and self.entered >= sequence and (self.first is None or self.first.sequence > sequence)


class Membership(NamedTuple):
    """A process group as one rank knows it. ranks: global, in the order of their ranks in the group; None: not told."""

    name: str
    description: str
    ranks: tuple[int, ...] | None


class Pair(NamedTuple):
    """From whom to whom is sent in a group: their ranks in the group."""

    group: str
    source: int
    target: int


class Progress(NamedTuple):
    """The last sequence numbers of a group, of collectives or of sends and receives, whichever came last. started: -1
    where it is not told."""

    entered: int
    done: int
    started: int = -1


@dataclass(slots=True)
class View:
    """rank        -1: not known yet
    source, host   the file, and the host that it names or ""
    version        of the dump; "" of a log
    groups, lanes, progress  by the group's name
    pairs          sends or receives of this rank that are not done
    with_pairs     groups in which it sends or receives
    since_ns       the dump has all that was entered since then; what a ring buffer wrote over is not known
    only_waiting   the dump has only what is not done
    first_ns, last_ns        when it entered its first operation here and its last; 0: not known
    """

    rank: int
    source: str
    host: str = ""
    version: str = ""
    groups: dict[str, Membership] = field(default_factory=dict)
    lanes: dict[str, Lane] = field(default_factory=dict)
    progress: dict[str, Progress] = field(default_factory=dict)
    pairs: dict[Pair, list[Operation]] = field(default_factory=dict)
    with_pairs: set[str] = field(default_factory=set)
    since_ns: int = 0
    only_waiting: bool = False
    first_ns: int = 0
    last_ns: int = 0


def file_name(name: str) -> str:
    """Return a file's name as text. Bytes that are not UTF-8 are replaced."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
