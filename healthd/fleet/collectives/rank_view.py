"""Records of one rank's collectives, in the same form for flight recorder dumps and for logs.

A lane contains operations that run in order: one process group's collectives on one rank. Sends and receives run
concurrently with collectives and are ordered only between two ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

Numel = tuple[int, int] | tuple[()]
Dtypes = tuple[tuple[str, ...], tuple[str, ...]] | tuple[()]


class Operation(NamedTuple):
    """A collective, send or receive that a rank entered.

    Attributes:
        sequence: number within its lane, assigned by PyTorch.
        order: position among all operations of this rank, over all lanes.
        name: all_reduce, broadcast, send, ... (without "nccl:").
        numel, dtypes: number of elements and data types of the input and output; () if not recorded.
        created_ns: time at which it was entered (epoch), 0 if unknown.
        started: True if the GPU is known to have started it (only with TORCH_NCCL_ENABLE_TIMING).
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
    """State of a lane.

    Attributes:
        entered: the highest sequence number that was entered.
        first: the first operation that is not done, or None if all entered operations are done.
        operations: the first pending operations and the last operations, by sequence number.
        has_completions: False for a log without completions; `first` is then the last operation entered.
    """

    entered: int
    first: Operation | None
    operations: dict[int, Operation] = field(default_factory=dict)
    has_completions: bool = True

    def has_finished(self, sequence: int) -> bool:
        """Return True if this rank finished the operation.

        This can be inferred because a group's collectives run in order.
        """
        return (
            self.has_completions and self.entered >= sequence and (self.first is None or self.first.sequence > sequence)
        )


class Membership(NamedTuple):
    """A process group in one rank's records.

    `ranks` are global ranks in the order of their group ranks, or None if unknown.
    """

    name: str
    description: str
    ranks: tuple[int, ...] | None


class Pair(NamedTuple):
    """A sender and a receiver. Both numbers are ranks within their group."""

    group: str
    source: int
    target: int


class Progress(NamedTuple):
    """A group's last sequence numbers.

    These are the numbers of collectives or of sends and receives, whichever ran last.

    `started` is -1 if unknown.
    """

    entered: int
    done: int
    started: int = -1


@dataclass(slots=True)
class RankView:
    """Records of one rank.

    Attributes:
        rank: -1 if unknown so far.
        source, host: the file, and the host in its name, or "".
        version: version of the dump, "" for a log.
        groups, lanes, progress: each is keyed by the group's name.
        pairs: this rank's pending sends or receives.
        with_pairs: groups in which it sends or receives.
        since_ns: time from which the dump is complete; earlier entries in the ring buffer were overwritten.
        has_only_pending: True if the dump has only pending operations.
        first_ns, last_ns: times at which the rank entered the first and last operation in these records, 0 if unknown.
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
    has_only_pending: bool = False
    first_ns: int = 0
    last_ns: int = 0


def file_name(name: str) -> str:
    """Return a file's name as text. Bytes that are not UTF-8 are replaced."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
