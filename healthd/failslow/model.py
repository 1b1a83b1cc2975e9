"""Data model for fail-slow detection: measurements, findings and suspects. All values are immutable."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from healthd.failslow.times import TimeStyle


class Cause(enum.Enum):
    """Kind of slowness: from FALCON (arXiv 2410.12588, table 1 and section 2.2), or caused by the job itself."""

    COMPUTE = "compute"  # slow compute on a worker; it is unknown whether the GPU or the CPU is the cause
    COMPUTE_GPU = "compute_gpu"
    COMPUTE_CPU = "compute_cpu"
    COMMUNICATION = "communication"  # slow communication; it is unknown whether within a node or between nodes
    COMMUNICATION_INTRA_NODE = "communication_intra_node"
    COMMUNICATION_INTER_NODE = "communication_inter_node"
    IMBALANCE = "imbalance"  # caused by the job itself: a pipeline stage, longer sequences, data loading
    UNKNOWN = "unknown"


class Confidence(enum.Enum):
    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


class Kind(enum.Enum):
    """The quantity that a series measures.

    Communication varies more than compute, so papers give thresholds by kind.
    """

    ITERATION = "iteration"  # whole iterations, the default
    BUSY = "busy"  # a rank's own compute
    TRANSFER = "transfer"  # communication of a rank or group, without the time spent waiting for others


@dataclass(frozen=True, slots=True)
class Series:
    """Samples from one worker, rank or job, oldest first. They are cleaned: every value is > 0 and finite.

    Attributes:
        index: position of each sample in the index column (iterations, seconds), ascending within an attempt. Without
            an index column, it is 0, 1, 2, ...
        busy, wait, transfer: times for the same samples, in the same unit as the values; None if not reported, NaN for
            a missing sample.
        regimes: the name of each sample's regime (batch size, sequence length), None if not reported.
        starts: positions at which the job started, always including 0; each start is followed by a warm-up.
        rows: if rows without a value were left out, the position of each sample among the series's rows, otherwise
            None.
        times: if the index is seconds since 1970, the style in which the file writes times.
    """

    name: str  # "6"
    value: Sequence[float]
    index: Sequence[float]
    label: str = ""  # name of the series columns, such as "worker", displayed as "worker 6"
    group: str = ""  # "" if not reported
    node: str = ""  # "" if not reported
    busy: Sequence[float] | None = None
    wait: Sequence[float] | None = None
    transfer: Sequence[float] | None = None
    regimes: Sequence[str] | None = None
    starts: tuple[int, ...] = (0,)
    rows: Sequence[float] | None = None
    times: TimeStyle | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """One slow period in one series. Indices are positions in its samples, from 0.

    After a point is reported, onset_index and alarm_index never change. relief_index is None until the relief.

    Attributes:
        slowdown: 0.65 is 65 % slower than the regime's baseline.
        confidence: 0 to 1.
        alarm_index: the sample at which it was detected.
    """

    onset_index: int
    alarm_index: int
    slowdown: float
    confidence: float
    relief_index: int | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """A condition on a series's node, reported by root. `begin` and `end` have the unit of Series.index."""

    node: str
    begin: float
    end: float | None  # None if still open
    code: str  # "gpu_clocks/hw_thermal"
    text: str  # a sentence without a full stop


@dataclass(frozen=True, slots=True)
class Suspect:
    """The component that is probably slowing a job.

    Attributes:
        subject: name of a series, group or node.
        subject_kind: kind of the subject ("worker", "rank", "group", "node").
        whole_stage: True if the subject runs all ranks of at least one role, so that no other rank can take over its
            work.
    """

    subject: str
    subject_kind: str
    cause: Cause
    confidence: Confidence
    evidence: tuple[str, ...]  # sentences without a full stop
    series: tuple[str, ...] = ()  # names of its series
    point: Point | None = None
    whole_stage: bool = False


@dataclass(frozen=True, slots=True)
class SlowJob:
    """Slowness without a suspect: all peers are slow, or there are too few peers to compare.

    `whole_stage` has the same meaning as in Suspect.
    """

    group: str
    onset: float  # same unit as Series.index
    point: Point
    series: tuple[str, ...]  # the slow series
    peers: int  # number of peers
    cause: Cause
    reason: str  # why there is no suspect, as a sentence without a full stop
    whole_stage: bool = False


@dataclass(frozen=True, slots=True)
class SlowThroughout:
    """A series that was slower than its peers from the first sample. Its onset is unknown.

    Attributes:
        measure: the time that was compared: "own" (the value without waiting), "busy" or "iteration".
        ratio: time divided by peers_time, both in the unit of the values.
        group: "" if the peers are all ranks that wait for each other.
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
class Diagnosis:
    """The result of the analysis.

    Attributes:
        points: the points in each series, in the given order.
        compared_count: number of series that had peers with the same work. If one of them was slow from its first
            sample, it is in slow_throughout.
    """

    points: tuple[tuple[Point, ...], ...]
    suspects: tuple[Suspect, ...] = ()
    slow_jobs: tuple[SlowJob, ...] = ()
    notes: tuple[str, ...] = field(default=())
    slow_throughout: tuple[SlowThroughout, ...] = ()
    compared_count: int = 0
