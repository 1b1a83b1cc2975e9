"""Measure how accurately the iteration time is read from a stream of operations (FALCON 2.2, step 2: at most 1.2 %).

It also counts wrong times that were reported without a warning. The generated streams have the calls of a training loop
in order: buckets, sharded layers, tensor-parallel and pipeline-parallel micro-batches. The name of a call is its kind,
or its kind and communicator. The streams include jitter, lost entries, a ring buffer that begins anywhere, the start of
a job, logged losses, evaluations, checkpoints and pauses.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from failslow.score import share
from healthd.failslow.period import PeriodNotFound, find_period

# maximum error of the time, and minimum share of streams within it; a stream without a period is not within it
AIM, MIN_SHARE = 0.012, 0.99
MIN_CONFIDENCE = 0.5  # confidence
LOST = (0.0, 1e-3, 1e-2)
MAX_OPERATIONS = 4_000  # number of operations in an iteration


@dataclass(frozen=True, slots=True)
class Stream:
    kind: str
    lost: float
    operations: list[str]
    times: list[float]
    seconds: float  # true time: the median of the iterations in the stream


def loop(kind: str, random: np.random.Generator) -> list[str]:
    """Return the operations of one iteration."""
    layers, batches = int(random.integers(4, 97)), int(random.choice((1, 2, 4, 8, 16)))
    gather, scatter, reduce = "all_gather", "reduce_scatter", "all_reduce"
    if kind == "buckets":
        return [reduce] * layers + ["broadcast"]
    if kind == "mixed":
        forward = [gather] * layers if random.random() < 0.5 else [gather, reduce] * layers
        backward = [gather, scatter] * layers if random.random() < 0.5 else [scatter] * layers
        return [*forward, *backward, reduce, "broadcast"]
    if kind == "sharded":
        return [gather, gather, scatter] * layers + [reduce]
    if kind == "sharded, in two passes":
        return [gather] * layers + [gather, scatter] * layers + [reduce]
    if kind == "sharded, accumulated":
        batch = [gather] * layers + [gather] * layers
        return batch * batches + [gather] * layers + [gather, scatter] * layers + [reduce, reduce]
    if kind == "tensor":
        return [gather, scatter] * (layers * batches) + [scatter, gather]
    if kind == "tensor, two passes":
        batch = [gather, scatter] * layers + [gather, scatter, gather] * layers
        return batch * batches + [reduce, scatter, gather]
    if kind == "pipeline":
        stages = int(random.integers(2, 9))
        steady = ["send", "recv", "send", "recv"] * int(random.integers(4, 65))
        return ["recv", "send"] * stages + steady + ["recv", "send"] * stages + [reduce, reduce]
    assert kind == "tensor and pipeline"
    stage = int(random.integers(4, 25))
    forward, backward = (
        ["recv", *[gather, scatter] * stage, "send"],
        ["recv", *[gather, scatter, gather] * stage, "send"],
    )
    return (forward + backward) * batches + [scatter, gather, reduce]


KINDS = (
    "buckets", "mixed", "sharded", "sharded, in two passes", "sharded, accumulated", "tensor", "tensor, two passes",
    "pipeline", "tensor and pipeline",
)  # fmt: skip


def stream(random: np.random.Generator, kind: str) -> Stream:
    iteration_operations = loop(kind, random)
    while len(iteration_operations) > MAX_OPERATIONS:
        iteration_operations = loop(kind, random)
    if random.random() < 0.5:  # named with the communicator; the last operations use another one
        iteration_operations = [
            f"{operation_or_time} dp" if at >= len(iteration_operations) - 2 else f"{operation_or_time} tp"
            for at, operation_or_time in enumerate(iteration_operations)
        ]
    iterations = int(random.integers(40, 200))
    shares = random.dirichlet(np.full(len(iteration_operations), 5.0))
    seconds = float(np.exp(random.uniform(np.log(0.3), np.log(20.0))))
    cv = random.uniform(0.02, 0.10)
    logs = int(random.choice((0, 10)))  # a loss, reduced every tenth iteration
    evaluates = int(random.choice((0, 0, 50)))
    saves = int(random.choice((0, 0, 30)))
    lost = float(random.choice(LOST))
    operations, times, begins, ends = list[str](), list[float](), list[float](), list[float]()
    clock = 1.7e9
    for _ in range(int(random.choice((0, 0, 60)))):
        operations.append(str(random.choice(("broadcast", "barrier", "all_gather", "all_reduce"))))
        times.append(clock)
        clock += random.random()
    for iteration in range(iterations):
        begins.append(clock)
        # The iteration varies as a whole, and each of its operations also varies by itself.
        took = seconds * shares * random.gamma(1 / cv**2, cv**2) * random.gamma(25.0, 0.04, len(iteration_operations))
        for operation, operation_or_time in zip(iteration_operations, took, strict=True):
            operations.append(operation)
            times.append(clock)
            clock += float(operation_or_time)
        ends.append(clock)
        if logs and iteration % logs == logs - 1:
            operations.append("all_reduce_loss" if random.random() < 0.5 else "all_reduce")
            times.append(clock)
            clock += 1e-4 * seconds
        if evaluates and iteration % evaluates == evaluates - 1:
            for operation in iteration_operations[: len(iteration_operations) // 3] * 5:
                operations.append(operation)
                times.append(clock)
                clock += float(seconds * shares[0])
        if saves and iteration % saves == saves - 1:
            operations.append("barrier")
            times.append(clock)
            clock += 3 * seconds
    kept = random.random(len(operations)) >= lost
    cut = int(random.integers(0, 2 * len(iteration_operations)))  # the ring buffer begins anywhere
    kept[:cut] = False
    durations = [end - begin for begin, end in zip(begins, ends, strict=True) if begin >= times[cut]]
    return Stream(
        kind,
        lost,
        [operation_or_time for operation_or_time, is_kept in zip(operations, kept, strict=True) if is_kept],
        [operation_or_time for operation_or_time, is_kept in zip(times, kept, strict=True) if is_kept],
        float(np.median(durations)),
    )


def verdicts(seed: int, streams: int) -> list[tuple[bool | None, str]]:
    """Return (met, sentence) for each measure of the errors of this many streams. met: None if there is no target."""
    random = np.random.default_rng(seed)
    errors, no_period, wrong_without_warning, doubtful = list[float](), 0, 0, 0
    missed: dict[str, int] = {}
    count, spent = 0, 0.0
    for at in range(streams):
        generated = stream(random, KINDS[at % len(KINDS)])
        begun = time.perf_counter()
        try:
            found = find_period(generated.operations, generated.times)
        except PeriodNotFound:
            no_period += 1
            missed[generated.kind] = missed.get(generated.kind, 0) + 1
            continue
        finally:
            spent += time.perf_counter() - begun
            count += len(generated.operations)
        errors.append(abs(found.iteration_seconds / generated.seconds - 1))
        if errors[-1] > AIM:
            missed[generated.kind] = missed.get(generated.kind, 0) + 1
            wrong_without_warning += found.confidence >= MIN_CONFIDENCE
        else:
            doubtful += found.confidence < MIN_CONFIDENCE
    median, p95, largest = (float(np.quantile(errors, part)) if errors else np.inf for part in (0.5, 0.95, 1.0))
    within_aim = sum(error <= AIM for error in errors)
    errors_text = f"{streams} streams: median {median:.2%}, p95 {p95:.2%}, max {largest:.2%}"
    share_text = f"at most {AIM:.1%} in {share(within_aim, streams)}"
    missed_text = ", ".join(f"{kind}: {number}" for kind, number in missed.items())
    return [
        (
            within_aim >= MIN_SHARE * streams,
            f"error of the iteration time, {errors_text}; {share_text}, aim {MIN_SHARE:.0%}",
        ),
        (
            not wrong_without_warning,
            f"larger errors without a warning (confidence {MIN_CONFIDENCE} or more): {wrong_without_warning}, aim 0",
        ),
        (
            None,
            f"{no_period} streams without a period, {doubtful} correct with a warning; missed: {missed_text or 'none'}",
        ),
        (None, f"{spent / max(1, count) * 1e6:.0f} us per operation, {count:,} operations"),
    ]


if __name__ == "__main__":
    for met, sentence in verdicts(101, 198):
        print("MISSED:" if met is False else "met:" if met else " ", sentence)
