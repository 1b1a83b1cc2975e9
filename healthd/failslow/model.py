"""The words of fail-slow detection: what is measured, what is found in it, and who is suspected. Frozen values."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from healthd.failslow.times import TimeStyle


class Cause(enum.Enum):
    """Of what kind a slowness is. FALCON (arXiv 2410.12588), table 1 and 2.2, and what a job does to itself."""

    COMPUTE = "compute"  # of a worker, and whether its GPU or its CPU is not known
    COMPUTE_GPU = "compute_gpu"
    COMPUTE_CPU = "compute_cpu"
    COMMUNICATION = "communication"  # and whether within a node or between nodes is not known
    COMMUNICATION_INTRA_NODE = "communication_intra_node"
    COMMUNICATION_INTER_NODE = "communication_inter_node"
    IMBALANCE = "imbalance"  # of the job: a pipeline stage, longer sequences, data loading
    UNKNOWN = "unknown"


class Confidence(enum.Enum):
    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


class Kind(enum.Enum):
    """What a series of times measures. Communication varies more than compute: papers give thresholds by kind."""

    ITERATION = "iteration"  # whole iterations, the default
    BUSY = "busy"  # a rank's own compute
    TRANSFER = "transfer"  # a rank's or a group's communication, without waiting for others


@dataclass(frozen=True, slots=True)
class Series:
    """One worker's, rank's or job's samples, oldest first, cleaned: every value > 0 and finite.

    index: where each sample stands: what the index column has (iterations, seconds), ascending within an attempt; else
    0, 1, 2, ... busy, wait, transfer: seconds (or the unit of value) of the same samples, None if not told, NaN where
    one sample lacks it. regimes: a name a sample (batch size, sequence length), None if not told: another name is
    another regime. starts: positions (0 is always one) at which the job started anew: after them comes a warm-up.
    rows: of each sample its place among the rows of the series, if rows without a value were left out; None if that is
    its position. times: the index is seconds since 1970, and stood in the file as text of this style.
    """

    name: str  # "6"
    value: Sequence[float]
    index: Sequence[float]
    kind_of: str = ""  # what the series columns are called: "worker", for people: "worker 6"
    group: str = ""  # "" if not told
    node: str = ""  # "" if not told
    busy: Sequence[float] | None = None
    wait: Sequence[float] | None = None
    transfer: Sequence[float] | None = None
    regimes: Sequence[str] | None = None
    starts: tuple[int, ...] = (0,)
    rows: Sequence[float] | None = None
    times: TimeStyle | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """One stretch of slowness of one series. Indices are positions in its samples, from 0.

    slowdown: 0.65 is 65 % slower than the regime's baseline. confidence: 0 to 1. alarm_index: the sample at which it
    was known. Neither onset_index nor alarm_index changes once a point is reported; relief_index is None until then.
    """

    onset_index: int
    alarm_index: int
    slowdown: float
    confidence: float
    relief_index: int | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the node of a series told by itself, as root: a condition that stood there. begin, end: as Series.index."""

    node: str
    begin: float
    end: float | None  # None: it still stands
    code: str  # "gpu_clocks/hw_thermal"
    what: str  # a sentence without its end


@dataclass(frozen=True, slots=True)
class Suspect:
    """subject: a series' name, a group's or a node's, as subject_kind says ("worker", "rank", "group", "node").
    whole_stage: it runs all ranks of one role or more, so that no rank elsewhere can take over its work."""

    subject: str
    subject_kind: str
    cause: Cause
    confidence: Confidence
    evidence: tuple[str, ...]  # sentences without their end
    series: tuple[str, ...] = ()  # the names of the series that it is about
    point: Point | None = None
    whole_stage: bool = False


@dataclass(frozen=True, slots=True)
class JobSlow:
    """Slowness that names nobody: all peers share it, or there are too few to compare. whole_stage: as of a Suspect."""

    group: str
    onset: float  # as Series.index
    point: Point
    series: tuple[str, ...]  # those that are slow
    peers: int  # how many there are
    cause: Cause
    why: str  # a sentence without its end: why nobody is named
    whole_stage: bool = False


@dataclass(frozen=True, slots=True)
class SlowThroughout:
    """A series that was slower than its peers from the first sample on: when it became slow is not known.

    measure: what was compared: "own" (the value without waiting), "busy" or "iteration". ratio: time / peers_time, both
    in the unit of the values. group: "" if the peers are all ranks that wait for each other.
    """

    series: str
    series_kind: str
    group: str
    node: str
    measure: str
    ratio: float
    time: float
    peers_time: float
    peers: int


@dataclass(frozen=True, slots=True)
class Judgement:
    """points: by series, in the order of the series that were given. compared: how many series had peers with the same
    work, so that one that was slow from its first sample would be in slow_throughout."""

    points: tuple[tuple[Point, ...], ...]
    suspects: tuple[Suspect, ...] = ()
    job_slow: tuple[JobSlow, ...] = ()
    notes: tuple[str, ...] = field(default=())
    slow_throughout: tuple[SlowThroughout, ...] = ()
    compared: int = 0
