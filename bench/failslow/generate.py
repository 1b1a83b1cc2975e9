"""Generate sets of series from a seed. A set is one job, with the truth about where and why it became slow.

Half of the sets are synchronous gangs, in which every rank waits for the slowest rank. All ranks have the same
iteration time, which is the maximum of busy + transfer over the ranks. Each rank reports its busy, wait and transfer
time. The others are workers that do not wait for each other and report only their iteration times. Causes, their
frequency by duration, and the variation of communication are those of FALCON (arXiv 2410.12588v1, tables 1 and 2).
Pauses, warm-up, sequence lengths and uneven stages follow "Understanding Stragglers in Large Model Training" (arXiv
2505.05713).

This code does not depend on the detector. The height of a slowdown is the increase of the iteration time, without
noise, relative to the baseline of the regime. Its onset is the first iteration with 10 % or more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from healthd.failslow.model import Cause, Evidence, Series

Array = NDArray[np.float64]

POSITIVE, NEGATIVE = 250, 250
SLOW = 0.10  # the onset is the first iteration with this slowdown, FALCON 2.2
CVS = (0.02, 0.05, 0.10)
MINUTES = (10, 24, 72)  # mean durations of the slow jobs in FALCON's three probes (table 1)
HEIGHTS = (0.15, 0.60)
SHAPES = ("step", "ramp", "staircase")
SHAPE_ODDS = (0.6, 0.2, 0.2)
# Causes by duration in minutes. FALCON, table 1: CPUs and GPUs in one node, congestion between nodes and, in the
# largest jobs, several causes at once. Several causes are two events here.
CAUSES: dict[int, tuple[tuple[Cause, float], ...]] = {
    10: ((Cause.COMPUTE_CPU, 0.5), (Cause.COMPUTE_GPU, 0.3), (Cause.COMMUNICATION_INTRA_NODE, 0.2)),
    24: ((Cause.COMMUNICATION_INTER_NODE, 0.7), (Cause.COMMUNICATION_INTRA_NODE, 0.15), (Cause.COMPUTE_CPU, 0.15)),
    72: ((Cause.COMMUNICATION_INTER_NODE, 0.7), (Cause.COMPUTE_GPU, 0.3)),
}
# variation from one iteration to the next, relative to the height: a throttled GPU is steady, a shared link is not
FLUCTUATION = {
    Cause.COMPUTE_GPU: 0.03,
    Cause.COMPUTE_CPU: 0.15,
    Cause.COMMUNICATION_INTRA_NODE: 0.10,
    Cause.COMMUNICATION_INTER_NODE: 0.29,  # FALCON, table 2
}
HEALTHY = (
    "jitter",
    "bimodal",
    "drift_told",
    "drift",
    "warm_up",
    "pauses",
    "gaps",
    "restarts",
    "imbalance",
    "batch_size",
    "small_step",
    "quiet",
)
# Probability of each healthy disturbance in a set.
DISTURBANCES = {
    "warm_up": 0.4,
    "pauses": 0.3,
    "jitter": 0.2,
    "gaps": 0.15,
    "imbalance": 0.3,
    "restarts": 0.1,
    "bimodal": 0.05,
    "batch_size": 0.07,
}
QUIET_BEFORE = 60  # number of iterations without a slowdown at the beginning, after a warm-up, or in a new regime
MAX_ITERATIONS = 3000  # iterations of one event


@dataclass(frozen=True, slots=True)
class Event:
    """One slowdown. begin, onset, relief and end are iterations of the job, from 0; relief is None if it lasts.

    begin        the first iteration above normal
    onset        the first iteration with 10 % or more; equal to begin for a step
    early, late  where the slowdown crosses 8 % and 12 %; noise makes these indistinguishable from 10 %. For a step,
                 both equal begin
    height       maximum slowdown, relative to the iteration time
    slow         names of the series that cause it
    names        other correct answers (a node, a group)
    nameable     True if the cause can be named: fewer than half of at least four peers of one role are slow, and the
                 peers reported enough
    """

    cause: Cause
    shape: str
    begin: int
    onset: int
    relief: int | None
    end: int
    early: int
    late: int
    height: float
    slow: frozenset[str]
    names: frozenset[str]
    nameable: bool


@dataclass(frozen=True, slots=True)
class Made:
    """One set: its series, the evidence of its nodes, and the truth. at: for each sample, the iteration of the job."""

    name: str
    gang: bool
    about: str  # for a healthy set an entry of HEALTHY, otherwise the shape of the first event
    cv: float
    minutes: int
    iteration_seconds: float
    disturbances: frozenset[str]
    events: tuple[Event, ...]
    series: tuple[Series, ...]
    at: tuple[NDArray[np.int64], ...]
    evidence: tuple[Evidence, ...] = ()

    @property
    def positive(self) -> bool:
        return bool(self.events)


@dataclass(slots=True)
class _Job:
    """A job under construction. Arrays have the shape iterations x ranks; their unit is the normal iteration time.

    stall: a delay of all ranks.
    """

    random: np.random.Generator
    gang: bool
    cv: float
    node: list[int]
    stage: list[int]
    tensor: list[int]
    replica: list[int]
    busy: Array
    transfer: Array
    stall: Array
    regime: list[str] | None = None
    starts: list[int] = field(default_factory=lambda: [0])
    lost: NDArray[np.bool_] | None = None  # samples that were not recorded
    calm: Array | None = None  # busy + transfer before pauses and jitter

    @property
    def iterations(self) -> int:
        return int(self.busy.shape[0])

    @property
    def ranks(self) -> int:
        return int(self.busy.shape[1])

    def time(self) -> Array:
        """Return the time of each rank (iterations x ranks). In a gang, all ranks have the time of the slowest."""
        own = self.busy + self.transfer
        return (own.max(axis=1, keepdims=True) if self.gang else own) + self.stall


def sets(
    seed: int, positive: int = POSITIVE, negative: int = NEGATIVE, part: int = 0, parts: int = 1
) -> Iterator[Made]:
    """Yield the sets of one seed, or one of `parts` equal parts of them, for one process.

    Each set has its own generator, so the first ten of 250 equal the first ten of ten.
    """
    for kind, count in enumerate((negative, positive)):
        for number in range(part, count, parts):
            random = np.random.default_rng((seed, kind, number))
            yield _made(random, f"{seed}-{('healthy', 'slow')[kind]}-{number}", number, kind == 1)


def _made(random: np.random.Generator, name: str, number: int, slow: bool) -> Made:
    # These are not drawn at random: each half, CV and duration has the same share in every seed.
    gang, cv, minutes = number % 2 == 0, CVS[number // 2 % 3], MINUTES[number // 6 % 3]
    if slow:
        about = str(random.choice(SHAPES, p=SHAPE_ODDS))
    else:
        about = HEALTHY[number // 2 % len(HEALTHY)]
        cv = CVS[int(random.integers(3))]
    causes, odds = zip(*CAUSES[minutes], strict=True)
    cause = causes[int(random.choice(len(causes), p=odds))]
    # The number of iterations is limited: 72 minutes of 0.3 s each would be 14,400.
    fastest = max(0.3, minutes * 60 / MAX_ITERATIONS)
    seconds = float(np.exp(random.uniform(math.log(fastest), math.log(20.0))))
    duration = max(30, round(minutes * 60 / seconds))
    disturbances = {
        name_of_disturbance
        for name_of_disturbance, probability in DISTURBANCES.items()
        if random.random() < probability
    }
    if not slow:
        disturbances = {
            name_of_disturbance for name_of_disturbance in disturbances if name_of_disturbance not in _excluded(about)
        } | {about}
        iterations = int(random.integers(300, 2000))
        plan: list[tuple[int, int, int | None]] = []
    else:
        warm = 60 if "warm_up" in disturbances else 0
        begin = warm + QUIET_BEFORE + int(random.integers(0, 240))
        if "batch_size" in disturbances:
            begin += QUIET_BEFORE * 2
        is_lasting = random.random() < 0.3
        tail = 0 if is_lasting else int(random.integers(QUIET_BEFORE, 300))
        if is_lasting:  # the job ends before the slowness does
            duration = max(40, int(duration * random.uniform(0.3, 1.0)))
        plan = [(begin, begin + duration, None if is_lasting else begin + duration)]
        iterations = begin + duration + tail
        if not is_lasting and random.random() < (0.3 if minutes == 72 else 0.1):  # table 1: "multiple"
            second = iterations + int(random.integers(0, 60))
            length = int(random.integers(40, 200))
            plan.append((second, second + length, second + length))
            iterations = second + length + int(random.integers(QUIET_BEFORE, 200))
    job = _gang_or_workers(random, gang, cv, minutes, cause, iterations, "imbalance" in disturbances)
    _add_disturbances(job, disturbances, about, plan)
    events = []
    for position, (begin, end, relief) in enumerate(plan):
        event_cause = cause if position == 0 else causes[int(random.choice(len(causes), p=odds))]
        shape = about if position == 0 else "step"
        events.append(_apply_slowdown(job, event_cause, shape, begin, end, relief))
    return _report(job, name, about, minutes, seconds, frozenset(disturbances), tuple(events))


def _excluded(about: str) -> tuple[str, ...]:
    """Return the disturbances that a healthy set must not have: they would make it slow, or hide its subject."""
    if about in ("drift", "small_step", "drift_told"):
        return ("batch_size", "restarts", "bimodal")
    if about == "batch_size":
        return ("restarts",)
    return ("batch_size",) if about == "restarts" else ()


# --- the job without a slowdown


def _gang_or_workers(
    random: np.random.Generator, gang: bool, cv: float, minutes: int, cause: Cause, iterations: int, imbalance: bool
) -> _Job:
    if not gang:
        return _workers(random, cv, cause, iterations, imbalance)
    ranks_per_node = int(random.choice((4, 8)))
    nodes = 1 if minutes == 10 else int(random.choice((2, 4))) if minutes == 24 else int(random.choice((2, 4, 8)))
    ranks = ranks_per_node * nodes
    # The order of ranks is Megatron's: tensor parallel within a node, then data parallel, then stages.
    tensor = int(random.choice((1, 2, 4), p=(0.2, 0.3, 0.5)))
    stages = 2 if imbalance and ranks // tensor >= 4 else 1
    if stages == 2 and ranks >= 32 and random.random() < 0.5:
        stages = 4
    replicas = ranks // tensor // stages
    order = [(p, d, t) for p in range(stages) for d in range(replicas) for t in range(tensor)]
    level = np.ones(stages)
    if stages > 1:  # the last stage computes the loss, the first one the embedding; the slowest stage has level 1
        level = random.uniform(0.6, 1.0, stages)
        level[random.choice((0, stages - 1))] = 1.0
    share = random.uniform(0.1, 0.35)  # communication's share of the iteration
    own, between = cv * 0.5, min(random.uniform(0.02, 0.29), 0.5 * cv / share)
    rho = random.uniform(0.2, 0.5) if random.random() < 0.25 else 0.0
    skewed = "gamma" if random.random() < 0.5 and not rho else "lognormal"
    busy = (1 - share) * level[[p for p, _, _ in order]] * _noise(random, own, (iterations, ranks), 0.0, skewed)
    group = {
        (p, t): _noise(random, between, (iterations, 1), 0.0, "gamma") for p in range(stages) for t in range(tensor)
    }
    transfer = share * np.hstack([group[p, t] for p, _, t in order])  # a collective takes equally long for its group
    slowest = (busy + transfer).max(axis=1)
    shared = math.sqrt(max(cv**2 - (slowest.std() / slowest.mean()) ** 2, (0.3 * cv) ** 2))
    shared_noise = _noise(random, shared, (iterations, 1), rho, skewed)
    return _Job(
        random,
        True,
        cv,
        [rank // ranks_per_node for rank in range(ranks)],
        [p for p, _, _ in order],
        [t for _, _, t in order],
        [d for _, d, _ in order],
        busy * shared_noise,
        transfer * shared_noise,
        np.zeros((iterations, ranks)),
    )


def _workers(random: np.random.Generator, cv: float, cause: Cause, iterations: int, imbalance: bool) -> _Job:
    """Return a job whose workers do not wait for each other. A quarter of these jobs report only one series."""
    workers = 1 if random.random() < 0.25 else int(random.choice((4, 6, 8, 10, 16)))
    workers_per_node = 2 if random.random() < 0.3 else 1
    level = random.uniform(0.95, 1.05, workers)
    if imbalance:  # workers may have different GPUs or shards: those of Alibaba's job_4 differ by a factor of 4
        level *= np.exp(random.uniform(0, math.log(random.uniform(1.3, 4.0)), workers))
    rho = random.uniform(0.2, 0.5) if random.random() < 0.25 else 0.0
    skewed = "gamma" if random.random() < 0.5 and not rho else "lognormal"
    busy = level * _noise(random, cv, (iterations, workers), rho, skewed)
    no_transfer = np.zeros((iterations, workers))
    places = list(range(workers))
    nodes = [rank // workers_per_node for rank in places]
    return _Job(random, False, cv, nodes, [0] * workers, [0] * workers, places, busy, no_transfer, no_transfer.copy())


def _noise(random: np.random.Generator, cv: float, shape: tuple[int, int], rho: float, family: str) -> Array:
    """Return random factors with mean 1 and the given CV. rho: correlation of consecutive iterations."""
    if family == "gamma":
        return random.gamma(1 / cv**2, cv**2, shape)
    sigma = math.sqrt(math.log(1 + cv**2))
    z = random.standard_normal(shape)
    if rho:
        z *= math.sqrt(1 - rho**2)
        z[0] /= math.sqrt(1 - rho**2)
        for at in range(1, shape[0]):
            z[at] += rho * z[at - 1]
    return np.exp(sigma * z - sigma**2 / 2)


# --- what every job may have


def _add_disturbances(
    job: _Job, disturbances: set[str], about: str, plan: Sequence[tuple[int, int, int | None]]
) -> None:
    """Add healthy variation to the job, before a slowdown is applied.

    plan: intervals [begin, end) that will be slow.
    """
    random, iterations, main = job.random, job.iterations, not plan
    first = plan[0][0] if plan else iterations
    if "restarts" in disturbances:
        room = (80, iterations - 80) if main else (min(20, first // 4), first - QUIET_BEFORE - 60)
        for _ in range(int(random.integers(1, 4)) if main else 1):
            if room[0] < room[1]:
                job.starts.append(int(random.integers(*room)))
        job.starts = sorted({0, *(at for at in job.starts if at == 0 or at > 60 or not main)})
    if "warm_up" in disturbances or "restarts" in disturbances:
        for start in job.starts:
            if start == 0 and "warm_up" not in disturbances:
                continue
            length = int(random.integers(5, 51))
            more = random.uniform(0.3, 3.0) * np.exp(-np.arange(iterations - start) / (length / 6))
            job.busy[start:] *= 1 + np.where(more > 0.01, more, 0)[:, None]
    if "batch_size" in disturbances:
        _add_batch_sizes(job, first, main)
    if "bimodal" in disturbances:
        probability, ratio = random.uniform(0.1, 0.5), random.uniform(1.15, 1.8 if main else 1.4)
        long = random.random((iterations, max(job.replica) + 1)) < probability  # each replica has its own sequences
        job.busy *= np.where(long[:, job.replica], ratio, 1.0)
    if about == "drift_told":
        _add_sequence_lengths(job)
    if about == "drift":
        scale = random.uniform(50, 300)
        walk = _noise(random, 0.5, (iterations, 1), math.exp(-1 / scale), "lognormal")
        away = 0.07 * np.tanh(1.5 * np.log(walk))
        job.busy *= 1 + (away - np.median(away[: 2 * QUIET_BEFORE])).clip(-0.07, 0.07)  # relative to the beginning
    if about == "small_step":
        _add_small_steps(job)
    job.calm = job.busy + job.transfer
    if "jitter" in disturbances:
        _add_jitter(job, random.uniform(0.005, 0.03) if main else random.uniform(0.002, 0.01))
    if "pauses" in disturbances:
        _add_pauses(job, main)
    if "gaps" in disturbances:
        _drop_samples(job, plan)


def _add_batch_sizes(job: _Job, first: int, main: bool) -> None:
    """Change the batch size. It is reported as a regime: each size has a name and its own iteration time."""
    size, begin = int(job.random.choice((16, 32, 64))), 0
    names: list[str] = []
    room = (QUIET_BEFORE, job.iterations - 30) if main else (QUIET_BEFORE, max(QUIET_BEFORE + 1, first - QUIET_BEFORE))
    changes = sorted({int(job.random.integers(*room)) for _ in range(int(job.random.integers(1, 5)) if main else 1)})
    cost = {size: 1.0}  # a size that occurs again takes as long as before
    for end in (*changes, job.iterations):
        names += [f"batch {size}"] * (end - begin)
        job.busy[begin:end] *= cost[size]
        next_size = int(size * job.random.choice((0.5, 2)))
        longer = job.random.uniform(1.2, 2.0)
        cost.setdefault(next_size, cost[size] * (longer if next_size > size else 1 / longer))
        size, begin = next_size, end
    job.regime = names


def _add_sequence_lengths(job: _Job) -> None:
    """Simulate a curriculum: the buckets of sequence lengths become longer, and some shorter buckets occur again."""
    lengths = 512 * (1 + np.arange(int(job.random.integers(3, 7))))
    names, begin = list[str](), 0
    cost = lengths / lengths[0]
    share = job.random.uniform(0.2, 0.8)  # share of the iteration that grows with the sequence
    while begin < job.iterations:
        end = min(job.iterations, begin + int(job.random.integers(30, 200)))
        max_bucket = min(len(lengths) - 1, int(len(lengths) * end / job.iterations))
        bucket = max_bucket if job.random.random() < 0.7 else int(job.random.integers(0, max_bucket + 1))
        names += [f"sequence {lengths[bucket]}"] * (end - begin)
        job.busy[begin:end] *= 1 - share + share * cost[bucket]
        begin = end
    job.regime = names


def _add_small_steps(job: _Job) -> None:
    """Add one to three steps of 4 to 7 %. Each step ends before the next begins."""
    at = QUIET_BEFORE
    for _ in range(int(job.random.integers(1, 4))):
        begin = at + int(job.random.integers(20, 150))
        end = begin + int(job.random.integers(50, 400))
        if begin >= job.iterations:
            return
        height = job.random.uniform(0.04, 0.07)
        affected = slice(None) if job.gang or job.random.random() < 0.5 else int(job.random.integers(job.ranks))
        job.busy[begin:end, affected] *= 1 + height
        job.transfer[begin:end, affected] *= 1 + height
        at = end


def _add_jitter(job: _Job, rate: float) -> None:
    """Add heavy tails, and bursts of two to seven iterations, on one rank, as if its host were disturbed."""
    random = job.random
    hit = np.flatnonzero(random.random(job.iterations) < rate)
    job.busy[hit, random.integers(0, job.ranks, len(hit))] *= 1 + 0.3 * (1 + random.pareto(1.5, len(hit))).clip(max=30)
    for _ in range(random.poisson(job.iterations * rate / 10)):
        begin, length = int(random.integers(0, job.iterations)), int(random.integers(2, 8))
        job.busy[begin : begin + length, int(random.integers(job.ranks))] *= random.uniform(1.2, 2.0)


def _add_pauses(job: _Job, main: bool) -> None:
    """Add pauses (checkpoints, evaluations, data loader, garbage collection): 1 to 3 iterations take 1.5 to 10 times as
    long."""
    random, usual_time = job.random, float(np.median(job.time()))
    for _ in range(int(random.integers(1, 4)) if main else 1):
        every, length = int(random.integers(20, 500)), int(random.integers(1, 4))
        times, wobble = random.uniform(1.5, 10.0), int(random.integers(0, 3))
        collected = random.random() < 0.3  # each rank at its own time; the others wait for it
        for rank in range(job.ranks) if collected and not job.gang else (None,):
            phase = int(random.integers(0, every))
            for at in range(phase, job.iterations, every):
                span = slice(max(0, at + int(random.integers(-wobble, wobble + 1))), None)
                span = slice(span.start, span.start + length)
                extra = (times - 1) * usual_time * random.uniform(0.85, 1.15)
                if rank is not None:
                    job.stall[span, rank] += extra
                elif collected:
                    job.busy[span, int(random.integers(job.ranks))] += extra
                else:
                    job.stall[span] += extra


def _drop_samples(job: _Job, plan: Sequence[tuple[int, int, int | None]]) -> None:
    """Drop samples: some single samples and one stretch, but none around an onset."""
    random = job.random
    lost = random.random((job.iterations, job.ranks)) < random.uniform(0.005, 0.05)
    length = int(random.integers(20, 300))
    begin = int(random.integers(QUIET_BEFORE, max(QUIET_BEFORE + 1, job.iterations - length)))
    clear = all(begin + length < start - 30 or begin > end + 30 for start, end, _ in plan)
    if clear and begin + length < job.iterations - 30:
        affected = slice(None) if random.random() < 0.5 else int(random.integers(job.ranks))
        lost[begin : begin + length, affected] = True
    lost[0] = False
    job.lost = lost


# --- the slowdown


def _apply_slowdown(job: _Job, cause: Cause, shape: str, begin: int, end: int, relief: int | None) -> Event:
    """Apply one slowdown to the job. If the rank is faster than the slowest, the slowdown first uses up its lead."""
    slow = _culprits(job, cause)
    height = float(job.random.uniform(*HEIGHTS))
    level = _levels(job.random, shape, height, end - begin)
    is_compute = cause in (Cause.COMPUTE_CPU, Cause.COMPUTE_GPU) or not job.gang
    wobble = _noise(job.random, FLUCTUATION[cause], (end - begin, 1), 0.0, "gamma")
    assert job.calm is not None
    own = job.calm[begin:end]
    if job.gang:  # the slowest culprit, and so the iteration, takes as long as the slowest rank plus the height
        slowest = own.max(axis=1, keepdims=True)
        added = slowest - own[:, slow].max(axis=1, keepdims=True) + slowest * level[:, None] * wobble
    else:
        added = own[:, slow] * level[:, None] * wobble
    (job.busy if is_compute else job.transfer)[begin:end, slow] += added
    early, onset, late = (begin + int(np.argmax(level >= threshold)) for threshold in (0.08, SLOW, 0.12))
    names = frozenset(str(rank) for rank in slow)
    nodes = {job.node[rank] for rank in slow}
    other_names = {_node_name(node) for node in nodes} if len(nodes) == 1 else set[str]()
    members = [rank for rank in range(job.ranks) if (job.stage[rank], job.tensor[rank]) in _groups(job, slow)]
    if job.gang and sorted(members) == sorted(slow):
        other_names |= {f"pp{p}/tp{t}" for p, t in _groups(job, slow)}
    roles = {job.stage[rank] for rank in slow}
    role = [rank for rank in range(job.ranks) if job.stage[rank] in roles]
    nameable = len(role) >= 4 and 2 * len(slow) < len(role)
    return Event(
        cause,
        shape,
        begin,
        onset,
        relief,
        end,
        early,
        late,
        float(level.max()),
        names,
        frozenset(other_names),
        nameable,
    )


def _groups(job: _Job, ranks: Sequence[int]) -> set[tuple[int, int]]:
    return {(job.stage[rank], job.tensor[rank]) for rank in ranks}


def _culprits(job: _Job, cause: Cause) -> list[int]:
    """Return the ranks whose own time grows."""
    random = job.random
    all_ranks = list(range(job.ranks))
    if not job.gang:
        culprit = int(random.integers(job.ranks))
        if cause is Cause.COMMUNICATION_INTER_NODE and random.random() < 0.3:
            return all_ranks  # the parameter servers, or the fabric
        node_ranks = [rank for rank in all_ranks if job.node[rank] == job.node[culprit]]
        return node_ranks if cause is not Cause.COMPUTE_GPU and random.random() < 0.5 else [culprit]
    # Usually the heaviest stage is slowed, because it would hide a slowdown of another stage.
    own = np.median(job.busy + job.transfer, axis=0)
    heaviest = job.stage[int(own.argmax())]
    candidates = [rank for rank in all_ranks if job.stage[rank] == heaviest] if random.random() < 0.8 else all_ranks
    culprit = int(random.choice(candidates))
    same_node = [
        rank for rank in all_ranks if job.node[rank] == job.node[culprit] and job.stage[rank] == job.stage[culprit]
    ]
    if cause is Cause.COMPUTE_GPU:
        return [culprit]
    if cause is Cause.COMPUTE_CPU:  # all ranks of the node, in whatever stage, or the ranks bound to the occupied cores
        probability = 1.0 if random.random() < 0.75 else 0.4
        node_ranks = [rank for rank in all_ranks if job.node[rank] == job.node[culprit]]
        return [rank for rank in node_ranks if rank == culprit or random.random() < probability]
    if cause is Cause.COMMUNICATION_INTRA_NODE:  # a tensor-parallel group, or all ranks that share the node's links
        tensor_group = [rank for rank in same_node if job.replica[rank] == job.replica[culprit]]
        return tensor_group if len(tensor_group) > 1 and random.random() < 0.7 else same_node
    if random.random() < 0.3:
        return all_ranks  # the fabric: all ranks are equally slow, and no rank is to blame
    return [rank for rank in all_ranks if (job.stage[rank], job.tensor[rank]) in _groups(job, [culprit])]


def _levels(random: np.random.Generator, shape: str, height: float, length: int) -> Array:
    """Return the relative slowdown of each iteration of an event, without noise."""
    if shape == "step":
        return np.full(length, height)
    if shape == "ramp":
        rise = int(min(length * random.uniform(0.2, 0.7), random.integers(20, 300)))
        return np.minimum(1.0, np.arange(1, length + 1) / max(rise, 1)) * height
    # Each step is below the limit of 10 %, so no step is detected alone. FALCON misses such slowdowns.
    steps, total = list[float](), 0.0
    while total < max(height, 0.15) and len(steps) < 6:
        steps.append(float(random.uniform(0.04, 0.095)))
        total += steps[-1]
    apart = max(5, min(int(random.integers(20, 101)), length // (len(steps) + 1)))
    done = np.minimum(np.arange(length) // apart, len(steps) - 1)
    return np.cumsum(steps)[done]


# --- what the job reports


def _report(
    job: _Job,
    name: str,
    about: str,
    minutes: int,
    seconds: float,
    disturbances: frozenset[str],
    events: tuple[Event, ...],
) -> Made:
    random = job.random
    unit = seconds * (1000.0 if random.random() < 0.3 else 1.0)
    busy, transfer, time = job.busy * unit, job.transfer * unit, job.time() * unit
    clock = np.arange(job.iterations, dtype=float) + float(random.choice((0, 1, 5000)))
    if job.gang and random.random() < 0.3:
        clock = 1.7e9 + np.cumsum(job.time()[:, 0] * seconds)
    grouping = ("", "stage", "group")[int(random.choice(3, p=(0.4, 0.3, 0.3)))] if job.gang else ""
    series, at = [], []
    for rank in range(job.ranks):
        recorded = np.flatnonzero(~job.lost[:, rank]) if job.lost is not None else np.arange(job.iterations)
        own = time[recorded, rank]
        # Each rank reads its own clock, slightly later.
        own = own * (1 + 1e-4 * random.standard_normal(len(recorded))) if job.gang else own
        parts: dict[str, list[float]] = {}
        if job.gang:
            waits = np.maximum(time[:, rank] - busy[:, rank] - transfer[:, rank], 0)
            parts = {"busy": busy[recorded, rank].tolist(), "transfer": transfer[recorded, rank].tolist()}
            parts["wait"] = waits[recorded].tolist()
        group = {"": "", "stage": f"pp{job.stage[rank]}", "group": f"pp{job.stage[rank]}/tp{job.tensor[rank]}"}[
            grouping
        ]
        series.append(
            Series(
                str(rank),
                own.tolist(),
                clock[recorded].tolist(),
                "rank" if job.gang else "worker",
                group,
                _node_name(job.node[rank]),
                regimes=[job.regime[iteration] for iteration in recorded] if job.regime else None,
                starts=tuple(int(np.searchsorted(recorded, start)) for start in job.starts),
                **parts,
            )
        )
        at.append(recorded)
    evidence = tuple(item for event in events for item in _evidence(job, event, clock))
    if not events and random.random() < 0.1:  # a hot node that is not slower
        begin = int(random.integers(0, job.iterations - 1))
        evidence = (_hot(_node_name(int(random.choice(job.node))), clock[begin], None),)
    return Made(
        name, job.gang, about, job.cv, minutes, seconds, disturbances, events, tuple(series), tuple(at), evidence
    )


def _evidence(job: _Job, event: Event, clock: Array) -> Iterator[Evidence]:
    if event.cause is Cause.COMPUTE_GPU and job.random.random() < 0.3:
        node = _node_name(job.node[int(next(iter(event.slow)))])
        yield _hot(node, clock[event.begin], clock[event.relief] if event.relief else None)


def _hot(node: str, begin: float, end: float | None) -> Evidence:
    text = "the GPU's clocks are held down by its temperature"
    return Evidence(node, float(begin), None if end is None else float(end), "gpu_clocks/hw_thermal", text)


def _node_name(node: int) -> str:
    return f"node{node + 1}"
